// Forward of small_k.h in two launches: moments of the input patches, then one pass that convolves,
// normalises, applies ReLU and pools in registers. A warp takes 16 pooled outputs of 32 filters at
// a time; a lane ends up with two adjacent outputs of 8 adjacent filters.
#include "kernels/common/mma.cuh"
#include "small_k_moments.cuh"

namespace braze::cuda {
namespace {

constexpr int kFilters = 32;  // of a block: blockIdx.y picks them

template <typename A>
__device__ __forceinline__ uint32_t sign_word(A v) {
  if constexpr (sizeof(A) == 8) {
    return static_cast<uint32_t>(__double2hiint(v));
  } else {
    return __float_as_uint(v);
  }
}

// NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ double max_or_nan(double a, double b) { return a > b || a != a ? a : b; }

// Two values through ReLU.
template <typename T, typename A>
__device__ __forceinline__ Vec<T, 2> relu_pair(A a, A b) {
  return {convert<T>(a > A(0) ? a : A(0)), convert<T>(b > A(0) ? b : A(0))};
}
template <>
__device__ __forceinline__ Vec<__nv_bfloat16, 2> relu_pair<__nv_bfloat16, float>(float a, float b) {
  Vec<__nv_bfloat16, 2> result;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;"
      : "=r"(reinterpret_cast<uint32_t&>(result))
      : "f"(b), "f"(a));
  return result;
}
template <>
__device__ __forceinline__ Vec<__half, 2> relu_pair<__half, float>(float a, float b) {
  Vec<__half, 2> result;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;"
      : "=r"(reinterpret_cast<uint32_t&>(result))
      : "f"(b), "f"(a));
  return result;
}

// The block's filters. The sign of batch norm's scale is folded into the weights (0 for 0), so that
// the maximum of the normalised values is the maximum of the convolution.
template <typename Tp, typename A>
struct Filters {
  static constexpr int kRow = (Tp::K + 3) / 4 * 4;  // 16-byte vectors
  struct Affine {
    A scale, shift;  // normalised = scale * convolution + shift
  };
  alignas(16) A weights[kFilters][kRow];
  alignas(16) Affine affine[kFilters];
};

