// The C functions that module.cpp looks up in each loaded library. They cannot be pybind11
// functions: the libraries do not depend on the Python version.
#include "exports.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "launchers/common/multiprocessors.h"
#include "launchers/common/registry.h"
#include "ops/plan_cache.h"
#include "ops/workspace_cache.h"

#ifdef BRAZE_CUDA
#include <cuda_runtime.h>

#include "libraries/libraries.h"
#endif

namespace {

braze::TunedProducts& products() { return braze::tuned_products; }
braze::TunedConvolutions& convolutions() { return braze::tuned_convolutions; }

template <auto table>
const BrazeTuning* tuning_of() {
  using Problem = typename std::decay_t<decltype(table())>::Problem;
  static const BrazeTuning tuning{
      std::tuple_size_v<Problem>,
      [](const int64_t* words, const char* choice, int measured) {
        Problem problem;
        std::copy_n(words, problem.size(), problem.begin());
        table().set(problem, choice, measured != 0);
      },
      [] { table().clear(); },
      [](braze::VisitChoice* visit, void* state) { table().for_each_choice(visit, state); },
      [](int on) { table().record(on != 0); },
      [](braze::VisitProblem* visit, void* state) { table().for_each_recorded(visit, state); },
  };
  return &tuning;
}

}  // namespace

extern "C" {

BRAZE_EXPORT int braze_kernel_count() { return static_cast<int>(braze::kernel_registry().size()); }

BRAZE_EXPORT const braze::KernelInfo* braze_kernel_info(int i) {
  return &braze::kernel_registry()[i];
}

BRAZE_EXPORT int64_t braze_plans_made() { return braze::plans_made; }

#ifndef BRAZE_CUDA
BRAZE_EXPORT int64_t braze_kept_workspace_bytes() { return braze::kept_workspace_bytes(); }
#endif

// Of "matmul" or "conv2d"; nullptr for other ops.
BRAZE_EXPORT const BrazeTuning* braze_tuning(const char* op) {
  if (std::strcmp(op, "matmul") == 0) return tuning_of<products>();
  return std::strcmp(op, "conv2d") == 0 ? tuning_of<convolutions>() : nullptr;
}

#ifdef BRAZE_CUDA
// How many multiprocessors launches may count on from now on; 0: all.
BRAZE_EXPORT void braze_set_multiprocessors(int count) {
  braze::multiprocessor_limit = count > 0 ? count : INT_MAX;
}

BRAZE_EXPORT int braze_device_attributes(int device, BrazeDeviceAttributes* out) {
  const auto get = [&](cudaDeviceAttr attribute, int64_t* value) {
    int v = 0;
    const cudaError_t error = cudaDeviceGetAttribute(&v, attribute, device);
    *value = v;
    return error;
  };
  const struct {
    cudaDeviceAttr attribute;
    int64_t* value;
  } queries[] = {
      {cudaDevAttrMultiProcessorCount, &out->sm_count},
      {cudaDevAttrClockRate, &out->sm_clock_khz},
      {cudaDevAttrMemoryClockRate, &out->memory_clock_khz},
      {cudaDevAttrGlobalMemoryBusWidth, &out->memory_bus_bits},
      {cudaDevAttrL2CacheSize, &out->l2_bytes},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &out->shared_bytes_per_block},
  };
  for (const auto& query : queries) {
    const cudaError_t error = get(query.attribute, query.value);
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  return 0;
}

BRAZE_EXPORT int braze_vendor_count() { return 2; }

// Loads the library where it was not used before.
BRAZE_EXPORT void braze_vendor_library(int i, BrazeVendorLibrary* out) {
  using namespace braze::vendor;
  static const std::string versions[] = {cublas_version(), cudnn_version()};
  static const BrazeVendorLibrary libraries[] = {
      {"cublas", versions[0].c_str(), cublas_missing().c_str()},
      {"cudnn", versions[1].c_str(), cudnn_missing().c_str()},
  };
  *out = libraries[i];
}
#endif

}  // extern "C"
