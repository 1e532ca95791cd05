// The norm of all gradients together in one launch per dtype: each block leaves its sum of squares,
// the last one to finish adds them up in a fixed order.
#include "launchers/grad_norm.h"

#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/ordered_sum.cuh"
#include "cuda/common/tensor_list.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kElements = 4096;  // of a block

struct Total {
  double* workspace;  // of this launch's blocks
  const double* all;
  int64_t sums;
  const float* grad_scale;
  double* norm;  // or null: others follow
  unsigned* ticket;
};

template <int kTensors>
struct NormBatch {
  Total total;
  TensorList<NormTensor, kTensors, kElements> list;
};
// What is cheap to launch, and what there is: see cuda/common/multi_tensor.cuh.
constexpr int kFew = 190, kMany = 1600;
static_assert(sizeof(NormBatch<kFew>) <= 4096 && sizeof(NormBatch<kMany>) <= 32764, "parameters");

template <int N, typename T>
__device__ double squares(const T* values, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  constexpr int kBatch = 4;
  constexpr int64_t kStep = int64_t{kThreads} * N;
  double total = 0;
#pragma unroll 1
  for (int64_t i = begin + int64_t{threadIdx.x} * N; i < end; i += kBatch * kStep) {
    Packed<T, N> loaded[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (i + b * kStep < end) loaded[b].load(values + i + b * kStep);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (i + b * kStep >= end) break;
      const Vec<T, N> v = loaded[b].unpacked();
      A sum = 0;
#pragma unroll
      for (int k = 0; k < N; ++k) sum += convert<A>(v.v[k]) * convert<A>(v.v[k]);
      total += sum;
    }
  }
  return total;
}

template <typename T, typename Batch>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ Batch batch) {
  const Total& t = batch.total;
  int64_t begin, end;
  const NormTensor& tensor = batch.list.of_block(blockIdx.x, &begin, &end);
  wait_for_earlier_kernels();
  constexpr int N = kVecWidth<T>;
  const T* const values = static_cast<const T*>(tensor.values);
  const int64_t vectors_end =
      reinterpret_cast<uintptr_t>(values) % 16 == 0 ? begin + (end - begin) / N * N : begin;
  const double own = block_sum<kThreads>(squares<N>(values, begin, vectors_end) +
                                         squares<1>(values, vectors_end, end));
  __shared__ bool last;
  if (threadIdx.x == 0) {
    t.workspace[blockIdx.x] = own;
    __threadfence();
    last = t.norm != nullptr && atomicInc(t.ticket, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  double sum = 0;
  for (int64_t i = threadIdx.x; i < t.sums; i += kThreads) sum += __ldcg(t.all + i);
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) *t.norm = sqrt(sum) / (t.grad_scale == nullptr ? 1.0 : *t.grad_scale);
}

template <int kTensors>
void launch_norms(Stream stream, DType dtype, const NormTensor* tensors, int64_t count,
                  Total total) {
  NormBatch<kTensors> batch;
  batch.total = total;
  int64_t left = grad_norm_workspace(tensors, count);
  batch.list.for_each_launch(tensors, count, [&] {
    left -= batch.list.blocks();
    batch.total.norm = left == 0 ? total.norm : nullptr;
    dispatch(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      launch_early(norm_kernel<T, NormBatch<kTensors>>, batch.list.blocks(), kThreads, 0, stream,
                   batch);
    });
    check_launch("grad_norm");
    batch.total.workspace += batch.list.blocks();
  });
}

const KernelEntry kEntry({"grad_norm", "multi_tensor", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "all tensors in one launch, pointers as kernel parameters"});

}  // namespace

int64_t grad_norm_workspace(const NormTensor* tensors, int64_t count) {
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) blocks += ceil_div(tensors[i].numel, kElements);
  return blocks;
}

void grad_norm(Stream stream, DType dtype, const NormTensor* tensors, int64_t count,
               double* workspace, const double* all, int64_t sums, const float* grad_scale,
               double* norm, unsigned* ticket) {
  const Total total{workspace, all, sums, grad_scale, norm, ticket};
  if (count <= kFew) {
    launch_norms<kFew>(stream, dtype, tensors, count, total);
  } else {
    launch_norms<kMany>(stream, dtype, tensors, count, total);
  }
}

}  // namespace braze::cuda