// Mean and variance of each filter's convolution (one thread a filter), what backward needs of
// them, the running statistics. Blocks that differ in blockIdx.x do the same; the first one stores.
// Ends with a barrier.
template <typename Tp, typename T>
__device__ __forceinline__ void prepare_filters(const SmallKShape& a, const SmallKNorm& norm,
                                                const T* __restrict__ w,
                                                const double* __restrict__ partial, int blocks,
                                                double* __restrict__ saved,
                                                Filters<Tp, acc_t<T>>& filters) {
  using A = acc_t<T>;
  constexpr int K = Tp::K;
  __shared__ PatchStatistics<Tp> patches;
  __shared__ A signs[kFilters];
  const int first = static_cast<int>(blockIdx.y) * kFilters;
  const int there = min(kFilters, static_cast<int>(a.k) - first);
  const int f = threadIdx.x, k = first + f;
  const bool owner = f < there, stores = blockIdx.x == 0;
  double bias = 0, gamma = 0, beta = 0, old_mean = 0, old_var = 0;
  if (owner) {
    bias = param(norm.conv_bias, a.dtype, k, 0);
    gamma = param(norm.gamma, norm.param_dtype, k, 1);
    beta = param(norm.beta, norm.param_dtype, k, 0);
    old_mean = param(norm.running_mean, norm.param_dtype, k, 0);
    old_var = param(norm.running_var, norm.param_dtype, k, 1);
  }
  for (int i = threadIdx.x; i < kFilters * K; i += blockDim.x) {
    filters.weights[i / K][i % K] = i < there * K ? convert<A>(w[int64_t{first} * K + i]) : A(0);
  }
  const double count = static_cast<double>(a.n * a.p * a.q);
  if (norm.training) {
    patch_statistics<Tp>(partial, blocks, 1 / count, patches);
  } else {
    __syncthreads();
  }
  if (f < kFilters) {
    double mean = old_mean - bias, var = old_var;  // of the bias-free convolution
    if (norm.training) {
      mean = var = 0;
      double weight[K];
#pragma unroll
      for (int i = 0; i < K; ++i) weight[i] = static_cast<double>(filters.weights[f][i]);
#pragma unroll
      for (int i = 0; i < K; ++i) {
        double row = 0.5 * patches.covariance[i][i] * weight[i];
#pragma unroll
        for (int j = i + 1; j < K; ++j) row += patches.covariance[i][j] * weight[j];
        mean += weight[i] * patches.mean[i];
        var += 2 * weight[i] * row;
      }
      var = var < 0 ? 0 : var;  // NaN stays
    }
    const double rstd = rsqrt(var + norm.eps);
    const double scale = gamma * rstd;
    filters.affine[f] = {static_cast<A>(fabs(scale)), static_cast<A>(beta - mean * scale)};
    signs[f] = static_cast<A>(scale > 0 ? 1 : scale < 0 ? -1 : scale);
    if (owner && stores) {
      saved[K + K * K + k] = mean;
      saved[K + K * K + a.k + k] = rstd;
      if (norm.training) {
        // moments_kernel has counted this batch
        const double factor =
            norm.cumulative ? 1 / static_cast<double>(*norm.batches) : norm.momentum;
        set_param(norm.running_mean, norm.param_dtype, k,
                  (1 - factor) * old_mean + factor * (mean + bias));
        set_param(norm.running_var, norm.param_dtype, k,
                  (1 - factor) * old_var + factor * var * count / (count - 1));
      }
    }
  }
  if (stores && blockIdx.y == 0 && norm.training) {
    for (int i = threadIdx.x; i < K; i += blockDim.x) saved[i] = patches.mean[i];
    for (int i = threadIdx.x; i < K * K; i += blockDim.x) {
      saved[K + i] = patches.covariance[i / K][i % K];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kFilters * K; i += blockDim.x) {
    filters.weights[i / K][i % K] *= signs[i / K];
  }
  __syncthreads();
}

// Convolutions of 16 outputs' windows by tensor cores. Filters are zero where a position does not
// see the window: the window is loaded once for four positions. Tile i of 4 has filters 2i and
// 2i + 1 of each lane's 8.
template <typename Tp, typename T>
class TensorProducts {
 public:
  using Staged = T;
  static constexpr int kBlocks = 2;                      // of a multiprocessor
  static constexpr int kFragments = 4 * Tp::kSteps * 4;  // position, step, tile
  using Shared = uint2[kFragments][32];

  // Called by all threads; a barrier has to follow before the constructor.
  static __device__ __forceinline__ void prepare(const Filters<Tp, float>& filters,
                                                 Shared& fragments) {
    for (int i = threadIdx.x; i < kFragments * 32; i += blockDim.x) {
      const int lane = i % 32, tile = i / 32 % 4, step = i / 128 % Tp::kSteps;
      const int j = i / (128 * Tp::kSteps);
      const int filter = 8 * (lane / 8) + 2 * tile + lane / 4 % 2;
      Vec<T, 2> pair[2];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int tap = Tp::tap(16 * step + 2 * (lane % 4) + e / 2 * 8 + e % 2, j);
        pair[e / 2].v[e % 2] = convert<T>(tap < 0 ? 0.0f : filters.weights[filter][tap]);
      }
      fragments[i / 32][lane] = {reinterpret_cast<const uint32_t&>(pair[0]),
                                 reinterpret_cast<const uint32_t&>(pair[1])};
    }
  }

  __device__ __forceinline__ TensorProducts(const Tiling& tiling, const Filters<Tp, float>&,
                                            const Shared& fragments)
      : fragments_(fragments) {
#pragma unroll
    for (int i = 0; i < 2 * Tp::kSteps; ++i) {
      const int e = 8 * i + threadIdx.x % 4 * 2;
      place_[i] = e < Tp::kWin ? staged_offset<Tp>(tiling, e) : -1;
    }
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kFragments; ++i) held_[i] = fragments[i][threadIdx.x % 32];
    }
  }

  __device__ __forceinline__ void load(const T* staged, const int (&corner)[2]) {
#pragma unroll
    for (int i = 0; i < 2 * Tp::kSteps; ++i) {
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        const uint32_t pair =
            *reinterpret_cast<const uint32_t*>(staged + corner[o] + max(place_[i], 0));
        window_[i / 2][i % 2 * 2 + o] = place_[i] < 0 ? 0 : pair;
      }
    }
  }

  // z[position][2 * output + filter] of the two filters of a tile.
  __device__ __forceinline__ void products(int tile, float (&z)[4][4]) const {
#pragma unroll
    for (int step = 0; step < Tp::kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = (j * Tp::kSteps + step) * 4 + tile;
        const uint2 b = kInRegisters ? held_[i] : fragments_[i][threadIdx.x % 32];
        mma_m16n8<T>(z[j], window_[step], {b.x, b.y});
      }
    }
  }

 private:
  static constexpr bool kInRegisters = Tp::kSteps == 1;
  const Shared& fragments_;
  uint2 held_[kInRegisters ? kFragments : 1];
  int place_[2 * Tp::kSteps];
  uint32_t window_[Tp::kSteps][4];
};

