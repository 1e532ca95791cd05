// The kernels of small_k.h. Forward: moments (one pass over the input), finalize (K x K algebra),
// convolve + normalise + ReLU + pool in registers. Backward: one pass over the pooled gradient,
// finalize.
#include "small_k.h"

#include "kernels/common/launch.cuh"
#include "kernels/common/numeric.cuh"
#include "kernels/common/registry.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Blocks that leave a partial sum: bounds the workspace and the time to add them up.
constexpr int kMaxBlocks = 1056, kMaxMomentBlocks = 396;

// The filter extents as compile-time constants, so that a patch lives in registers.
template <int C_, int R_, int S_>
struct Taps {
  static constexpr int C = C_, R = R_, S = S_;
  static constexpr int K = C * R * S;
  static constexpr int kPairs = K * (K + 1) / 2;
  static constexpr int kMoments = K + kPairs;
  // The input under a 2x2 window of outputs.
  static constexpr int kWinH = R + 1, kWinW = S + 1, kWin = C * kWinH * kWinW;
};

template <typename F>
void dispatch_taps(const SmallKShape& a, F&& f) {
  if (a.r == 3 && a.s == 3) {
    if (a.c == 1) return f(Taps<1, 3, 3>{});
    if (a.c == 2) return f(Taps<2, 3, 3>{});
    if (a.c == 3) return f(Taps<3, 3, 3>{});
  }
  if (a.r == 5 && a.s == 5 && a.c == 1) return f(Taps<1, 5, 5>{});
  throw std::runtime_error("small_k: no kernel for these filter extents");
}

template <typename A, typename T>
__device__ __forceinline__ A load_input(const SmallKShape& a, const T* x, int64_t n, int c, int h,
                                        int w) {
  if (static_cast<unsigned>(h) >= static_cast<unsigned>(a.h) ||
      static_cast<unsigned>(w) >= static_cast<unsigned>(a.w)) {
    return A(0);
  }
  return convert<A>(x[n * a.x_n + c * a.x_c + h * a.x_h + w * a.x_w]);
}

__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}

// Sums of p_i and of p_i p_j over all patches, a partial sum for each block. A thread walks down a
// strip of outputs with the rows of the patch in registers, so that it loads and converts each
// input S times instead of K. The pairs are dealt out over gridDim.y in slices, so that K = 27 (378
// pairs) needs no more registers than K = 9.
constexpr int kPairsPerSlice = 48;
constexpr int kMomentThreads = 128;

template <typename Tp, typename T, int kSlice>
__device__ __forceinline__ void moments_slice(const SmallKShape& a, const T* x, int strip_rows,
                                              double* partial, double* shared) {
  constexpr int kFirst = kSlice * kPairsPerSlice;
  constexpr int kCount =
      Tp::kPairs - kFirst < kPairsPerSlice ? Tp::kPairs - kFirst : kPairsPerSlice;
  constexpr int kMeans = kSlice == 0 ? Tp::K : 0;
  double sum[kMeans + kCount] = {};
  const int p = static_cast<int>(a.p), q = static_cast<int>(a.q);
  const int strips = (p + strip_rows - 1) / strip_rows;
  const int64_t work = a.n * strips * q;
  for (int64_t i = blockIdx.x * int64_t{kMomentThreads} + threadIdx.x; i < work;
       i += int64_t{gridDim.x} * kMomentThreads) {
    const int64_t strip = i / q;
    const int column = static_cast<int>(i - strip * q) - static_cast<int>(a.pad_w);
    const int64_t n = strip / strips;
    const int first = static_cast<int>(strip - n * strips) * strip_rows;
    const int last = min(first + strip_rows, p);
    const T* image = x + n * a.x_n + column * a.x_w;
    double patch[Tp::K];
    const auto load_row = [&](int r, int h) {
#pragma unroll
      for (int c = 0; c < Tp::C; ++c) {
#pragma unroll
        for (int s = 0; s < Tp::S; ++s) {
          const bool inside = static_cast<unsigned>(h) < static_cast<unsigned>(a.h) &&
                              static_cast<unsigned>(column + s) < static_cast<unsigned>(a.w);
          const T* from = image + c * a.x_c + h * a.x_h + s * a.x_w;
          patch[(c * Tp::R + r) * Tp::S + s] = inside ? convert<double>(*from) : 0.0;
        }
      }
    };
#pragma unroll
    for (int r = 1; r < Tp::R; ++r) load_row(r, first - static_cast<int>(a.pad_h) + r - 1);
    for (int row = first; row < last; ++row) {
#pragma unroll
      for (int k = 0; k < Tp::K; ++k) {
        if (k / Tp::S % Tp::R < Tp::R - 1) patch[k] = patch[k + Tp::S];
      }
      load_row(Tp::R - 1, row - static_cast<int>(a.pad_h) + Tp::R - 1);
      if (kMeans > 0) {
#pragma unroll
        for (int k = 0; k < Tp::K; ++k) sum[k] += patch[k];
      }
      int pair = 0;
#pragma unroll
      for (int k = 0; k < Tp::K; ++k) {
#pragma unroll
        for (int l = k; l < Tp::K; ++l, ++pair) {
          const int local = pair - kFirst;
          if (local >= 0 && local < kCount) sum[kMeans + local] += patch[k] * patch[l];
        }
      }
    }
  }
  // Block reduction in a fixed order: warps by shuffle, then the warps' sums.
  constexpr int kMomentWarps = kMomentThreads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < kMeans + kCount; ++k) {
    const double value = warp_sum(sum[k]);
    if (lane == 0) shared[k * kMomentWarps + warp] = value;
  }
  __syncthreads();
  for (int slot = threadIdx.x; slot < kMeans + kCount; slot += kMomentThreads) {
    double total = 0;
    for (int w = 0; w < kMomentWarps; ++w) total += shared[slot * kMomentWarps + w];
    const int moment = kMeans > 0 ? slot : Tp::K + kFirst + slot;
    partial[int64_t{moment} * gridDim.x + blockIdx.x] = total;
  }
}

