// An optimizer's update of many tensors in one launch.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/ordered_sum.cuh"
#include "cuda/common/parameter.cuh"
#include "cuda/common/tensor_list.cuh"
#include "launchers/common/update.h"

namespace braze::cuda {

constexpr int kUpdateThreads = 256;
constexpr int64_t kUpdateElements = 2048;  // of a block

// Kernel parameters, in bytes: what is cheap to launch, and what there is from CUDA 12.1 on
// (CUDA C++ Programming Guide, "Kernel function parameter limit").
constexpr size_t kFewParameters = 4096, kManyParameters = 32764;

// Tensors that fit beside the options.
template <typename Tensor, typename Options>
constexpr int update_tensors(size_t bytes) {
  return static_cast<int>((bytes - sizeof(Options) - 3 * sizeof(int64_t)) /
                          (sizeof(Tensor) + sizeof(int)));
}

template <typename Options, typename Tensor, int kTensors>
struct UpdateBatch {
  Options options;
  TensorList<Tensor, kTensors, kUpdateElements> list;
};

__device__ __forceinline__ LoadedValue load_rate(const UpdateOptions& o) {
  return LoadedValue(o.lr_tensor, o.lr_is_double ? DType::kFloat64 : DType::kFloat32, 0, o.lr);
}

// The number of this step of a tensor, counted by the last of its blocks that has read how many
// there were. Called by one thread of each block.
__device__ __forceinline__ double count_step(float* step, unsigned* ticket, int64_t blocks) {
  const float number = *static_cast<volatile float*>(step) + 1;
  if (blocks > 1) {
    __threadfence();  // the read comes before the ticket
    if (atomicInc(ticket, static_cast<unsigned>(blocks - 1)) != blocks - 1) return number;
  }
  *step = number;
  return number;
}

// Whether an update leaves sums of the squares of what it writes, in options.squares.
template <typename Update, typename = void>
constexpr bool kSumsSquares = false;
template <typename Update>
constexpr bool kSumsSquares<Update, std::enable_if_t<Update::kSumsSquares>> = true;

// S: dtype of the sources. kAverages: there are averages, which are written also where the update
// is skipped. kBatch vectors are loaded before the first is stored. Returns the thread's sum of
// squares, if the update wants it.
template <int N, bool kAverages, typename T, typename S, typename Update, typename Tensor>
__device__ __forceinline__ double update_range(Update update, const LoadedValue& lr,
                                               acc_t<T> factor, acc_t<T> average_weight,
                                               bool skipped, const Tensor& t, int64_t begin,
                                               int64_t end) {
  using A = acc_t<T>;
  constexpr int kStates = Update::kStates;
  constexpr int kBatch = 2;
  constexpr int64_t kStep = int64_t{kUpdateThreads} * N;
  T* const param = static_cast<T*>(t.param);
  T* const grad = static_cast<T*>(t.grad);
  T* const average = static_cast<T*>(t.average);
  const S* const source = static_cast<const S*>(t.source);
  const bool casts = !std::is_same_v<S, T> && source != nullptr;
  const bool skip = kAverages && skipped;
  const unsigned has = t.has() | (((1u << kStates) - 1) & ~Update::kOptional);
  const unsigned read = !skip && update.reads_states() ? has : 0;
  double squares = 0;
#pragma unroll 1
  for (int64_t i = begin + int64_t{threadIdx.x} * N; i < end; i += kBatch * kStep) {
    Packed<T, N> p[kBatch], g[kBatch], kept[kStates][kBatch] = {}, old[kBatch] = {};
    Packed<S, N> from[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t at = i + b * kStep;
      if (at >= end) break;
      if (Update::kReadsParam) p[b].load(param + at);
      if (!skip) {
        if (casts) {
          from[b].load(source + at);
        } else {
          g[b].load(grad + at);
        }
      }
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        if (read >> s & 1) kept[s][b].load(static_cast<const T*>(t.states[s]) + at);
      }
      if (kAverages) old[b].load(average + at);
    }
    update.set_rate(lr);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t at = i + b * kStep;
      if (at >= end) break;
      Vec<T, N> params{};
      if (Update::kReadsParam) params = p[b].unpacked();
      if (!skip) {
        Vec<T, N> grads;
        if (casts) {
          const Vec<S, N> sources = from[b].unpacked();
#pragma unroll
          for (int k = 0; k < N; ++k) grads.v[k] = convert<T>(convert<A>(sources.v[k]));
          if (grad != nullptr) store_vec(grad + at, grads);
        } else {
          grads = g[b].unpacked();
        }
        Vec<T, N> states[kStates];
#pragma unroll
        for (int s = 0; s < kStates; ++s) states[s] = kept[s][b].unpacked();
#pragma unroll
        for (int k = 0; k < N; ++k) {
          A value = convert<A>(params.v[k]), state[kStates];
#pragma unroll
          for (int s = 0; s < kStates; ++s) state[s] = convert<A>(states[s].v[k]);
          update(value, scaled(convert<A>(grads.v[k]), factor), state, has);
          params.v[k] = convert<T>(value);
#pragma unroll
          for (int s = 0; s < kStates; ++s) states[s].v[k] = convert<T>(state[s]);
        }
        store_vec(param + at, params);
        if constexpr (kSumsSquares<Update>) {
          A sum = 0;
#pragma unroll
          for (int k = 0; k < N; ++k) sum += convert<A>(params.v[k]) * convert<A>(params.v[k]);
          squares += sum;
        }
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          if (has >> s & 1) store_vec(static_cast<T*>(t.states[s]) + at, states[s]);
        }
      }
      if (kAverages) {
        Vec<T, N> averages = old[b].unpacked();
#pragma unroll
        for (int k = 0; k < N; ++k) {
          averages.v[k] = convert<T>(
              averaged_with(convert<A>(averages.v[k]), convert<A>(params.v[k]), average_weight));
        }
        store_vec(average + at, averages);
      }
    }
  }
  return squares;
}