// The same by multiply-adds, in fp32 or fp64.
template <typename Tp, typename T>
class ScalarProducts {
 public:
  using Staged = T;
  using Shared = int;
  static constexpr int kBlocks = Tp::kWin * sizeof(T) <= 64 ? 2 : 1;

  static __device__ __forceinline__ void prepare(const Filters<Tp, T>&, Shared&) {}

  __device__ __forceinline__ ScalarProducts(const Tiling& tiling, const Filters<Tp, T>& filters,
                                            const Shared&)
      : tiling_(tiling), filters_(filters) {}

  __device__ __forceinline__ void load(const T* staged, const int (&corner)[2]) {
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      from_[o] = staged + corner[o];
      if constexpr (kInRegisters) {
#pragma unroll
        for (int e = 0; e < Tp::kWin; e += 2) {  // pairs are aligned: corners and rows are even
          const Vec<T, 2> pair =
              *reinterpret_cast<const Vec<T, 2>*>(from_[o] + staged_offset<Tp>(tiling_, e));
          window_[o][e] = pair.v[0];
          window_[o][e + 1] = pair.v[1];
        }
      }
    }
  }

  __device__ __forceinline__ void products(int tile, T (&z)[4][4]) const {
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      const T* row = filters_.weights[threadIdx.x % 4 * 8 + 2 * tile + f];
      T weights[Filters<Tp, T>::kRow];
#pragma unroll
      for (int t = 0; t < Filters<Tp, T>::kRow; t += 4) {
        const Vec<T, 4> four = *reinterpret_cast<const Vec<T, 4>*>(row + t);
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[t + i] = four.v[i];
      }
#pragma unroll
      for (int t = 0; t < Tp::K; ++t) {
#pragma unroll
        for (int o = 0; o < 2; ++o) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int e = Tp::in_window(t) + Tp::shift(j);
            const T value = kInRegisters ? window_[o][e] : from_[o][staged_offset<Tp>(tiling_, e)];
            z[j][2 * o + f] += weights[t] * value;
          }
        }
      }
    }
  }

 private:
  static constexpr bool kInRegisters = Tp::kWin * sizeof(T) <= 192;
  const Tiling& tiling_;
  const Filters<Tp, T>& filters_;
  const T* from_[2];
  T window_[2][kInRegisters ? Tp::kWin : 1];
};

template <typename Tp, typename T>
using Products = std::conditional_t<sizeof(T) == 2, TensorProducts<Tp, T>, ScalarProducts<Tp, T>>;

// Where a lane's results go: two outputs of the same 8 filters.
template <typename T>
struct Place {
  T* y[2];  // of the first filter
  uint32_t* codes[2];
  bool valid[2];
  int count;  // how many of the 8 filters there are

  template <bool kChannelsLast>
  __device__ __forceinline__ Place(std::bool_constant<kChannelsLast>, const Tiling& tiling,
                                   const Tile& tile, const int (&in_plane)[2],
                                   const bool (&valid)[2], int word, T* y_, uint32_t* codes_)
      : valid{valid[0] && word < tiling.words, valid[1] && word < tiling.words},
        count(min(8, tiling.k - 8 * word)) {
    const int64_t image = int64_t{tile.image} * tiling.plane;
    codes_ += image * tiling.words + word;
    y_ += image * tiling.k + int64_t{8 * word} * (kChannelsLast ? 1 : tiling.plane);
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      codes[o] = codes_ + in_plane[o] * tiling.words;
      y[o] = y_ + in_plane[o] * (kChannelsLast ? tiling.k : 1);
    }
  }
};

