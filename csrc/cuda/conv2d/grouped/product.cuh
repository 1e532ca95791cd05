// The forward pass and the input gradient: pixels times filters with mma.sync, group by group. A
// row of the left operand is a pixel's patch, read from the source's tile granule by granule: a
// granule is a tap and a few channels of one group, so that a step of the sum may have two taps of
// eight channels, or four of four, and no product ever meets another group's values.
#pragma once

#include "stage.cuh"
#include "cuda/common/graph.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/conv2d/narrow/products.cuh"

namespace braze::cuda::grouped {

using ProductFunction = void (*)(ProductArgs);

// What a warp multiplies at a time: sixteens of pixels and eights of results, of one group.
struct ProductTile {
  int rows, columns;
};
constexpr ProductTile kProductTiles[] = {{4, 1}, {4, 2}, {4, 3}, {4, 4}, {2, 4},
                                         {4, 5}, {2, 7}, {4, 7}, {2, 1}, {2, 2}};
constexpr int kProductTileCount = 10;

// granule: bytes of one.
constexpr bool has_product_tile(bool split, int size, int granule, int tile) {
  if (split) return tile >= 8;
  return tile < (granule == 8 ? 4 : size == 4 ? 5 : 8);
}
// Blocks of a multiprocessor that there are registers for.
constexpr int product_blocks(int tile) { return tile == 5 || tile == 7 ? 1 : tile < 2 ? 3 : 2; }

// granule: 16, or of 16-bit types 8.
ProductFunction product_bf16(int tile, int granule);
ProductFunction product_fp16(int tile, int granule);
ProductFunction product_tf32(int tile);
ProductFunction product_fp32(int tile);

constexpr int kWarps = 8, kThreads = 32 * kWarps;

template <typename T, bool kSplit, int kRows, int kColumns, int kGranule>
class Product {
  static constexpr int kPer = 4 / sizeof(T);
  static constexpr int kGranules = 32 / kGranule;  // of a step
  static constexpr int kBases = kGranule == 16 ? 1 : 2;
  static constexpr int kResults = kColumns * 8;
  static_assert(kGranule == 16 || sizeof(T) == 2);

  const ProductArgs& a_;
  char* const shared_;
  Granule* const granules_;
  int* const pixels_;  // where each pixel's first tap lies in a tile
  uint2* const weights_;
  char* const out_;
  char* const tiles_;
  const int lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32, g_ = lane_ / 4, t_ = lane_ % 4;
  const int part_ = blockIdx.y % a_.parts, first_group_ = blockIdx.y / a_.parts * a_.slab_groups;
  // Of the results of a group: the block's first, and how many it has.
  const int first_result_ = part_ * a_.part_results;
  const int own_results_ = min(a_.part_results, a_.results - first_result_);

  __device__ __forceinline__ void stage_tile(int tile, int buffer) const {
    const Cells& c = a_.cells;
    Place at = place_of(c, tile);
    at.row = at.row * c.step_h + c.first_h, at.column = at.column * c.step_w + c.first_w;
    stage<T, 4>(a_.source, c.batch, at, first_group_ * a_.channels,
                tiles_ + buffer * a_.source.bytes());
  }

  __device__ __forceinline__ Granule granule_of(int i) const {
    const int step = i / kGranules;
    int number = 0;
    while (number + 1 < a_.class_count && step >= a_.classes[number + 1].first_step) ++number;
    const Class& of = a_.classes[number];
    const int local = i - of.first_step * kGranules, tap = local / a_.granules;
    if (tap >= of.rows * of.columns) return {-1, 0, 0, 0};
    const int granule = local % a_.granules, row = tap / of.columns, column = tap % of.columns;
    const int channel = granule * (kGranule / static_cast<int>(sizeof(T)));
    Granule result{};
    result.patch = offset_of_tap(a_.source, a_.tap_row + row * a_.tap_row_step,
                                 a_.tap_column + column * a_.tap_column_step) +
                   granule * kGranule;
    result.weight = (of.row + row * a_.w_row_step) * a_.w_row +
                    (of.column + column * a_.w_column_step) * a_.w_column + channel * a_.w_channel;
    result.channel = channel;
    return result;
  }

  __device__ __forceinline__ void prepare_tables() const {
    if (threadIdx.x < kZeroBytes / 4) reinterpret_cast<uint32_t*>(shared_)[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < a_.steps * kGranules; i += kThreads) {
      granules_[i] = granule_of(i);
    }
    // Those beyond the tile's read what is there.
    const int all = a_.chunks * kRows * 16;
    for (int i = threadIdx.x; i < all; i += kThreads) {
      const bool inside = i < a_.cells.pixels;
      pixels_[i] =
          inside ? offset_in_tile(a_.source, place_in_tile(a_.cells, i), a_.cells.step_h) : 0;
    }
    if (a_.padded) clear(tiles_, tiles_ + a_.buffers * a_.source.bytes());
  }

