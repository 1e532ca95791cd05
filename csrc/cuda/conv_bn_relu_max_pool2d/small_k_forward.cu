// Forward of conv_bn_relu_max_pool2d.h: the moments of the input patches; one pass that convolves,
// normalises, applies ReLU and pools in registers. In it a warp takes 16 pooled outputs of 32
// filters at a time; a lane ends up with two adjacent outputs of 8 adjacent filters.
#include "small_k_filters.cuh"
#include "small_k_moments.cuh"
#include "small_k_products.cuh"

namespace braze::cuda {
namespace {

using namespace small_k;

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

template <typename Tp, typename T, bool kTF32, bool kChannelsLast>
__global__ void __launch_bounds__(32 * kMaxTileWarps, Products<Tp, T, kTF32>::kBlocks)
    forward_kernel(const __grid_constant__ SmallKShape a, const __grid_constant__ SmallKNorm norm,
                   const __grid_constant__ Tiling tiling, const T* x, const T* w,
                   const double* partial, int sets, double* __restrict__ saved, T* __restrict__ y,
                   uint32_t* __restrict__ codes) {
  using A = acc_t<T>;
  using P = Products<Tp, T, kTF32>;
  using Staged = typename P::Staged;
  __shared__ Filters<Tp, A> filters;
  __shared__ typename P::Shared shared_products;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Staged* const staged = reinterpret_cast<Staged*>(shared_bytes);
  int index = blockIdx.x;
  InputLoader<Tp, TensorPixels<T>> loader(tiling, {tiling, x});
  const Tile first(tiling, index);
  order_earlier_kernels();
  loader.load(first);
  prepare_filters<Tp, T>(a, norm, w, partial, sets, saved, filters);
  P::prepare(filters, shared_products);
  __syncthreads();
  P products(tiling, filters, shared_products);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int word = static_cast<int>(blockIdx.y) * (kFilters / 8) + t;
  Staged* input = staged;
  for (; index < tiling.tiles; index += gridDim.x) {
    const Tile tile(tiling, index);
    loader.store(tile, [&](int i, T value) { input[i] = P::stage(value); });
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

void small_k_sum_moments(Stream stream, const SmallKShape& a, const void* x, double* moments,
                         int64_t* batches) {
  dispatch(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_taps(a, [&](auto taps) {
      using Tp = decltype(taps);
      for (const MomentPart& part : moment_parts(a)) {
        const auto kernel = moments_kernel<Tp, T>;
        const int bytes = part.shared_bytes<Tp>();
        // Of large tiles of three channels it takes more than 48 KiB with what is static.
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        launch_early_in_clusters(kernel, part.blocks, kMomentThreads, bytes, stream, part.cluster,
                                 part, static_cast<const T*>(x), moments, batches);
        check_launch("small_k moments");
        moments += int64_t{part.sets()} * Tp::kMoments;
        batches = nullptr;
      }
    });
  });
}

void small_k_forward(Stream stream, const SmallKShape& a, const SmallKNorm& norm, const void* x,
                     const void* w, const double* moments, void* y, uint32_t* codes,
                     double* saved) {
  int sets = 0;
  if (norm.training) {
    for (const MomentPart& part : moment_parts(a)) sets += part.sets();
  }
  dispatch(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_taps(a, [&](auto taps) {
      using Tp = decltype(taps);
      dispatch_tf32<T>(a, [&](auto tf32) {
        constexpr bool kTF32 = decltype(tf32)::value;
        using P = Products<Tp, T, kTF32>;
        const int64_t groups = filter_groups(a);
        const Tiling tiling(a, Squares::pooled(a), wanted_tiles(groups),
                            sizeof(typename P::Staged));
        const int blocks = std::min(tiling.tiles, P::kBlocks * sm_count());
        const dim3 grid(blocks, static_cast<unsigned>(groups));
        // Small tiles: more warps than they have groups, for the sake of prepare_filters().
        const int warps = tiling.groups <= kMaxTileWarps ? kMaxTileWarps : tiling.warps;
        const auto kernel = a.channels_last ? forward_kernel<Tp, T, kTF32, true>
                                            : forward_kernel<Tp, T, kTF32, false>;
        const int bytes = 2 * tiling.staged(Tp::C) * static_cast<int>(sizeof(typename P::Staged));
        if constexpr (kTF32) {  // of large tiles it takes more than 48 KiB with what is static
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        }
        launch_early(kernel, grid, 32 * warps, bytes, stream, a, norm, tiling,
                     static_cast<const T*>(x), static_cast<const T*>(w), moments, sets, saved,
                     static_cast<T*>(y), codes);
        check_launch("small_k forward");
      });
      const int64_t statistics = a.k * static_cast<int64_t>(sizeof(double));
      note_ordering_kernel(stream,
                           {{y, a.n * a.k * (a.p / 2) * (a.q / 2) * size_of(a.dtype)},
                            {codes, small_k_code_words(a) * int64_t{4}},
                            {saved, small_k_saved_size(a) * static_cast<int64_t>(sizeof(double))},
                            {norm.running_mean, statistics},
                            {norm.running_var, statistics}});
    });
  });
}

}  // namespace braze::cuda