// Outputs whose window or weights hold infinities or NaN, at leisure: a zero in the padded filters
// would turn an infinity to NaN, and torch takes the last of several NaN. `step`: from a filter's
// result to the next filter's.
template <typename Tp, typename T, typename Staged>
__device__ __noinline__ void store_special(const Tiling& tiling,
                                           const Filters<Tp, acc_t<T>>& filters,
                                           const Staged* window, int step, int count, T* y,
                                           uint32_t* codes) {
  using A = acc_t<T>;
  Codes bits;
  for (int f = 0; f < 8; ++f) {
    const int filter = threadIdx.x % 4 * 8 + f;
    A best = 0;
    uint32_t code = 0;
    for (int j = 0; j < 4; ++j) {
      A z = 0;
      for (int t = 0; t < Tp::K; ++t) {
        const int e = Tp::in_window(t) + Tp::shift(j);
        z += filters.weights[filter][t] * convert<A>(window[staged_offset<Tp>(tiling, e)]);
      }
      if (j == 0 || z > best || z != z) {
        best = z;
        code = j;
      }
    }
    best = best * filters.affine[filter].scale + filters.affine[filter].shift;
    const bool stopped = best <= A(0);
    bits.append(code << 31, code >> 1 << 31, stopped ? 0u : 1u << 31);
    if (f < count) y[int64_t{f} * step] = convert<T>(stopped ? A(0) : best);
  }
  *codes = bits.word();
}

template <typename T, bool kChannelsLast>
__device__ __forceinline__ void store_results(const Tiling& tiling, const Place<T>& place,
                                              const Vec<T, 2> (&results)[8]) {
  if constexpr (kChannelsLast) {  // results[4 * output + filter / 2]
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      if (!place.valid[o]) continue;
      if (tiling.k % 8 == 0) {
        constexpr int kWidth = kVecWidth<T> < 8 ? kVecWidth<T> : 8;
        Vec<T, 8> all;
#pragma unroll
        for (int f = 0; f < 8; ++f) all.v[f] = results[4 * o + f / 2].v[f % 2];
#pragma unroll
        for (int f = 0; f < 8; f += kWidth) {
          *reinterpret_cast<Vec<T, kWidth>*>(place.y[o] + f) =
              *reinterpret_cast<const Vec<T, kWidth>*>(all.v + f);
        }
      } else {
#pragma unroll
        for (int f = 0; f < 8; ++f) {
          if (f < place.count) place.y[o][f] = results[4 * o + f / 2].v[f % 2];
        }
      }
    }
  } else {  // results[filter].v[output]
    T *first = place.y[0], *second = place.y[1];
#pragma unroll
    for (int f = 0; f < 8; ++f, first += tiling.plane, second += tiling.plane) {
      if (f >= place.count) break;
      if (tiling.pairs) {
        if (place.valid[0]) *reinterpret_cast<Vec<T, 2>*>(first) = results[f];
      } else {
        if (place.valid[0]) *first = results[f].v[0];
        if (place.valid[1]) *second = results[f].v[1];
      }
    }
  }
}

