// LAMB: a launch for the moments, which leaves sums of squares, one that makes the ratios of them,
// and one that updates.
#include "launchers/lamb.h"

#include "cuda/common/multi_tensor.cuh"
#include "cuda/common/ordered_sum.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"lamb", "multi_tensor", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "three launches for all parameters"});

constexpr int kTensors = update_tensors<LambTensor, LambOptions>(kManyParameters);
using Batch = UpdateBatch<LambOptions, LambTensor, kTensors>;
static_assert(sizeof(Batch) <= kManyParameters && kTensors <= kTickets, "kernel parameters");

__device__ bool skipped(const LambOptions& o) {
  return o.found_inf != nullptr && *o.found_inf != 0.0f;
}

// Made by one thread for its block: powers in double precision take hundreds of instructions.
template <typename A>
__device__ LambUpdate<A> shared_update(const LambOptions& o, double step) {
  __shared__ __align__(16) unsigned char shared[sizeof(LambUpdate<A>)];
  if (threadIdx.x == 0) new (shared) LambUpdate<A>(o, step);
  __syncthreads();
  return *reinterpret_cast<const LambUpdate<A>*>(shared);
}

template <typename T>
__device__ int64_t vectors_end(const LambTensor& t, int64_t begin, int64_t end) {
  const auto address =
      reinterpret_cast<uintptr_t>(t.param) | reinterpret_cast<uintptr_t>(t.grad) |
      reinterpret_cast<uintptr_t>(t.states[0]) | reinterpret_cast<uintptr_t>(t.states[1]) |
      reinterpret_cast<uintptr_t>(t.average) | reinterpret_cast<uintptr_t>(t.source);
  constexpr int N = kVecWidth<T>;
  return address % 16 == 0 ? begin + (end - begin) / N * N : begin;
}

// Moments; adds to the sums of squares of the parameter and of the update. S: of the sources.
template <int N, typename T, typename S>
__device__ void moments_range(const LambUpdate<acc_t<T>>& update, acc_t<T> factor,
                              const LambTensor& t, int64_t begin, int64_t end, double* of_param,
                              double* of_update) {
  using A = acc_t<T>;
  constexpr int64_t kStep = int64_t{kUpdateThreads} * N;
  const bool casts = !std::is_same_v<S, T> && t.source != nullptr;
  T* const means = static_cast<T*>(t.states[0]);
  T* const squares = static_cast<T*>(t.states[1]);
#pragma unroll 2
  for (int64_t i = begin + int64_t{threadIdx.x} * N; i < end; i += kStep) {
    const Vec<T, N> p = load_vec<N>(static_cast<const T*>(t.param) + i);
    Vec<T, N> g, m = load_vec<N>(means + i), v = load_vec<N>(squares + i);
    if (casts) {
      const Vec<S, N> source = load_vec<N>(static_cast<const S*>(t.source) + i);
#pragma unroll
      for (int k = 0; k < N; ++k) g.v[k] = convert<T>(convert<A>(source.v[k]));
      store_vec(static_cast<T*>(t.grad) + i, g);
    } else {
      g = load_vec<N>(static_cast<const T*>(t.grad) + i);
    }
    A param_sum = 0, update_sum = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      A mean = convert<A>(m.v[k]), square = convert<A>(v.v[k]);
      update.moments(scaled(convert<A>(g.v[k]), factor), mean, square);
      m.v[k] = convert<T>(mean);
      v.v[k] = convert<T>(square);
      const A value = convert<A>(p.v[k]);
      const A u = update.direction(value, convert<A>(m.v[k]), convert<A>(v.v[k]));
      param_sum += value * value;
      update_sum += u * u;
    }
    store_vec(means + i, m);
    store_vec(squares + i, v);
    *of_param += param_sum;
    *of_update += update_sum;
  }
}

template <typename T, typename S>
__global__ void __launch_bounds__(kUpdateThreads, 2)
    moments_kernel(const __grid_constant__ Batch batch) {
  using A = acc_t<T>;
  const LambOptions& o = batch.options;
  int64_t begin, end;
  const LambTensor& t = batch.list.of_block(blockIdx.x, &begin, &end);
  wait_for_earlier_kernels();
  if (skipped(o)) return;
  const int tensor = static_cast<int>(&t - batch.list.tensors);
  double step = 0;
  if (threadIdx.x == 0) {
    step = count_step(t.step, o.tickets + tensor, batch.list.blocks_of(tensor));
  }
  const auto update = shared_update<A>(o, step);
  const A factor = gradient_factor<A>(o);
  const int64_t middle = vectors_end<T>(t, begin, end);
  double of_param = 0, of_update = 0;
  moments_range<kVecWidth<T>, T, S>(update, factor, t, begin, middle, &of_param, &of_update);
  moments_range<1, T, S>(update, factor, t, middle, end, &of_param, &of_update);
  of_param = block_sum<kUpdateThreads>(of_param);
  __syncthreads();
  of_update = block_sum<kUpdateThreads>(of_update);
  if (threadIdx.x == 0) {
    o.sums[2 * blockIdx.x] = of_param;
    o.sums[2 * blockIdx.x + 1] = of_update;
  }
}