template <typename Tp, typename T, int kSlice = 0>
__device__ __forceinline__ void moments_dispatch(const SmallKShape& a, const T* x, int strip_rows,
                                                 double* partial, double* shared) {
  if constexpr (kSlice * kPairsPerSlice < Tp::kPairs) {
    if (blockIdx.y == kSlice) {
      moments_slice<Tp, T, kSlice>(a, x, strip_rows, partial, shared);
    } else {
      moments_dispatch<Tp, T, kSlice + 1>(a, x, strip_rows, partial, shared);
    }
  }
}

template <typename Tp, typename T>
__global__ void __launch_bounds__(kMomentThreads)
    moments_kernel(SmallKShape a, const T* __restrict__ x, int strip_rows,
                   double* __restrict__ partial) {
  __shared__ double shared[(Tp::K + kPairsPerSlice) * kMomentThreads / 32];
  moments_dispatch<Tp, T>(a, x, strip_rows, partial, shared);
}

template <typename P>
__device__ __forceinline__ double param(const void* values, int64_t i, double absent) {
  return values ? convert<double>(static_cast<const P*>(values)[i]) : absent;
}

// One block. Sums the partial moments, then per filter mean, variance, running statistics and the
// affine form of the normalisation: y = scale * z + shift for the bias-free convolution z.
template <typename Tp, typename T, typename P>
__global__ void __launch_bounds__(kThreads)
    forward_finalize_kernel(SmallKShape a, SmallKNorm norm, const T* __restrict__ w,
                            const double* __restrict__ partial, int blocks,
                            double* __restrict__ saved, double* __restrict__ affine) {
  constexpr int K = Tp::K;
  __shared__ double sums[Tp::kMoments];
  __shared__ double mean[K], covariance[K * K];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const double count = static_cast<double>(a.n * a.p * a.q);
  if (norm.training) {
    for (int moment = warp; moment < Tp::kMoments; moment += kWarps) {
      double sum = 0;
      for (int b = lane; b < blocks; b += 32) sum += partial[int64_t{moment} * blocks + b];
      sum = warp_sum(sum);
      if (lane == 0) sums[moment] = sum;
    }
    __syncthreads();
    if (threadIdx.x < K) {
      mean[threadIdx.x] = saved[threadIdx.x] = sums[threadIdx.x] / count;
    }
    __syncthreads();
    for (int ij = threadIdx.x; ij < K * K; ij += kThreads) {
      const int i = min(ij / K, ij % K), j = max(ij / K, ij % K);
      const int pair = i * K - i * (i - 1) / 2 + (j - i);
      covariance[ij] = sums[K + pair] / count - mean[i] * mean[j];
      saved[K + ij] = covariance[ij];
    }
    __syncthreads();
  }
  double batches = 0;
  if (norm.training && norm.batches) batches = static_cast<double>(*norm.batches) + 1;
  const double factor = norm.cumulative ? 1 / batches : norm.momentum;
  for (int64_t k = threadIdx.x; k < a.k; k += kThreads) {
    const double bias = param<T>(norm.conv_bias, k, 0);
    double mu = 0, var = 0;  // of the bias-free convolution
    if (norm.training) {
      for (int i = 0; i < K; ++i) {
        const double wi = convert<double>(w[k * K + i]);
        mu += wi * mean[i];
        double row = 0;
        for (int j = 0; j < K; ++j) row += covariance[i * K + j] * convert<double>(w[k * K + j]);
        var += wi * row;
      }
      var = fmax(var, 0.0);
      if (norm.running_mean) {
        P* running_mean = static_cast<P*>(norm.running_mean);
        P* running_var = static_cast<P*>(norm.running_var);
        running_mean[k] =
            convert<P>((1 - factor) * convert<double>(running_mean[k]) + factor * (mu + bias));
        running_var[k] = convert<P>((1 - factor) * convert<double>(running_var[k]) +
                                    factor * var * count / (count - 1));
      }
    } else {
      mu = param<P>(norm.running_mean, k, 0) - bias;
      var = param<P>(norm.running_var, k, 1);
    }
    const double rstd = 1 / sqrt(var + norm.eps);
    saved[K + K * K + k] = mu;
    saved[K + K * K + a.k + k] = rstd;
    const double scale = param<P>(norm.gamma, k, 1) * rstd;
    affine[2 * k] = scale;
    affine[2 * k + 1] = param<P>(norm.beta, k, 0) - mu * scale;
  }
  __syncthreads();  // every thread has read the old count
  if (threadIdx.x == 0 && norm.training && norm.batches) *norm.batches += 1;
}