template <typename Tp, typename T, bool kChannelsLast>
__global__ void __launch_bounds__(32 * kMaxTileWarps, Products<Tp, T>::kBlocks)
    forward_kernel(const __grid_constant__ SmallKShape a, const __grid_constant__ SmallKNorm norm,
                   const __grid_constant__ Tiling tiling, const T* __restrict__ x,
                   const T* __restrict__ w, const double* __restrict__ partial, int moment_blocks,
                   double* __restrict__ saved, T* __restrict__ y, uint32_t* __restrict__ codes) {
  wait_for_earlier_kernels();
  using A = acc_t<T>;
  using P = Products<Tp, T>;
  using Staged = typename P::Staged;
  __shared__ Filters<Tp, A> filters;
  __shared__ typename P::Shared shared_products;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Staged* const staged = reinterpret_cast<Staged*>(shared_bytes);
  int index = blockIdx.x;
  InputLoader<Tp, T> loader(tiling, x);
  loader.load(Tile(tiling, index));
  prepare_filters<Tp, T>(a, norm, w, partial, moment_blocks, saved, filters);
  P::prepare(filters, shared_products);
  __syncthreads();
  P products(tiling, filters, shared_products);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int word = static_cast<int>(blockIdx.y) * (kFilters / 8) + t;
  Staged* input = staged;
  for (; index < tiling.tiles; index += gridDim.x) {
    const Tile tile(tiling, index);
    loader.store(tile, [&](int i, T value) { input[i] = convert<Staged>(value); });
    const int next = index + static_cast<int>(gridDim.x);
    if (next < tiling.tiles) loader.load(Tile(tiling, next));
    __syncthreads();
    for (int group = warp; group < tiling.groups; group += warps) {
      int in_plane[2], corner[2];
      bool valid[2];
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        valid[o] = tile.locate(tiling, 16 * group + 2 * g + o, &in_plane[o], &corner[o]);
      }
      products.load(input, corner);
      Codes bits[2];
      A check[2] = {};  // NaN if a result is infinite or NaN
      Vec<T, 2> results[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        A z[4][4] = {}, value[2][2];
        products.products(i, z);
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          const auto affine = filters.affine[8 * t + 2 * i + f];
#pragma unroll
          for (int o = 0; o < 2; ++o) {
            const int v = 2 * o + f;
            const A top = max_or_nan(z[0][v], z[1][v]), bottom = max_or_nan(z[2][v], z[3][v]);
            const A result = max_or_nan(top, bottom) * affine.scale + affine.shift;
            // The sign of a - b tells whether a < b: no comparisons, which are at half rate.
            const uint32_t below = sign_word(top - bottom);
            bits[o].append(
                (sign_word(z[2][v] - z[3][v]) & below) | (sign_word(z[0][v] - z[1][v]) & ~below),
                below, sign_word(A(0) - result));
            check[o] += result * A(0);
            value[o][f] = result;
          }
        }
        if constexpr (kChannelsLast) {
          results[i] = relu_pair<T>(value[0][0], value[0][1]);
          results[4 + i] = relu_pair<T>(value[1][0], value[1][1]);
        } else {
          results[2 * i] = relu_pair<T>(value[0][0], value[1][0]);
          results[2 * i + 1] = relu_pair<T>(value[0][1], value[1][1]);
        }
      }
      const Place<T> place(std::bool_constant<kChannelsLast>{}, tiling, tile, in_plane, valid, word,
                           y, codes);
      store_results<T, kChannelsLast>(tiling, place, results);
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        if (!place.valid[o]) continue;
        *place.codes[o] = bits[o].word();
        if (check[o] != A(0)) {
          store_special<Tp, T>(tiling, filters, input + corner[o], kChannelsLast ? 1 : tiling.plane,
                               place.count, place.y[o], place.codes[o]);
        }
      }
    }
    // The other buffer next: one barrier a tile is enough.
    input = input == staged ? staged + tiling.staged(Tp::C) : staged;
  }
}

int64_t filter_groups(const SmallKShape& a) { return ceil_div(a.k, kFilters); }

}  // namespace

int64_t small_k_forward_workspace(const SmallKShape& a) {
  const int64_t taps = a.c * a.r * a.s;
  const MomentWork work(a);
  return int64_t{work.kinds} * work.blocks * (taps + taps * (taps + 1) / 2);
}

void small_k_forward(Stream stream, const SmallKShape& a, const SmallKNorm& norm, const void* x,
                     const void* w, void* y, uint32_t* codes, double* saved, void* workspace) {
  double* partial = static_cast<double*>(workspace);
  dispatch(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_taps(a, [&](auto taps) {
      using Tp = decltype(taps);
      using Staged = typename Products<Tp, T>::Staged;
      const T* in = static_cast<const T*>(x);
      int moment_blocks = 0;
      if (norm.training) {
        const MomentWork work(a);
        const dim3 grid(work.blocks, work.kinds);
        moment_blocks = work.blocks * work.kinds;
        launch_early(moments_kernel<Tp, T>, grid, kMomentThreads, work.shared_bytes(Tp::C), stream,
                     work, in, partial, norm.batches);
        check_launch("small_k moments");
      }
      const int64_t groups = filter_groups(a);
      const Tiling tiling(a, Squares::pooled(a), ceil_div(2 * sm_count(), groups), sizeof(Staged));
      const int blocks = std::min(tiling.tiles, Products<Tp, T>::kBlocks * sm_count());
      const dim3 grid(blocks, static_cast<unsigned>(groups));
      // Small tiles: more warps than they have groups, for the sake of prepare_filters().
      const int warps = tiling.groups <= kMaxTileWarps ? kMaxTileWarps : tiling.warps;
      const auto kernel =
          a.channels_last ? forward_kernel<Tp, T, true> : forward_kernel<Tp, T, false>;
      launch_early(kernel, grid, 32 * warps, 2 * tiling.staged(Tp::C) * sizeof(Staged), stream, a,
                   norm, tiling, in, static_cast<const T*>(w), partial, moment_blocks, saved,
                   static_cast<T*>(y), codes);
      check_launch("small_k forward");
    });
  });
}

}  // namespace braze::cuda