// Blocks that an SM is to hold: as many as registers allow without spills.
template <typename Update, bool kAverages, typename T>
constexpr int kUpdateBlocks = Update::kStates > 1 ? (sizeof(T) == 4 && !kAverages ? 3 : 2)
                              : kAverages         ? 3
                              : sizeof(T) == 8    ? 4
                                                  : 5;

template <template <typename> class Update, bool kAverages, typename T, typename S, typename Batch>
__global__ void __launch_bounds__(kUpdateThreads, kUpdateBlocks<Update<acc_t<T>>, kAverages, T>)
    update_kernel(const __grid_constant__ Batch batch) {
  using A = acc_t<T>;
  using U = Update<A>;
  const auto& o = batch.options;
  int64_t begin, end;
  const auto& t = batch.list.of_block(blockIdx.x, &begin, &end);
  wait_for_earlier_kernels();
  const bool skip = o.found_inf != nullptr && *o.found_inf != 0.0f;
  if (kAverages && o.averaged != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *o.averaged += 1;
  if (skip && !kAverages) return;
  const LoadedValue lr = load_rate(o);
  const A factor = gradient_factor<A>(o);

  const auto update_all = [&](const U& update) {
    constexpr int N = kVecWidth<T>;
    auto address = reinterpret_cast<uintptr_t>(t.param) | reinterpret_cast<uintptr_t>(t.grad) |
                   reinterpret_cast<uintptr_t>(t.source) | reinterpret_cast<uintptr_t>(t.average);
    for (int s = 0; s < U::kStates; ++s) address |= reinterpret_cast<uintptr_t>(t.states[s]);
    const A weight = static_cast<A>(o.average_weight);
    const int64_t vectors_end = address % 16 == 0 ? begin + (end - begin) / N * N : begin;
    return update_range<N, kAverages, T, S>(update, lr, factor, weight, skip, t, begin,
                                            vectors_end) +
           update_range<1, kAverages, T, S>(update, lr, factor, weight, skip, t, vectors_end, end);
  };
  if constexpr (U::kReadsStep) {
    // By one thread: powers in double precision take hundreds of instructions.
    __shared__ __align__(16) unsigned char shared[sizeof(U)];
    if (threadIdx.x == 0) {
      const int tensor = static_cast<int>(&t - batch.list.tensors);
      const double step =
          skip ? 1 : count_step(t.step, o.tickets + tensor, batch.list.blocks_of(tensor));
      new (shared) U(o, step);
    }
    __syncthreads();
    update_all(*reinterpret_cast<const U*>(shared));
  } else {
    if constexpr (U::kCountsSteps) {
      if (!skip && begin == 0 && threadIdx.x == 0) *t.step += 1;
    }
    [[maybe_unused]] const double squares = update_all(U(o, 0));
    if constexpr (kSumsSquares<U>) {
      if (o.squares == nullptr) return;
      const double sum = block_sum<kUpdateThreads>(squares);
      if (threadIdx.x == 0) o.squares[blockIdx.x] = sum;
    }
  }
}

// Launches the updates of a list, kTensors at a time.
template <template <typename> class Update, int kTensors, bool kAverages, typename Options,
          typename Tensor>
void launch_lists(const char* name, Stream stream, DType dtype, const Tensor* tensors,
                  int64_t count, const Options& options) {
  using Batch = UpdateBatch<Options, Tensor, kTensors>;
  static_assert(kTensors <= kTickets && sizeof(Batch) <= kManyParameters, "kernel parameters");
  constexpr bool kCountsSteps = Update<float>::kCountsSteps;
  Batch batch;
  batch.options = options;
  const bool casts =
      std::any_of(tensors, tensors + count, [](const Tensor& t) { return t.source; });
  batch.list.template for_each_launch<kCountsSteps>(tensors, count, [&] {
    const auto launch = [&](auto kernel) {
      launch_early(kernel, batch.list.blocks(), kUpdateThreads, 0, stream, batch);
    };
    dispatch(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (std::is_same_v<T, float>) {
        if (casts) {
          return options.source_dtype == DType::kBFloat16
                     ? launch(update_kernel<Update, kAverages, float, __nv_bfloat16, Batch>)
                     : launch(update_kernel<Update, kAverages, float, __half, Batch>);
        }
      }
      launch(update_kernel<Update, kAverages, T, T, Batch>);
    });
    check_launch(name);
    batch.options.averaged = nullptr;  // counted once
    if constexpr (kSumsSquares<Update<float>>) {
      if (batch.options.squares) batch.options.squares += batch.list.blocks();
    }
  });
}

template <template <typename> class Update, typename Options, typename Tensor>
void multi_tensor_update(const char* name, Stream stream, DType dtype, const Tensor* tensors,
                         int64_t count, const Options& options) {
  constexpr int kFew = update_tensors<Tensor, Options>(kFewParameters);
  constexpr int kMany = update_tensors<Tensor, Options>(kManyParameters);
  if (count > 0 && tensors[0].average != nullptr) {
    launch_lists<Update, kMany, true>(name, stream, dtype, tensors, count, options);
  } else if (count <= kFew) {
    launch_lists<Update, kFew, false>(name, stream, dtype, tensors, count, options);
  } else {
    launch_lists<Update, kMany, false>(name, stream, dtype, tensors, count, options);
  }
}

}  // namespace braze::cuda
