// The C functions that module.cpp looks up in each loaded library. They cannot be pybind11
// functions: the libraries do not depend on the Python version.
#include "exports.h"

#include <algorithm>

#include "launchers/common/registry.h"
#include "ops/plan_cache.h"

#ifdef BRAZE_CUDA
#include <cuda_runtime.h>

#include "libraries/libraries.h"
#endif

extern "C" {

BRAZE_EXPORT int braze_kernel_count() { return static_cast<int>(braze::kernel_registry().size()); }

BRAZE_EXPORT const braze::KernelInfo* braze_kernel_info(int i) {
  return &braze::kernel_registry()[i];
}

BRAZE_EXPORT int64_t braze_plans_made() { return braze::plans_made; }

BRAZE_EXPORT const BrazeTuning* braze_tuning() {
  static const BrazeTuning tuning{
      [](const int64_t* words, const char* choice, int measured) {
        braze::Product product;
        std::copy_n(words, product.size(), product.begin());
        braze::set_tuned_choice(product, choice, measured != 0);
      },
      [] { braze::clear_tuned_choices(); },
      [](braze::VisitChoice* visit, void* state) { braze::for_each_choice(visit, state); },
      [](int on) { braze::record_products(on != 0); },
      [](braze::VisitProduct* visit, void* state) { braze::for_each_recorded(visit, state); },
  };
  return &tuning;
}

#ifdef BRAZE_CUDA
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
