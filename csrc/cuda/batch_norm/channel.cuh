// What the batch norm kernels share: a channel's partial results and how a warp merges them, and
// what follows from the merged statistics. Partial results lie [channel][split] in the workspace.
#pragma once

#include "launchers/batch_norm.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/parameter.cuh"

namespace braze::cuda {

// Sums of dy and of dy * (x - mean) over a part of a channel.
template <typename A>
struct GradPartial {
  A sum, dot;
};

// BatchNormAffine and BatchNormBuffers as the kernels want them.
struct ForwardArgs {
  BatchNormAffine affine;
  void* running_mean;
  void* running_var;
  DType buffer_dtype;
  const int64_t* batches;  // read where `cumulative`
  bool cumulative;         // momentum = 1 / *batches
  double momentum, eps;
  BatchNormStatistics statistics;  // results
};

inline ForwardArgs forward_args(const BatchNormAffine& affine, const BatchNormBuffers& buffers,
                                double eps, const BatchNormStatistics& statistics) {
  return {affine,
          buffers.mean,
          buffers.var,
          buffers.dtype,
          buffers.batches,
          !buffers.momentum,
          buffers.momentum.value_or(0),
          eps,
          statistics};
}

// Adds one to *batches in a launch of its own, for kernels whose blocks all read it.
void count_batch(cudaStream_t stream, int64_t* batches);

// What follows from the partial results of a shape's channels, `splits` of each, in a launch of its
// own.
void merge_moments(cudaStream_t stream, const BatchNormShape& shape, const MomentsPartial* partials,
                   int splits, const ForwardArgs& args);

// batch_norm_train as one kernel, for tensors of least_bytes or more. Whether it is done: not where
// the GPU, the layout, the number of channels or the activation do not allow it.
bool batch_norm_resident(Stream stream, const BatchNormShape& shape, const void* x,
                         const ForwardArgs& forward, const BatchNormTail& tail, void* y, void* mask,
                         int64_t* batches, void* workspace, int64_t least_bytes);

struct BackwardArgs {
  BatchNormAffine affine;  // its bias is not read
  BatchNormStatistics statistics;
  void* dweight;
  void* dbias;
  void* dconstant;
  DType constant_dtype;
  bool training;
  bool has_sums;  // false: nothing depends on the sums
};

template <typename T>
bool vectors_fit(const T* p, int width) {
  return reinterpret_cast<uintptr_t>(p) % (sizeof(T) * width) == 0;
}

// Sums over teams of kLanes neighbouring lanes, in every lane; the same order in every run. A whole
// team calls it.
template <int kLanes, typename A>
__device__ __forceinline__ A team_sum(A v) {
  const unsigned team =
      kLanes == 32 ? ~0u : ((1u << kLanes % 32) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(team, v, offset);
  return v;
}
template <typename A>
__device__ __forceinline__ A warp_sum(A v) {
  return team_sum<32>(v);
}

// The same over the kLanes threads of a whole block.
template <int kLanes>
__device__ __forceinline__ double block_sum(double v) {
  __shared__ double warps[kLanes / 32];
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < kLanes / 32 ? warps[threadIdx.x % 32] : 0.0);
}

// Calls f(item) for items[lane], items[lane + kLanes], ... below count, in this order; the loads of
// kAtOnce of them are in flight together. Beyond count f is called with zeros.
template <int kLanes, int kAtOnce, typename Item, typename F>
__device__ __forceinline__ void for_each_item(const Item* items, int count, const F& f) {
  for (int i = threadIdx.x % kLanes; i < count; i += kLanes * kAtOnce) {
    Item loaded[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      loaded[u] = i + u * kLanes < count ? items[i + u * kLanes] : Item{};
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) f(loaded[u]);
  }
}

// The part of `total` that split `s` of `splits` starts with.
__host__ __device__ __forceinline__ int64_t split_begin(int64_t total, int s, int splits) {
  return total * s / splits;
}

// dx = dy * by_grad + (x - center) * by_input + offset.
template <typename A>
struct BackwardCoefficients {
  A by_grad, center, by_input, offset;
};

// A channel's statistics as they are stored: y = (x - mean) * scale + shift.
template <typename A>
struct ChannelStatistics {
  A mean, rstd, scale, shift;

