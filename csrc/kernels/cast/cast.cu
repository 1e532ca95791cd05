// Many tensors in another dtype in one launch: what autocast does to a model's parameters.
#include "cast.h"

#include "kernels/common/launch.cuh"
#include "kernels/common/numeric.cuh"
#include "kernels/common/registry.h"
#include "kernels/common/tensor_list.cuh"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;

using CastList = TensorList<CastTensor, 128, 2048>;
static_assert(sizeof(CastList) <= 4096, "kernel parameters");

template <int N, typename From, typename To>
__device__ void cast_range(const CastTensor& t, int64_t begin, int64_t end) {
  const From* const from = static_cast<const From*>(t.from);
  To* const to = static_cast<To*>(t.to);
  for (int64_t i = begin + int64_t{threadIdx.x} * N; i < end; i += int64_t{kThreads} * N) {
    const Vec<From, N> values = load_vec<N>(from + i);
    Vec<To, N> result;
#pragma unroll
    for (int k = 0; k < N; ++k) result.v[k] = convert<To>(convert<acc_t<From>>(values.v[k]));
    store_vec(to + i, result);
  }
}

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) cast_kernel(const __grid_constant__ CastList list) {
  wait_for_earlier_kernels();
  int64_t begin, end;
  const CastTensor& t = list.of_block(&begin, &end);
  constexpr int N = kVecWidth<From> < kVecWidth<To> ? kVecWidth<To> : kVecWidth<From>;
  const auto address = reinterpret_cast<uintptr_t>(t.from) | reinterpret_cast<uintptr_t>(t.to);
  const int64_t vectors_end = address % 16 == 0 ? begin + (end - begin) / N * N : begin;
  cast_range<N, From, To>(t, begin, vectors_end);
  cast_range<1, From, To>(t, vectors_end, end);
}

const KernelEntry kEntry({"cast", "multi_tensor", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "many tensors in one launch, pointers as kernel parameters"});

}  // namespace

void cast(Stream stream, DType from, DType to, const CastTensor* tensors, int64_t count) {
  CastList list{};
  list.for_each_launch(tensors, count, [&] {
    dispatch(from, [&](auto source) {
      dispatch(to, [&](auto target) {
        launch_early(cast_kernel<typename decltype(source)::type, typename decltype(target)::type>,
                     list.blocks(), kThreads, 0, stream, list);
      });
    });
    check_launch("cast");
  });
}

}  // namespace braze::cuda