  // The weights as the products' lanes hold them.
  __device__ __forceinline__ void stage_weights() const {
    const T* const from = static_cast<const T*>(a_.weights);
    const int all = a_.slab_groups * a_.passes * kColumns * a_.steps * 32;
#pragma unroll 4
    for (int i = threadIdx.x; i < all; i += kThreads) {
      int step, column;
      const int group = a_.by_column_tiles.div(a_.by_steps.div(i / 32, step), column);
      const int result = column * 8 + g_;
      const bool is_result = result < own_results_ && first_group_ + group < a_.groups;
      const int64_t first = (first_group_ + group) * int64_t{a_.w_group} +
                            (first_result_ + result) * int64_t{a_.w_result};
      uint32_t word[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool is_whole = kGranule == 16;  // halves of a step are granules of their own
        const Granule granule = granules_[step * kGranules + (is_whole ? half : t_)];
        const int own = is_whole ? t_ * kPer : half * kPer;
        const int64_t at = first + granule.weight + own * a_.w_channel;
        const int left = is_result && granule.patch >= 0 ? a_.channels - granule.channel - own : 0;
        if constexpr (kPer == 1) {
          const float v = from[left > 0 ? at : 0];
          word[half] = left > 0 ? narrow::product_word<T, kSplit>(__float_as_uint(v)) : 0;
        } else {
          const uint16_t* const bits = reinterpret_cast<const uint16_t*>(from);
          if (a_.weight_pairs) {
            const uint32_t v = *reinterpret_cast<const uint32_t*>(bits + (left > 0 ? at : 0));
            word[half] = left > 0 ? v : 0;
          } else {
            const uint32_t low = bits[left > 0 ? at : 0];
            const uint32_t high = bits[left > 1 ? at + a_.w_channel : 0];
            word[half] = (left > 0 ? low : 0) | (left > 1 ? high << 16 : 0);
          }
        }
      }
      weights_[i] = {word[0], word[1]};
    }
  }

