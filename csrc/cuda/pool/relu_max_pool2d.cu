// Max pooling of relu(x + bias), channels_last, for windows of up to 3 x 3 that begin in every
// second row and column: what follows a convolution without batch norm. ReLU and the maximum
// commute, so that it is taken once for each window, and the place of the maximum is all that the
// backward reads: one pass that makes dx and sums it for the bias, where ReLU, pooling and the sum
// take three. Bytes for each 16-bit element of x at 2 x 2: forward 2.75, backward 2.75.
#include "cuda/common/channel_grads.cuh"
#include "cuda/common/cluster_mail.cuh"
#include "cuda/common/ordered_sum.cuh"
#include "launchers/common/registry.h"
#include "stride_2.cuh"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"relu_max_pool2d", "stride_2", "float64 float32 bfloat16 float16",
                          "sm_80+", true,
                          "with a bias before; windows up to 3 x 3, stride 2, channels_last"});

using PoolSplit = Split<FastDiv, int>;

// y and its gradient: N channels of a pixel.
struct Pooled {
  int64_t c;
  int p, q;
  bool turned;

  explicit Pooled(const ReluPoolShape& shape)
      : c(shape.pool.c),
        p(static_cast<int>(shape.pool.p)),
        q(static_cast<int>(shape.pool.q)),
        turned(shape.turned) {}

  template <int N, typename T>
  __device__ __forceinline__ Vec<T, N> load(const T* from, int64_t image, int row, int column,
                                            int64_t channel) const {
    if (!turned) return load_vec<N>(from + offset(image, row, column, channel));
    Vec<T, N> v;
#pragma unroll
    for (int k = 0; k < N; ++k) v.v[k] = from[turned_offset(image, row, column, channel + k)];
    return v;
  }
  template <int N, typename T>
  __device__ __forceinline__ void store(T* to, int64_t image, int row, int column, int64_t channel,
                                        const Vec<T, N>& v) const {
    if (!turned) return store_vec(to + offset(image, row, column, channel), v);
#pragma unroll
    for (int k = 0; k < N; ++k) to[turned_offset(image, row, column, channel + k)] = v.v[k];
  }

 private:
  __device__ __forceinline__ int64_t offset(int64_t image, int row, int column,
                                            int64_t channel) const {
    return ((image * p + row) * q + column) * c + channel;
  }
  __device__ __forceinline__ int64_t turned_offset(int64_t image, int row, int column,
                                                   int64_t channel) const {
    return ((image * c + channel) * p + row) * q + column;
  }
};

// kTaps: the window's, along either axis, at most. All its elements are on their way before the
// first is used.
template <typename T, int N, int kTaps>
__global__ void __launch_bounds__(kPoolThreads)
    relu_max_pool2d_kernel(const T* x, const void* biases, DType bias_dtype, T* __restrict__ y,
                           uint8_t* __restrict__ taps, int64_t count, PoolSplit split,
                           Window window, Pooled pooled) {
  wait_for_earlier_kernels();
  using A = acc_t<T>;
  const int64_t i = global_thread();
  if (i >= count) return;
  int64_t image;
  int p, q, group;
  split(i, &image, &p, &q, &group);
  const int64_t channel = int64_t{group} * N;
  const int h0 = 2 * p - window.pad_h, w0 = 2 * q - window.pad_w;
  const auto has = [&](int r, int s) {
    return r < window.r && s < window.s && h0 + r >= 0 && h0 + r < window.h && w0 + s >= 0 &&
           w0 + s < window.w;
  };
  Vec<T, N> elements[kTaps][kTaps];
#pragma unroll
  for (int r = 0; r < kTaps; ++r) {
#pragma unroll
    for (int s = 0; s < kTaps; ++s) {
      if (has(r, s)) {
        elements[r][s] = load_vec<N>(x + window.input_offset(image, h0 + r, w0 + s) + channel);
      }
    }
  }
  A bias[N] = {};
  if (biases) load_parameters(bias, biases, bias_dtype, channel);
  A best[N];
  int tap[N];
#pragma unroll
  for (int k = 0; k < N; ++k) best[k] = -static_cast<A>(INFINITY), tap[k] = 0;
#pragma unroll
  for (int r = 0; r < kTaps; ++r) {
#pragma unroll
    for (int s = 0; s < kTaps; ++s) {
      if (!has(r, s)) continue;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A value = convert<A>(convert<T>(convert<A>(elements[r][s].v[k]) + bias[k]));
        if (value > best[k] || value != value) {
          best[k] = value;
          tap[k] = r * window.s + s;
        }
      }
    }
  }
  Vec<T, N> result;
  Vec<uint8_t, N> chosen;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const bool stops = best[k] <= A(0);  // not NaN
    result.v[k] = convert<T>(stops ? A(0) : best[k]);
    chosen.v[k] = stops ? kNoTap : static_cast<uint8_t>(tap[k]);
  }
  pooled.store(y, image, p, q, channel, result);
  store_vec(taps + i * N, chosen);
}

