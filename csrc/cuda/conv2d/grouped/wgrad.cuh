// The weight gradient: filters times (tap, channel), summed over pixels, with mma.sync. Both
// operands come from tiles in shared memory, pixel by pixel; a tap is an offset. The sums stay in
// registers for all of a block's tiles.
#pragma once

#include "stage.cuh"
#include "cuda/common/graph.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/share_sums.cuh"
#include "cuda/conv2d/narrow/products.cuh"

namespace braze::cuda::grouped {

using WgradFunction = void (*)(WgradArgs);

// Sums of a warp: sixteens of filters times eights of columns.
struct WarpTile {
  int rows, columns;
};
constexpr WarpTile kWarpTiles[] = {{1, 6}, {1, 18}, {2, 14}};
constexpr int kWarpTileCount = 3;
constexpr int wgrad_warps(int tile) { return kWarpTiles[tile].rows == 1 ? 16 : 12; }  // at most
constexpr bool has_warp_tile(bool split, int size, int tile) {
  return split ? tile == 0 : size == 2 || tile < 2;
}

WgradFunction wgrad_bf16(int tile);
WgradFunction wgrad_fp16(int tile);
WgradFunction wgrad_tf32(int tile);
WgradFunction wgrad_fp32(int tile);

constexpr int wgrad_step(int size) { return 32 / size; }  // pixels, in one product

template <typename T, bool kSplit, int kRows, int kColumns>
class Wgrad {
  static constexpr int kStep = wgrad_step(sizeof(T)), kSize = sizeof(T);
  static constexpr int kOffsets = kSize == 2 ? kColumns / 2 : kColumns;
  static_assert(kColumns % 2 == 0);

  const WgradArgs& a_;
  char *const shared_, *const x_, *const dy_;
  int* const pixels_;  // of either buffer: where each pixel's first tap lies, or -1
  const int lane_ = threadIdx.x % 32, g_ = lane_ / 4, t_ = lane_ % 4;
  const int across_ = threadIdx.x / 32 % a_.warps_across;
  const int part_ = threadIdx.x / 32 / a_.warps_across;
  const int first_unit_ = blockIdx.y / a_.parts * a_.slab_units;
  int unit_, row0_, column0_;  // of the block's; the first sixteen of filters, eight of columns
  bool has_sums_;
  int offsets_[kOffsets];
  float acc_[kRows * kColumns * 4];

  __device__ __forceinline__ int steps() const { return (a_.cells.pixels + kStep - 1) / kStep; }

  struct Column {
    int tap_h, tap_w, channel;  // the first of eight
  };
  __device__ __forceinline__ Column column_of(int column) const {
    Column at;
    int tap;
    at.channel = a_.by_taps.div(column, tap) * 8;
    at.tap_h = a_.by_taps_w.div(tap, at.tap_w);
    return at;
  }

  __device__ __forceinline__ void prepare() {
    const int number = blockIdx.y % a_.parts * a_.warps_across + across_;
    int local, down;
    unit_ = a_.by_tiles_of_unit.div(number, local);
    const int right = a_.by_tiles_down.div(local, down);
    row0_ = down * kRows, column0_ = right * kColumns;
    has_sums_ = unit_ < a_.slab_units && first_unit_ + unit_ < a_.units;
    if (!has_sums_) unit_ = 0, row0_ = 0, column0_ = 0;
#pragma unroll
    for (int i = 0; i < kOffsets; ++i) {
      const int column = column0_ + (kSize == 2 ? 2 * i + lane_ / 16 : i);
      const Column at = column_of(column < a_.column_tiles ? column : 0);
      offsets_[i] = unit_ * a_.x_unit_pitch + at.channel * kSize +
                    offset_of_tap(a_.x, at.tap_h * a_.tap_row_step, at.tap_w * a_.tap_column_step);
    }
#pragma unroll
    for (int i = 0; i < kRows * kColumns * 4; ++i) acc_[i] = 0;
  }

  __device__ __forceinline__ void stage_tile(int tile, int buffer) const {
    const Cells& c = a_.cells;
    const Place place = place_of(c, tile);
    Place at = place;
    at.row = at.row * c.step_h + c.first_h, at.column = at.column * c.step_w + c.first_w;
    const int unit = first_unit_ * a_.unit_groups;
    stage<T, 2>(a_.x, c.batch, at, unit * a_.channels, x_ + buffer * a_.x.bytes());
    stage<T, 2>(a_.dy, c.batch, place, unit * a_.filters, dy_ + buffer * a_.dy_bytes);
    const int all = steps() * kStep;
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
      const Place cell = place_in_tile(c, i);
      const bool inside = i < c.pixels && place.image + cell.image < c.batch &&
                          place.row + cell.row < c.rows && place.column + cell.column < c.columns;
      pixels_[buffer * all + i] = inside ? offset_in_tile(a_.x, cell, c.step_h) : -1;
    }
  }