// A block for each tensor.
__global__ void __launch_bounds__(kUpdateThreads)
    ratio_kernel(const __grid_constant__ Batch batch) {
  const LambOptions& o = batch.options;
  wait_for_earlier_kernels();
  if (skipped(o)) return;
  const int tensor = blockIdx.x;
  double of_param = 0, of_update = 0;
  for (int b = batch.list.first_block[tensor] + threadIdx.x; b < batch.list.first_block[tensor + 1];
       b += kUpdateThreads) {
    of_param += o.sums[2 * b];
    of_update += o.sums[2 * b + 1];
  }
  of_param = block_sum<kUpdateThreads>(of_param);
  __syncthreads();
  of_update = block_sum<kUpdateThreads>(of_update);
  if (threadIdx.x == 0) o.ratios[tensor] = lamb_ratio(o, of_param, of_update);
}

template <int N, typename T>
__device__ void apply_range(const LambUpdate<acc_t<T>>& update, acc_t<T> step_size,
                            acc_t<T> average_weight, bool skip, const LambTensor& t, int64_t begin,
                            int64_t end) {
  using A = acc_t<T>;
  constexpr int64_t kStep = int64_t{kUpdateThreads} * N;
  T* const param = static_cast<T*>(t.param);
  T* const average = static_cast<T*>(t.average);
#pragma unroll 2
  for (int64_t i = begin + int64_t{threadIdx.x} * N; i < end; i += kStep) {
    Vec<T, N> p = load_vec<N>(param + i);
    if (!skip) {
      const Vec<T, N> m = load_vec<N>(static_cast<const T*>(t.states[0]) + i);
      const Vec<T, N> v = load_vec<N>(static_cast<const T*>(t.states[1]) + i);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A value = convert<A>(p.v[k]);
        const A u = update.direction(value, convert<A>(m.v[k]), convert<A>(v.v[k]));
        p.v[k] = convert<T>(multiply_add(-step_size, u, value));
      }
      store_vec(param + i, p);
    }
    if (average != nullptr) {
      Vec<T, N> averages = load_vec<N>(average + i);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        averages.v[k] = convert<T>(
            averaged_with(convert<A>(averages.v[k]), convert<A>(p.v[k]), average_weight));
      }
      store_vec(average + i, averages);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kUpdateThreads, 2)
    apply_kernel(const __grid_constant__ Batch batch) {
  using A = acc_t<T>;
  const LambOptions& o = batch.options;
  int64_t begin, end;
  const LambTensor& t = batch.list.of_block(blockIdx.x, &begin, &end);
  wait_for_earlier_kernels();
  const bool skip = skipped(o);
  if (o.averaged != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *o.averaged += 1;
  if (skip && t.average == nullptr) return;
  const auto update = shared_update<A>(o, skip ? 1 : *t.step);
  const double ratio = skip ? 0 : o.ratios[&t - batch.list.tensors];
  const A step_size = static_cast<A>(static_cast<double>(load_rate(o)) * ratio);
  const A weight = static_cast<A>(o.average_weight);
  const int64_t middle = vectors_end<T>(t, begin, end);
  apply_range<kVecWidth<T>, T>(update, step_size, weight, skip, t, begin, middle);
  apply_range<1, T>(update, step_size, weight, skip, t, middle, end);
}

}  // namespace

int64_t lamb_workspace(const LambTensor* tensors, int64_t count) {
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) {
    blocks += std::max<int64_t>(1, ceil_div(tensors[i].numel, kUpdateElements));
  }
  return blocks;
}

void lamb(Stream stream, DType dtype, const LambTensor* tensors, int64_t count,
          const LambOptions& options) {
  Batch batch;
  batch.options = options;
  const bool casts =
      std::any_of(tensors, tensors + count, [](const LambTensor& t) { return t.source; });
  // The lists of a long one share the workspace: they run one after the other.
  batch.list.for_each_launch<true>(tensors, count, [&] {
    const auto launch = [&](auto kernel, unsigned blocks) {
      launch_early(kernel, blocks, kUpdateThreads, 0, stream, batch);
      check_launch("lamb");
    };
    dispatch(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const unsigned blocks = batch.list.blocks();
      if constexpr (std::is_same_v<T, float>) {
        if (casts && options.source_dtype == DType::kBFloat16) {
          launch(moments_kernel<float, __nv_bfloat16>, blocks);
        } else if (casts) {
          launch(moments_kernel<float, __half>, blocks);
        } else {
          launch(moments_kernel<float, float>, blocks);
        }
      } else {
        launch(moments_kernel<T, T>, blocks);
      }
      launch(ratio_kernel, batch.list.count);
      launch(apply_kernel<T>, blocks);
    });
    batch.options.averaged = nullptr;  // counted once
  });
}

}  // namespace braze::cuda