constexpr int kGradThreads = 512, kGradWarps = kGradThreads / 32, kMostPitch = 32;

enum class Finish { kDirect, kCluster, kPartials };

// How pairs of rows and columns are shared out: a block takes a part of them for a tile of vectors
// of channels, `pitch` neighbouring threads, a power of two.
struct GradPlan {
  int64_t pairs, vectors;
  int log_pitch, splits;
  Finish finish;

  int pitch() const { return 1 << log_pitch; }
  int64_t lines() const { return kGradThreads >> log_pitch; }
  int64_t tiles() const { return ceil_div(vectors, int64_t{1} << log_pitch); }
};

// Each block leaves its sums as column_sum's do: alone, within its cluster, or in `partial`.
template <typename T, int N, int kReach>
__global__ void __launch_bounds__(kGradThreads)
    relu_max_pool2d_backward_kernel(const T* dy, const uint8_t* taps, T* __restrict__ dx,
                                    void* dbias, DType bias_dtype, GradPlan plan,
                                    acc_t<T>* __restrict__ partial, PoolSplit split, Window window,
                                    Pooled pooled) {
  wait_for_earlier_kernels();
  using A = acc_t<T>;
  __shared__ __align__(16) A sums[kGradWarps][N][kMostPitch];
  const int log_pitch = plan.log_pitch, pitch = 1 << log_pitch, splits = plan.splits;
  const int part = static_cast<int>(blockIdx.x % splits);
  const int64_t first_vector = int64_t{blockIdx.x / splits} << log_pitch;
  const int64_t vector = first_vector + (threadIdx.x & (pitch - 1));
  const int64_t begin = plan.pairs * part / splits, end = plan.pairs * (part + 1) / splits;
  __shared__ ClusterMail<A, N * kMostPitch> mail;
  if (plan.finish == Finish::kCluster) {
    const int vectors = static_cast<int>(min(int64_t{pitch}, plan.vectors - first_vector));
    if (part == 0 && threadIdx.x == 0) mail.expect(splits * vectors * N);
    cluster_meet();
  }
  A sum[N] = {};
  if (vector < plan.vectors) {
    for (int64_t i = begin + (threadIdx.x >> log_pitch); i < end; i += kGradThreads >> log_pitch) {
      int64_t image;
      int a, b, none;
      split(i, &image, &a, &b, &none);
      const auto load_grads = [&](int p, int q) {
        return pooled.load<N>(dy, image, p, q, vector * N);
      };
      stride_2_gradients<T, N, kReach>(window, taps, image, a, b, vector * N, load_grads,
                                       [&](int64_t offset, const A(&grad)[N]) {
                                         store_sums<T>(dx + offset, grad);
#pragma unroll
                                         for (int k = 0; k < N; ++k) sum[k] += grad[k];
                                       });
    }
  }
  if (!dbias && !partial) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    for (int lanes = pitch; lanes < 32; lanes *= 2) {
      sum[k] += __shfl_xor_sync(0xffffffff, sum[k], lanes);
    }
    if (lane < pitch) sums[warp][k][lane] = sum[k];
  }
  __syncthreads();
  static_assert(N * kMostPitch <= kGradThreads);
  const int column = threadIdx.x & (pitch - 1), k = threadIdx.x >> log_pitch;
  const bool has_channel = k < N && first_vector + column < plan.vectors;
  const int64_t channel = (first_vector + column) * N + k;
  double total = 0;  // few terms are left, and the last chance to lose accuracy
  if (has_channel) {
    for (int w = 0; w < kGradWarps; ++w) total += sums[w][k][column];
  }
  if (plan.finish == Finish::kPartials) {
    if (has_channel) partial[part * plan.vectors * N + channel] = static_cast<A>(total);
    return;
  }
  if (plan.finish == Finish::kCluster) {
    const int place = k * kMostPitch + column;
    if (has_channel) mail.send(static_cast<A>(total), part, place, 0);
    if (part > 0) return;
    mail.wait();
    total = 0;
    for (int s = 0; has_channel && s < splits; ++s) total += mail.values[s][place];
  }
  if (has_channel) store_value(dbias, bias_dtype, channel, total);
}

// Up to so many steps of a thread a cluster is done before a second launch would be.
constexpr int64_t kMostClusterSteps = 8;

// N: channels of a vector. with_bias: whether there is anything to sum.
GradPlan plan_gradients(const ReluPoolShape& shape, int N, bool with_bias) {
  GradPlan plan{shape.pairs(), shape.pool.c / N, 0, 1, Finish::kDirect};
  while (plan.pitch() < std::min<int64_t>(plan.vectors, kMostPitch)) ++plan.log_pitch;
  if (with_bias && runs_sm90_code()) {
    GradPlan one = plan;
    const auto steps = [&] { return ceil_div(one.pairs, one.lines() * kMaxCluster); };
    // Narrower tiles are more of them.
    while (one.log_pitch > 0 && steps() > 2) --one.log_pitch;
    if (steps() <= kMostClusterSteps) {
      one.splits =
          static_cast<int>(std::min<int64_t>(kMaxCluster, ceil_div(one.pairs, one.lines())));
      one.finish = one.splits > 1 ? Finish::kCluster : Finish::kDirect;
      return one;
    }
  }
  const int64_t most = ceil_div(int64_t{sm_count()} * 4, plan.tiles());
  plan.splits = static_cast<int>(std::min(most, ceil_div(plan.pairs, plan.lines() * 4)));
  if (with_bias && plan.splits > 1) plan.finish = Finish::kPartials;
  return plan;
}