  // Pixels that are not there are zeros on both sides: either may have been infinite.
  __device__ __forceinline__ void multiply(const char* x, const char* dy, const int* pixels) {
    dy += unit_ * a_.dy_unit_pitch + row0_ * 16 * kSize;
    for (int step = part_; step < steps(); step += a_.pixel_parts) {
      const int first = step * kStep;
      narrow::Fragment<kSplit, 4> rows[kRows];
      if constexpr (kSize == 2) {
        const char* const from =
            dy + (first + lane_ / 16 * 8 + lane_ % 8) * a_.dy.pitch + lane_ / 8 % 2 * 16;
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          uint32_t v[4];
          ldmatrix_x4_trans(v, from + m * 32);
#pragma unroll
          for (int i = 0; i < 4; ++i) rows[m].set(i, v[i]);
        }
        const int base = pixels[first + lane_ % 16];
#pragma unroll
        for (int i = 0; i < kOffsets; ++i) {
          uint32_t v[4];
          ldmatrix_x4_trans(v, base < 0 ? shared_ : x + base + offsets_[i]);
          multiply_column(2 * i, rows, v[0], v[1]);
          multiply_column(2 * i + 1, rows, v[2], v[3]);
        }
      } else {
        const char* const from = dy + (first + t_) * a_.dy.pitch + g_ * kSize;
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const char* const at = from + i / 2 * 4 * a_.dy.pitch + (m * 16 + i % 2 * 8) * kSize;
            rows[m].set(i, word_at(at));
          }
        }
        const int upper = pixels[first + t_], lower = pixels[first + t_ + 4];
#pragma unroll
        for (int i = 0; i < kOffsets; ++i) {
          const int offset = offsets_[i] + g_ * kSize;
          multiply_column(i, rows, word_at(upper < 0 ? shared_ : x + upper + offset),
                          word_at(lower < 0 ? shared_ : x + lower + offset));
        }
      }
    }
  }

  static __device__ __forceinline__ uint32_t word_at(const char* at) {
    return narrow::product_word<T, kSplit>(*reinterpret_cast<const uint32_t*>(at));
  }

  __device__ __forceinline__ void multiply_column(int n,
                                                  const narrow::Fragment<kSplit, 4> (&rows)[kRows],
                                                  uint32_t upper, uint32_t lower) {
    narrow::Fragment<kSplit, 2> column;
    column.set(0, upper), column.set(1, lower);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      narrow::multiply<T>(*reinterpret_cast<float(*)[4]>(&acc_[(m * kColumns + n) * 4]), rows[m],
                          column);
    }
  }

  // This block's part of the sums, as the filters' gradient lies in memory.
  __device__ __forceinline__ void store() const {
    float* const out = a_.out + blockIdx.x * a_.out_size;
    const int first_group = (first_unit_ + unit_) * a_.unit_groups;
    int group[kRows * 2];  // of the unit, of a lane's filters; -1: there is none
#pragma unroll
    for (int i = 0; i < kRows * 2; ++i) {
      const int filter = row0_ * 16 + i * 8 + g_;
      group[i] = a_.by_filters.div(filter);
      const bool inside =
          group[i] < a_.unit_groups && first_group * a_.filters + filter < a_.all_filters;
      if (!inside) group[i] = -1;
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      if (column0_ + n >= a_.column_tiles) break;
      const Column at = column_of(column0_ + n);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int channel;
        const int of = a_.by_channels.div(at.channel + 2 * t_ + e, channel);
        float* const to = out + (channel * int64_t{a_.w_channel} + at.tap_h * int64_t{a_.w_row} +
                                 at.tap_w * int64_t{a_.w_column});
#pragma unroll
        for (int i = 0; i < kRows * 2; ++i) {
          if (group[i] != of) continue;
          const int filter = first_group * a_.filters + row0_ * 16 + i * 8 + g_;
          to[filter * int64_t{a_.w_filter}] = acc_[(i / 2 * kColumns + n) * 4 + i % 2 * 2 + e];
        }
      }
    }
  }

 public:
  __device__ __forceinline__ Wgrad(const WgradArgs& a, uint4* shared)
      : a_(a),
        shared_(reinterpret_cast<char*>(shared)),
        x_(shared_ + a.x_at),
        dy_(shared_ + a.dy_at),
        pixels_(reinterpret_cast<int*>(shared_ + a.pixels_at)) {}

  __device__ __forceinline__ void run() {
    clear(shared_, x_);
    // What pads a slab meets nothing that counts, but pixels beyond a tile's have to be zeros.
    clear(x_, dy_ + 2 * a_.dy_bytes);
    __syncthreads();
    int buffer = 0;
    stage_tile(blockIdx.x, 0);
    cp_async_commit();
    prepare();
    for (int tile = blockIdx.x; tile < a_.cells.tiles; tile += gridDim.x) {
      const int next = tile + gridDim.x;
      if (next < a_.cells.tiles) stage_tile(next, buffer ^ 1);
      cp_async_commit();
      cp_async_wait<1>();
      __syncthreads();
      if (has_sums_) {
        multiply(x_ + buffer * a_.x.bytes(), dy_ + buffer * a_.dy_bytes,
                 pixels_ + buffer * steps() * kStep);
      }
      __syncthreads();  // the buffer is filled anew
      buffer ^= 1;
    }
    float* const slot = reinterpret_cast<float*>(x_) + across_ * (kRows * kColumns * 4 * 32);
    share_sums(acc_, part_, a_.pixel_parts, slot);
    if (part_ == 0 && has_sums_) store();
  }
};

template <typename T, bool kSplit, int kTile>
__global__ void __launch_bounds__(32 * wgrad_warps(kTile), 1)
    grouped_wgrad_kernel(const __grid_constant__ WgradArgs a) {
  extern __shared__ uint4 shared[];
  wait_for_earlier_kernels();
  Wgrad<T, kSplit, kWarpTiles[kTile].rows, kWarpTiles[kTile].columns>(a, shared).run();
}

template <typename T, bool kSplit = false>
WgradFunction wgrad_function(int tile) {
  if constexpr (has_warp_tile(kSplit, sizeof(T), 2)) {
    if (tile == 2) return grouped_wgrad_kernel<T, kSplit, 2>;
  }
  if constexpr (has_warp_tile(kSplit, sizeof(T), 1)) {
    if (tile == 1) return grouped_wgrad_kernel<T, kSplit, 1>;
  }
  return grouped_wgrad_kernel<T, kSplit, 0>;
}

}  // namespace braze::cuda::grouped