// Values of a filter in shared memory: weights and shift, padded to 16 bytes.
template <typename Tp, typename A>
constexpr int filter_row() {
  constexpr int kVec = 16 / sizeof(A);
  return (Tp::K + 1 + kVec - 1) / kVec * kVec;
}

// A thread owns one pooled pixel: the input under its window stays in registers while it goes
// through the filters, whose weights and affine terms are read from shared memory by broadcast.
template <typename Tp, typename T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(SmallKShape a, const T* __restrict__ x, const T* __restrict__ w,
                   const double* __restrict__ affine, T* __restrict__ y,
                   uint32_t* __restrict__ codes) {
  using A = acc_t<T>;
  // Weights times scale, then the shift; rows start at 16 bytes, to be read as vectors.
  constexpr int kRow = filter_row<Tp, A>();
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  A* filters = reinterpret_cast<A*>(shared_bytes);
  const int k_words = static_cast<int>(ceil_div(a.k, 8));
  for (int i = threadIdx.x; i < a.k * kRow; i += kThreads) {
    const int k = i / kRow, t = i % kRow;
    const double scale = affine[2 * k];
    filters[i] = t < Tp::K    ? static_cast<A>(convert<double>(w[k * Tp::K + t]) * scale)
                 : t == Tp::K ? static_cast<A>(affine[2 * k + 1])
                              : A(0);
  }
  __syncthreads();

  const int pooled_h = static_cast<int>(a.p / 2), pooled_w = static_cast<int>(a.q / 2);
  const int64_t plane = int64_t{pooled_h} * pooled_w;
  const int64_t pixels = a.n * plane;
  for (int64_t pixel = blockIdx.x * int64_t{kThreads} + threadIdx.x; pixel < pixels;
       pixel += int64_t{gridDim.x} * kThreads) {
    const int64_t n = pixel / plane;
    const int in_plane = static_cast<int>(pixel - n * plane);
    const int p = in_plane / pooled_w, q = in_plane % pooled_w;
    A window[Tp::kWin];
#pragma unroll
    for (int i = 0; i < Tp::kWin; ++i) {
      const int c = i / (Tp::kWinH * Tp::kWinW), r = i / Tp::kWinW % Tp::kWinH, s = i % Tp::kWinW;
      window[i] = load_input<A>(a, x, n, c, 2 * p - static_cast<int>(a.pad_h) + r,
                                2 * q - static_cast<int>(a.pad_w) + s);
    }
    for (int word = 0; word < k_words; ++word) {
      uint32_t code_word = 0;
      Vec<T, 8> result;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int k = word * 8 + j;
        if (k < a.k) {
          A filter[kRow];
#pragma unroll
          for (int t = 0; t < kRow; t += 16 / sizeof(A)) {
            *reinterpret_cast<int4*>(filter + t) =
                *reinterpret_cast<const int4*>(filters + k * kRow + t);
          }
          A z[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) z[i] = filter[Tp::K];
#pragma unroll
          for (int t = 0; t < Tp::K; ++t) {
            const int c = t / (Tp::R * Tp::S), r = t / Tp::S % Tp::R, s = t % Tp::S;
            const int base = (c * Tp::kWinH + r) * Tp::kWinW + s;
            const A weight = filter[t];
            z[0] += weight * window[base];
            z[1] += weight * window[base + 1];
            z[2] += weight * window[base + Tp::kWinW];
            z[3] += weight * window[base + Tp::kWinW + 1];
          }
          A best = z[0];
          uint32_t code = 0;
#pragma unroll
          for (int i = 1; i < 4; ++i) {
            // torch's rule: the first maximum wins, and NaN beats every number.
            if (z[i] > best || z[i] != z[i]) {
              best = z[i];
              code = i;
            }
          }
          if (best <= A(0)) {
            best = A(0);
            code = 4;
          }
          result.v[j] = convert<T>(best);
          code_word |= code << (4 * j);
          if (!a.channels_last) y[(n * a.k + k) * plane + in_plane] = result.v[j];
        }
      }
      codes[pixel * k_words + word] = code_word;
      if (a.channels_last) {
        T* out = y + pixel * a.k + word * 8;
        if (a.k % 8 == 0) {
#pragma unroll
          for (int v = 0; v < 8; v += kVecWidth<T>) {
            *reinterpret_cast<Vec<T, kVecWidth<T>>*>(out + v) =
                *reinterpret_cast<const Vec<T, kVecWidth<T>>*>(result.v + v);
          }
        } else {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            if (word * 8 + j < a.k) out[j] = result.v[j];
          }
        }
      }
    }
  }
}