// Channels of a vector, N: 16 bytes of them, or two, or one.
template <typename T>
int channels_of_vector(int64_t c, bool aligned) {
  if (aligned && c % kVecWidth<T> == 0) return kVecWidth<T>;
  return aligned && c % 2 == 0 ? 2 : 1;
}

template <typename T, typename F>
void with_channel_vectors(int64_t c, bool aligned, const F& f) {
  const int n = channels_of_vector<T>(c, aligned);
  if (n == kVecWidth<T>) return f(std::integral_constant<int, kVecWidth<T>>{});
  if constexpr (kVecWidth<T> > 2) {
    if (n == 2) return f(std::integral_constant<int, 2>{});
  }
  f(std::integral_constant<int, 1>{});
}

template <typename T>
void finish_sums(Stream stream, const void* partial, const GradPlan& plan, int64_t c, void* out) {
  launch_ordered_sum(stream, static_cast<const acc_t<T>*>(partial), plan.splits, c,
                     static_cast<T*>(out));
}

}  // namespace

void relu_max_pool2d(Stream stream, const ReluPoolShape& shape, const void* x, const void* bias,
                     void* y, uint8_t* taps) {
  const Pool2dShape& pool = shape.pool;
  if (pool.output_count() == 0) return;
  dispatch(pool.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    const bool aligned = is_vec_aligned(in) && is_vec_aligned(out) && is_vec_aligned(taps);
    with_channel_vectors<T>(pool.c, aligned, [&](auto width) {
      constexpr int N = decltype(width)::value;
      const int64_t count = pool.output_count() / N;
      const auto kernel = std::max(pool.r, pool.s) > 2 ? relu_max_pool2d_kernel<T, N, 3>
                                                       : relu_max_pool2d_kernel<T, N, 2>;
      launch_early(kernel, pool_blocks(count), kPoolThreads, 0, stream, in, bias, shape.bias, out,
                   taps, count, PoolSplit(pool.c / N, pool.q, pool.p), Window(pool), Pooled(shape));
    });
  });
  check_launch("relu_max_pool2d");
}

int64_t relu_max_pool2d_workspace_bytes(const ReluPoolShape& shape) {
  // Of the most parts that a plan may have, which are those of the widest vectors or of one
  // channel.
  const int64_t size = shape.pool.dtype == DType::kFloat64 ? 8 : 4;
  int64_t splits = 0;
  for (const int n : {1, 2, 4, 8}) {
    if (shape.pool.c % n != 0) continue;
    const GradPlan plan = plan_gradients(shape, n, true);
    if (plan.finish == Finish::kPartials) splits = std::max<int64_t>(splits, plan.splits);
  }
  return splits * shape.pool.c * size;
}

void relu_max_pool2d_backward(Stream stream, const ReluPoolShape& shape, const void* dy,
                              const uint8_t* taps, void* dx, void* dbias, void* workspace) {
  const Pool2dShape& pool = shape.pool;
  if (pool.input_count() == 0) return;
  dispatch(pool.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* grad = static_cast<const T*>(dy);
    T* out = static_cast<T*>(dx);
    const bool aligned = is_vec_aligned(grad) && is_vec_aligned(out) && is_vec_aligned(taps);
    with_channel_vectors<T>(pool.c, aligned, [&](auto width) {
      constexpr int N = decltype(width)::value;
      const GradPlan plan = plan_gradients(shape, N, dbias != nullptr);
      const auto kernel = std::max(pool.r, pool.s) > 2 ? relu_max_pool2d_backward_kernel<T, N, 2>
                                                       : relu_max_pool2d_backward_kernel<T, N, 1>;
      acc_t<T>* const partial =
          plan.finish == Finish::kPartials ? static_cast<acc_t<T>*>(workspace) : nullptr;
      const auto blocks = static_cast<unsigned>(plan.tiles() * plan.splits);
      launch_early_in_clusters(kernel, blocks, kGradThreads, 0, stream,
                               plan.finish == Finish::kCluster ? plan.splits : 1, grad, taps, out,
                               dbias, shape.bias, plan, partial,
                               PoolSplit(1, shape.pair_columns(), shape.pair_rows()), Window(pool),
                               Pooled(shape));
      check_launch("relu_max_pool2d_backward");
      if (!partial) return;
      if (shape.bias == pool.dtype) {
        finish_sums<T>(stream, partial, plan, pool.c, dbias);
      } else {
        finish_sums<float>(stream, partial, plan, pool.c, dbias);
      }
    });
  });
}

}  // namespace braze::cuda