  ChannelStatistics() = default;
  // What rounding the mean takes away goes into the shift.
  __device__ __forceinline__ ChannelStatistics(double exact_mean, double exact_rstd, double weight,
                                               double bias)
      : mean(static_cast<A>(exact_mean)),
        rstd(static_cast<A>(exact_rstd)),
        scale(static_cast<A>(exact_rstd * weight)),
        shift(static_cast<A>(bias -
                             (exact_mean - static_cast<double>(mean)) * exact_rstd * weight)) {}

  __device__ __forceinline__ void store(const BatchNormStatistics& to, int64_t c) const {
    static_cast<A*>(to.mean)[c] = mean;
    static_cast<A*>(to.rstd)[c] = rstd;
    static_cast<A*>(to.scale)[c] = scale;
    static_cast<A*>(to.shift)[c] = shift;
  }
};

// What a channel's coefficients are made with, beside its moments; loaded side by side.
struct ChannelParameters {
  LoadedValue weight, bias, running_mean, running_var;

  __device__ __forceinline__ ChannelParameters(const ForwardArgs& args, int64_t c)
      : weight(args.affine.weight, args.affine.dtype, c, 1),
        bias(args.affine.bias, args.affine.dtype, c, 0),
        running_mean(args.running_mean, args.buffer_dtype, c, 0),
        running_var(args.running_var, args.buffer_dtype, c, 1) {}
};

// Training: the running statistics after `count` elements of channel c, one thread. squares: about
// the mean.
__device__ inline void update_running(const ForwardArgs& args, const ChannelParameters& loaded,
                                      double count, double mean, double squares, int64_t c) {
  if (!args.running_mean) return;
  const double momentum = args.cumulative ? 1 / static_cast<double>(*args.batches) : args.momentum;
  store_value(args.running_mean, args.buffer_dtype, c,
              (1 - momentum) * loaded.running_mean + momentum * mean);
  store_value(args.running_var, args.buffer_dtype, c,
              (1 - momentum) * loaded.running_var + momentum * (squares / (count - 1)));
}

// And all that follows from them, one thread.
template <typename A>
__device__ void batch_coefficients(const ForwardArgs& args, const ChannelParameters& loaded,
                                   double count, double mean, double squares, int64_t c) {
  update_running(args, loaded, count, mean, squares, c);
  ChannelStatistics<A>(mean, rsqrt(squares / count + args.eps), loaded.weight, loaded.bias)
      .store(args.statistics, c);
}

template <typename A>
__device__ void batch_coefficients(const ForwardArgs& args, double count, double mean,
                                   double squares, int64_t c) {
  batch_coefficients<A>(args, ChannelParameters(args, c), count, mean, squares, c);
}

// A channel's moments, of what blocks have told each other: sums about pivots of their own.
struct ToldMoments {
  double mean = 0, squares = 0;  // after finish()

  // In w a block's pivot, in x and y the sums of deviations and of their squares.
  __device__ __forceinline__ void add(const float4& told, double elements, bool is_first) {
    if (is_first) origin_ = told.w;
    if (elements == 0) return;
    // The spread of the pivots bounds what the squares about one of them are more.
    const double delta = told.w - origin_;
    sum_ += told.x + delta * elements;
    squares += told.y + delta * (2.0 * told.x + delta * elements);
  }
  __device__ __forceinline__ void finish(double by_count) {
    const double offset = sum_ * by_count;
    mean = origin_ + offset;
    squares -= sum_ * offset;
  }