constexpr int kTilePixels = 64;

// Q and S1: a lane owns a filter, a warp walks over pooled pixels; the windows of a tile of pixels
// (and, for NCHW, the gradient's tile) are staged in shared memory. Sums of a tile are fp32, their
// total fp64.
template <typename Tp, typename T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(SmallKShape a, const T* __restrict__ x, const T* __restrict__ dy,
                    const uint32_t* __restrict__ codes, double* __restrict__ partial) {
  using A = acc_t<T>;
  constexpr int kSums = Tp::K + 1;
  __shared__ A windows[kTilePixels][Tp::kWin];
  __shared__ A grads[32][kTilePixels + 1];
  __shared__ double totals[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int k0 = blockIdx.y * 32, k = k0 + lane;
  const int k_words = static_cast<int>(ceil_div(a.k, 8));
  const int pooled_w = static_cast<int>(a.q / 2);
  const int64_t plane = (a.p / 2) * pooled_w;
  const int64_t pixels = a.n * plane;
  double total[kSums] = {};

  for (int64_t tile = int64_t{blockIdx.x} * kTilePixels; tile < pixels;
       tile += int64_t{gridDim.x} * kTilePixels) {
    const int count = static_cast<int>(min(int64_t{kTilePixels}, pixels - tile));
    for (int i = threadIdx.x; i < count * Tp::kWin; i += kThreads) {
      const int t = i % Tp::kWin;
      const int64_t pixel = tile + i / Tp::kWin;
      const int64_t n = pixel / plane;
      const int in_plane = static_cast<int>(pixel - n * plane);
      const int p = in_plane / pooled_w, q = in_plane % pooled_w;
      const int c = t / (Tp::kWinH * Tp::kWinW), r = t / Tp::kWinW % Tp::kWinH, s = t % Tp::kWinW;
      windows[i / Tp::kWin][t] = load_input<A>(a, x, n, c, 2 * p - static_cast<int>(a.pad_h) + r,
                                               2 * q - static_cast<int>(a.pad_w) + s);
    }
    if (!a.channels_last) {
      for (int i = threadIdx.x; i < 32 * kTilePixels; i += kThreads) {
        const int column = i % kTilePixels, row = i / kTilePixels;
        if (column < count && k0 + row < a.k) {
          const int64_t pixel = tile + column;
          const int64_t n = pixel / plane;
          grads[row][column] = convert<A>(dy[(n * a.k + k0 + row) * plane + pixel - n * plane]);
        }
      }
    }
    __syncthreads();
    if (k < a.k) {
      A sum[kSums] = {};
#pragma unroll 4
      for (int column = warp; column < count; column += kWarps) {
        const int64_t pixel = tile + column;
        const uint32_t code = codes[pixel * k_words + k / 8] >> (4 * (k % 8)) & 7;
        A g = a.channels_last ? convert<A>(dy[pixel * a.k + k]) : grads[lane][column];
        if (code == 4) g = A(0);
        const A* window = windows[column] + (code & 1) + ((code & 2) ? Tp::kWinW : 0);
#pragma unroll
        for (int t = 0; t < Tp::K; ++t) {
          const int c = t / (Tp::R * Tp::S), r = t / Tp::S % Tp::R, s = t % Tp::S;
          sum[t] += g * window[(c * Tp::kWinH + r) * Tp::kWinW + s];
        }
        sum[Tp::K] += g;
      }
#pragma unroll
      for (int t = 0; t < kSums; ++t) total[t] += static_cast<double>(sum[t]);
    }
    __syncthreads();
  }
  for (int t = 0; t < kSums; ++t) {
    double mine = 0;
#pragma unroll
    for (int u = 0; u < kSums; ++u) mine = u == t ? total[u] : mine;
    totals[warp][lane] = mine;
    __syncthreads();
    if (warp == 0 && k < a.k) {
      double sum = 0;
      for (int v = 0; v < kWarps; ++v) sum += totals[v][lane];
      partial[(int64_t{k} * kSums + t) * gridDim.x + blockIdx.x] = sum;
    }
    __syncthreads();
  }
}

// A block per filter: sums the partial Q and S1, then the formulas of small_k.h.
template <typename Tp, typename T, typename P>
__global__ void __launch_bounds__(kThreads)
    backward_finalize_kernel(SmallKShape a, SmallKNorm norm, const T* __restrict__ w,
                             const double* __restrict__ partial, int blocks,
                             const double* __restrict__ saved, T* __restrict__ dw,
                             P* __restrict__ dgamma, P* __restrict__ dbeta, T* __restrict__ dbias) {
  constexpr int K = Tp::K;
  __shared__ double sums[K + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t k = blockIdx.x;
  for (int t = warp; t <= K; t += kWarps) {
    double sum = 0;
    for (int b = lane; b < blocks; b += 32) sum += partial[(k * (K + 1) + t) * blocks + b];
    sum = warp_sum(sum);
    if (lane == 0) sums[t] = sum;
  }
  __syncthreads();
  const double* mean = saved;
  const double* covariance = saved + K;
  const double mu = saved[K + K * K + k], rstd = saved[K + K * K + a.k + k];
  const double s1 = sums[K];
  double wq = 0;
  for (int i = 0; i < K; ++i) wq += convert<double>(w[k * K + i]) * sums[i];
  const double s2 = rstd * (wq - mu * s1);
  const double scale = param<P>(norm.gamma, k, 1) * rstd;
  if (threadIdx.x < K) {
    const int i = threadIdx.x;
    double grad = sums[i];
    if (norm.training) {
      double cw = 0;
      for (int j = 0; j < K; ++j) cw += covariance[i * K + j] * convert<double>(w[k * K + j]);
      grad -= s1 * mean[i] + s2 * rstd * cw;
    }
    dw[k * K + i] = convert<T>(scale * grad);
  }
  if (threadIdx.x == 0) {
    if (dgamma) dgamma[k] = convert<P>(s2);
    if (dbeta) dbeta[k] = convert<P>(s1);
    // In training a bias before batch norm cancels.
    if (dbias) dbias[k] = convert<T>(norm.training ? 0.0 : scale * s1);
  }
}

const KernelEntry kEntry({"conv_bn_relu_max_pool2d", "small_k", "float64 float32 bfloat16 float16",
                          "sm_80+", true,
                          "statistics from patch moments; no convolution output in memory"});

// Outputs in a strip: long strips load each row once, short ones keep small batches parallel.
int strip_rows(const SmallKShape& a) {
  const int64_t columns = a.n * a.q, threads = int64_t{kMomentThreads} * kMaxMomentBlocks;
  const int64_t strips = std::min(std::max<int64_t>(threads / columns, 1), ceil_div(a.p, 4));
  return static_cast<int>(ceil_div(a.p, strips));
}

int moment_blocks(const SmallKShape& a) {
  const int64_t work = a.n * a.q * ceil_div(a.p, strip_rows(a));
  return static_cast<int>(std::min<int64_t>(ceil_div(work, kMomentThreads), kMaxMomentBlocks));
}

int backward_blocks(const SmallKShape& a) {
  return static_cast<int>(
      std::min<int64_t>(ceil_div(a.n * (a.p / 2) * (a.q / 2), kTilePixels), kMaxBlocks / 2));
}

template <typename F>
void dispatch_params(DType dtype, DType param_dtype, F&& f) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    // Parameters are in the input's dtype, or fp32 under 16-bit inputs (autocast).
    if (dtype == param_dtype) {
      f(tag, tag);
    } else if constexpr (sizeof(T) == 2) {
      f(tag, TypeTag<float>{});
    } else {
      throw std::runtime_error("small_k: parameters have to be in the input's dtype or float32");
    }
  });
}

}  // namespace

