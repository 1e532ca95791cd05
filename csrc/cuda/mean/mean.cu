// The means of many pairs of tensors in one launch: of two processes' gradients.
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/tensor_list.cuh"
#include "launchers/common/registry.h"
#include "launchers/mean.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;

// A block takes 2048 elements.
using MeanList = TensorList<MeanTensor, 84, 2048>;
static_assert(sizeof(MeanList) <= 3840, "kernel parameters, of which there are 4 KB");

template <int N, typename From, typename To>
__device__ void mean_range(const MeanTensor& t, int64_t begin, int64_t end) {
  const auto half = [](From v) { return convert<acc_t<From>>(v) * acc_t<From>{0.5}; };
  for (int64_t i = begin + int64_t{threadIdx.x} * N; i < end; i += kThreads * N) {
    const Vec<From, N> first = load_vec<N>(static_cast<const From*>(t.first) + i);
    const Vec<From, N> second = load_vec<N>(static_cast<const From*>(t.second) + i);
    Vec<To, N> result;
#pragma unroll
    for (int k = 0; k < N; ++k) result.v[k] = convert<To>(half(first.v[k]) + half(second.v[k]));
    store_vec(static_cast<To*>(t.to) + i, result);
  }
}

template <typename From, typename To>
__device__ void mean_block(const MeanTensor& t, int64_t begin, int64_t end) {
  constexpr int N = kVecWidth<From> < kVecWidth<To> ? kVecWidth<To> : kVecWidth<From>;
  const auto address = reinterpret_cast<uintptr_t>(t.first) |
                       reinterpret_cast<uintptr_t>(t.second) | reinterpret_cast<uintptr_t>(t.to);
  const int64_t vectors_end = address % 16 == 0 ? begin + (end - begin) / N * N : begin;
  mean_range<N, From, To>(t, begin, vectors_end);
  mean_range<1, From, To>(t, vectors_end, end);
}

template <typename To>
__global__ void __launch_bounds__(kThreads) mean_kernel(const __grid_constant__ MeanList list) {
  wait_for_earlier_kernels();
  int64_t begin, end;
  const MeanTensor& t = list.of_block(blockIdx.x, &begin, &end);
  switch (t.from) {
    case DType::kFloat64: return mean_block<double, To>(t, begin, end);
    case DType::kFloat32: return mean_block<float, To>(t, begin, end);
    case DType::kBFloat16: return mean_block<__nv_bfloat16, To>(t, begin, end);
    case DType::kFloat16: return mean_block<__half, To>(t, begin, end);
  }
}

const KernelEntry kEntry({"mean", "multi_tensor", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "many pairs in one launch, pointers as kernel parameters"});

}  // namespace

void mean(Stream stream, DType to, const MeanTensor* tensors, int64_t count) {
  MeanList list{};
  list.for_each_launch(tensors, count, [&] {
    dispatch(to, [&](auto target) {
      launch_early(mean_kernel<typename decltype(target)::type>, list.blocks(), kThreads, 0, stream,
                   list);
    });
    check_launch("mean");
  });
}

}  // namespace braze::cuda