 private:
  double origin_ = 0, sum_ = 0;
};

// A whole warp, or a block of kLanes threads, merges `count` elements' moments. In one pass:
// deviations are from the first part's mean, which the spread of the parts' means bounds.
template <int kLanes = 32, typename Part, typename F>
__device__ MomentsPartial merged_parts(const Part* parts, int number, double count, const F& read) {
  const double origin = parts->mean;
  double sum = 0, squares = 0;
  for_each_item<kLanes, kLanes == 32 ? 9 : 4>(parts, number, [&](const Part& part) {
    const MomentsPartial p = read(part);
    const double delta = p.count > 0 ? p.mean - origin : 0;
    sum += delta * p.count;
    squares += p.squares + delta * delta * p.count;
  });
  if constexpr (kLanes > 32) {
    sum = block_sum<kLanes>(sum);
    squares = block_sum<kLanes>(squares);
  } else {
    sum = warp_sum(sum);
    squares = warp_sum(squares);
  }
  const double offset = sum / count;
  return {origin + offset, squares - sum * offset, count};
}

// Lane 0 stores what follows from them.
template <typename A, int kLanes = 32, typename Part, typename F>
__device__ void merge_parts(const ForwardArgs& args, const Part* parts, int number, double count,
                            int64_t c, const F& read) {
  const MomentsPartial merged = merged_parts<kLanes>(parts, number, count, read);
  if (threadIdx.x % kLanes == 0) batch_coefficients<A>(args, count, merged.mean, merged.squares, c);
}

// Evaluation, one thread.
template <typename A>
__device__ void running_coefficients(const ForwardArgs& args, int64_t c) {
  const ChannelParameters loaded(args, c);
  const double rstd = 1 / sqrt(loaded.running_var + args.eps), mean = loaded.running_mean;
  // (The mean is of the buffer's dtype, which is no longer than A.)
  ChannelStatistics<A>(mean, rstd, loaded.weight, loaded.bias).store(args.statistics, c);
}

// What a channel's gradients are made with, beside its sums; loaded side by side.
template <typename A>
struct GradParameters {
  A rstd, center;
  LoadedValue weight;

  __device__ __forceinline__ GradParameters(const BackwardArgs& args, int64_t c)
      : rstd(static_cast<const A*>(args.statistics.rstd)[c]),
        center(static_cast<const A*>(args.statistics.mean)[c]),
        weight(args.affine.weight, args.affine.dtype, c, 1) {}
};

// What follows from a channel's sums of dy and of dy * (x - mean), one thread. first: it stores the
// parameters' gradients.
template <typename A>
__device__ BackwardCoefficients<A> grad_coefficients(const BackwardArgs& args,
                                                     const GradParameters<A>& loaded, double sum,
                                                     double dot, int64_t count, int64_t c,
                                                     bool first) {
  const double rstd = loaded.rstd, scale = rstd * loaded.weight;
  const double by_count = 1 / static_cast<double>(count);
  if (first) {
    store_value(args.dweight, args.affine.dtype, c, dot * rstd);
    store_value(args.dbias, args.affine.dtype, c, sum);
    if (args.dconstant) {
      // In training dx sums to 0, or to NaN where a gradient is not finite.
      const double through = args.training ? 0 : scale;
      store_value(args.dconstant, args.constant_dtype, c, sum * through);
    }
  }
  return {static_cast<A>(scale), loaded.center,
          static_cast<A>(-scale * rstd * rstd * dot * by_count),
          static_cast<A>(-scale * sum * by_count)};
}

// A team of kLanes lanes merges the parts; the first one's result counts.
template <typename A, int kLanes = 32>
__device__ BackwardCoefficients<A> merge_grads(const BackwardArgs& args,
                                               const GradPartial<A>* partials, int splits,
                                               int64_t count, int64_t c, bool first) {
  const GradParameters<A> loaded(args, c);
  double sum = 0, dot = 0;
  if (args.has_sums) {
    for_each_item<kLanes, 9>(partials + c * splits, splits, [&](const GradPartial<A>& part) {
      sum += part.sum;
      dot += part.dot;
    });
    sum = team_sum<kLanes>(sum);
    dot = team_sum<kLanes>(dot);
  }
  if (threadIdx.x % kLanes != 0) return {};
  return grad_coefficients(args, loaded, sum, dot, count, c, first);
}

// What a channel's input gradient is made with: dx = dy' * by_grad + (x - mean) * by_input +
// offset, [c] each.
template <typename A>
struct GradCoefficients {
  A* by_grad;
  A* by_input;
  A* offset;
};

template <typename A>
__device__ __forceinline__ void store_coefficients(const BackwardCoefficients<A>& k,
                                                   const BatchNormStatistics& statistics, int64_t c,
                                                   const GradCoefficients<A>& results) {
  // As the forward pass rounded it, where the value before the activation is made with it again.
  const A* scale = static_cast<const A*>(statistics.scale);
  results.by_grad[c] = scale ? scale[c] : k.by_grad;
  results.by_input[c] = k.by_input;
  results.offset[c] = k.offset;
}

}  // namespace braze::cuda