bool small_k_supports(const SmallKShape& a) {
  const bool taps =
      (a.r == 3 && a.s == 3 && a.c >= 1 && a.c <= 3) || (a.r == 5 && a.s == 5 && a.c == 1);
  // The filters have to fit the 48 KiB of shared memory that every block has.
  return taps && a.k * (a.c * a.r * a.s + 4) * (a.dtype == DType::kFloat64 ? 8 : 4) <= 48 * 1024;
}

int64_t small_k_workspace_bytes(const SmallKShape& a) {
  const int64_t kk = a.c * a.r * a.s;
  const int64_t forward = (kk + kk * (kk + 1) / 2) * moment_blocks(a) + 2 * a.k;
  const int64_t backward = a.k * (kk + 1) * backward_blocks(a);
  return static_cast<int64_t>(sizeof(double)) * std::max(forward, backward);
}

void small_k_forward(Stream stream, const SmallKShape& a, const SmallKNorm& norm, const void* x,
                     const void* w, void* y, uint32_t* codes, double* saved, void* workspace) {
  double* affine = static_cast<double*>(workspace);
  double* partial = affine + 2 * a.k;
  dispatch_params(a.dtype, norm.param_dtype, [&](auto tag, auto param_tag) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(param_tag)::type;
    dispatch_taps(a, [&](auto taps) {
      using Tp = decltype(taps);
      const T* in = static_cast<const T*>(x);
      const T* weight = static_cast<const T*>(w);
      const int blocks = moment_blocks(a);
      if (norm.training) {
        const dim3 grid(blocks, static_cast<unsigned>(ceil_div(Tp::kPairs, kPairsPerSlice)));
        moments_kernel<Tp, T>
            <<<grid, kMomentThreads, 0, as_cuda(stream)>>>(a, in, strip_rows(a), partial);
        check_launch("small_k moments");
      }
      forward_finalize_kernel<Tp, T, P>
          <<<1, kThreads, 0, as_cuda(stream)>>>(a, norm, weight, partial, blocks, saved, affine);
      check_launch("small_k forward finalize");
      const int64_t pixels = a.n * (a.p / 2) * (a.q / 2);
      if (pixels == 0) return;
      const size_t shared = a.k * filter_row<Tp, acc_t<T>>() * sizeof(acc_t<T>);
      forward_kernel<Tp, T>
          <<<grid_stride_blocks(pixels, kThreads), kThreads, shared, as_cuda(stream)>>>(
              a, in, weight, affine, static_cast<T*>(y), codes);
      check_launch("small_k forward");
    });
  });
}