  // The products of a chunk of pixels with kResults results of a group; `column` is the first of
  // these in eights, of all that the block has.
  __device__ __forceinline__ void multiply(float (&acc)[kRows][kColumns][4], const Class& of,
                                           int chunk, int column, const char* tile) const {
    int base[kRows][kBases];  // of this lane's rows
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const int first = (chunk * kRows + m) * 16;
#pragma unroll
      for (int i = 0; i < kBases; ++i) {
        base[m][i] = pixels_[first + (kGranule == 16 ? lane_ % 16 : g_ + 8 * i)];
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[m][n][e] = 0;
      }
    }
    const uint2* const weights = weights_ + column * a_.steps * 32 + lane_;
    const Granule* const granules = granules_ + (kGranule == 16 ? lane_ / 16 : t_);
    const int last = of.first_step + of.steps;
#pragma unroll 2
    for (int step = of.first_step; step < last; ++step) {
      const int offset = granules[step * kGranules].patch;
      narrow::Fragment<kSplit, 2> columns[kColumns];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const uint2 w = weights[(n * a_.steps + step) * 32];
        columns[n].set(0, w.x), columns[n].set(1, w.y);
      }
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        uint32_t v[4];
        // An infinity must not meet the zeros that pad a sum: zeros do.
        if constexpr (kGranule == 16) {
          ldmatrix_x4(v, offset < 0 ? shared_ : tile + base[m][0] + offset);
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint2 two =
                *reinterpret_cast<const uint2*>(offset < 0 ? shared_ : tile + base[m][i] + offset);
            v[i] = two.x, v[i + 2] = two.y;
          }
        }
        narrow::Fragment<kSplit, 4> rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.set(i, narrow::product_word<T, kSplit>(v[i]));
#pragma unroll
        for (int n = 0; n < kColumns; ++n) narrow::multiply<T>(acc[m][n], rows, columns[n]);
      }
    }
  }

  // To the block's tile of results. `group` of the block's; `first`: pixel, result of the group's
  // part; `line`: of the tile, that pixel 0 is.
  __device__ __forceinline__ void put(const float (&acc)[kRows][kColumns][4], int group, int pixel0,
                                      int result0, int line) const {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int result = result0 + n * 8 + 2 * t_, left = own_results_ - result;
      if (left <= 0) continue;
      float bias[2] = {};
      if (a_.bias) {
        const T* const from = static_cast<const T*>(a_.bias) + (first_group_ + group) * a_.results +
                              first_result_ + result;
        bias[0] = convert<float>(from[0]);
        if (left > 1) bias[1] = convert<float>(from[1]);
      }
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int pixel = pixel0 + m * 16 + half * 8 + g_;
          if (pixel >= a_.cells.pixels) continue;
          Vec<T, 2> v;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float value = acc[m][n][half * 2 + e] + bias[e];
            v.v[e] = convert<T>(a_.relu && value < 0 ? 0.0f : value);
          }
          T* const to = reinterpret_cast<T*>(out_ + (line + pixel) * a_.out_pitch) +
                        group * a_.results + result;
          if (a_.pairs) {
            *reinterpret_cast<Vec<T, 2>*>(to) = v;
          } else {
            to[0] = v.v[0];
            if (left > 1) to[1] = v.v[1];
          }
        }
      }
    }
  }

  __device__ __forceinline__ void compute(const char* tile) const {
    for (int item = warp_; item < a_.items; item += kWarps) {
      int chunk, product, pass;
      const int number = a_.by_products.div(a_.by_chunks.div(item, chunk), product);
      const int group = a_.by_passes.div(product, pass);
      if (first_group_ + group >= a_.groups || pass * kResults >= own_results_) continue;
      float acc[kRows][kColumns][4];
      multiply(acc, a_.classes[number], chunk, product * kColumns, tile + group * a_.group_pitch);
      put(acc, group, chunk * kRows * 16, pass * kResults, number * a_.cells.pixels);
    }
  }

  template <int kBytes>
  __device__ __forceinline__ void store_copies(int tile) const {
    constexpr int kCount = kBytes / sizeof(T);
    const Place place = place_of(a_.cells, tile);
    T* const out = static_cast<T*>(a_.out);
    const int first = first_group_ * a_.results + first_result_;
    const int end = a_.parts > 1 ? first + own_results_ : a_.out_channels;
    const int lines = a_.class_count * a_.cells.pixels;
    for_each_copy<2>(a_.by_out_copies, a_.out_lanes, lines, [&](int part, int line) {
      int pixel;
      const int number = a_.by_pixels.div(line, pixel);
      const Place at = place_in_tile(a_.cells, pixel);
      const int n = place.image + at.image, c = first + part * kCount;
      const int h = (place.row + at.row) * a_.out_step_h + a_.classes[number].out_row;
      const int w = (place.column + at.column) * a_.out_step_w + a_.classes[number].out_column;
      const bool inside = n < a_.cells.batch && h >= 0 && h < a_.out_height && w >= 0 &&
                          w < a_.out_width && c < end;
      if (!inside) return;
      const T* const from = reinterpret_cast<const T*>(out_ + line * a_.out_pitch) + part * kCount;
      store_vec<kCount>(out + n * a_.out_n + h * a_.out_h + w * a_.out_w + c,
                        load_vec<kCount>(from));
    });
  }

  __device__ __forceinline__ void store(int tile) const {
    if (a_.out_copy == 16) {
      store_copies<16>(tile);
    } else if (a_.out_copy == 8) {
      store_copies<8>(tile);
    } else {
      store_copies<sizeof(T)>(tile);
    }
  }

 public:
  __device__ __forceinline__ Product(const ProductArgs& a, uint4* shared)
      : a_(a),
        shared_(reinterpret_cast<char*>(shared)),
        granules_(reinterpret_cast<Granule*>(shared_ + a.granules_at)),
        pixels_(reinterpret_cast<int*>(shared_ + a.pixels_at)),
        weights_(reinterpret_cast<uint2*>(shared_ + a.weights_at)),
        out_(shared_ + a.out_at),
        tiles_(shared_ + a.tiles_at) {}

  __device__ __forceinline__ void run() const {
    prepare_tables();
    __syncthreads();
    stage_tile(blockIdx.x, 0);
    cp_async_commit();
    stage_weights();
    const bool is_double = a_.buffers == 2;
    int buffer = 0;
    for (int tile = blockIdx.x; tile < a_.cells.tiles; tile += gridDim.x) {
      const int next = tile + gridDim.x;
      const bool has_next = next < a_.cells.tiles;
      if (is_double) {
        if (has_next) stage_tile(next, buffer ^ 1);
        cp_async_commit();
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      __syncthreads();  // and the last tile's results have been stored
      compute(tiles_ + buffer * a_.source.bytes());
      __syncthreads();  // the buffer is filled anew
      if (is_double) {
        buffer ^= 1;
      } else if (has_next) {
        stage_tile(next, 0);
        cp_async_commit();
      }
      store(tile);
    }
  }
};

template <typename T, bool kSplit, int kTile, int kGranule>
__global__ void __launch_bounds__(kThreads, product_blocks(kTile))
    grouped_product_kernel(const __grid_constant__ ProductArgs a) {
  extern __shared__ uint4 shared[];
  wait_for_earlier_kernels();
  constexpr ProductTile kShape = kProductTiles[kTile];
  Product<T, kSplit, kShape.rows, kShape.columns, kGranule>(a, shared).run();
}

template <typename T, bool kSplit, int kGranule, int kTile = 0>
ProductFunction product_function(int tile) {
  if constexpr (kTile == kProductTileCount) {
    return nullptr;
  } else {
    if constexpr (has_product_tile(kSplit, sizeof(T), kGranule, kTile)) {
      if (tile == kTile) return grouped_product_kernel<T, kSplit, kTile, kGranule>;
    }
    return product_function<T, kSplit, kGranule, kTile + 1>(tile);
  }
}

}  // namespace braze::cuda::grouped