void small_k_backward(Stream stream, const SmallKShape& a, const SmallKNorm& norm, const void* x,
                      const void* w, const void* dy, const uint32_t* codes, const double* saved,
                      void* dw, void* dgamma, void* dbeta, void* dbias, void* workspace) {
  double* partial = static_cast<double*>(workspace);
  dispatch_params(a.dtype, norm.param_dtype, [&](auto tag, auto param_tag) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(param_tag)::type;
    dispatch_taps(a, [&](auto taps) {
      using Tp = decltype(taps);
      const int blocks = backward_blocks(a);
      if (blocks > 0) {
        const dim3 grid(blocks, static_cast<unsigned>(ceil_div(a.k, 32)));
        backward_kernel<Tp, T><<<grid, kThreads, 0, as_cuda(stream)>>>(
            a, static_cast<const T*>(x), static_cast<const T*>(dy), codes, partial);
        check_launch("small_k backward");
      }
      backward_finalize_kernel<Tp, T, P>
          <<<static_cast<unsigned>(a.k), kThreads, 0, as_cuda(stream)>>>(
              a, norm, static_cast<const T*>(w), partial, blocks, saved, static_cast<T*>(dw),
              static_cast<P*>(dgamma), static_cast<P*>(dbeta), static_cast<T*>(dbias));
      check_launch("small_k backward finalize");
    });
  });
}

}  // namespace braze::cuda
