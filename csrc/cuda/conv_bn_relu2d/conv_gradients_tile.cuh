// The tiles of conv_gradients.cu's kernel: where they lie, the copies that bring them, and how z
// becomes dz.
#pragma once

#include "bn_pool.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/conv2d/halo/epilogue.cuh"
#include "cuda/conv2d/halo/wgrad.cuh"

namespace braze::cuda::halo::pooled {
namespace {

// Warpgroups: one for the weight's gradient, then those for the input's, then those that make dz.
constexpr int kInputs = 2, kMakers = 2;
constexpr int kThreads = (1 + kInputs + kMakers) * 128;
constexpr int kStages = 3;  // a tile that is on its way, one that is made, one that is multiplied
constexpr int kFilterRows = 3;
constexpr int kChannels = 32;  // of x, at most
constexpr int kDzRowBytes = kFilters * 2, kXRowBytes = kChannels * 2;
static_assert(kDzRowBytes == kDyRowBytes);
constexpr int kPooledBytes = kFilters * 2, kCodeBytes = kFilters / 2;  // of a window
constexpr int kVector = 8, kVectors = kFilters / kVector;  // filters that a thread takes at once

// A tile: an image, or rows of one, and a halo of one row above and below. z and x lie alike, rows
// `pitch` positions apart, the first behind one position of zeros, which is also what ends the row
// before.
struct Plan {
  int channels, h, w;  // of x
  FastDiv pitch;
  FastDiv windows;  // in a row, cut-off ones included
  int tile_rows, tiles;
  FastDiv row_tiles;  // of an image
  int chunks;         // of positions: products of the input's gradient
  int steps;          // of kDepth positions: products of the weight's
  int x_offset, dy_offset, codes_offset, stage_bytes, shared_bytes;
  int64_t count;  // of a channel's elements
  bool turned;    // dy is contiguous
  bool early;     // all but the sums may be read before earlier kernels are done

  __host__ __device__ int loaded() const { return (tile_rows + 2) * pitch.divisor(); }
};

struct Tile {
  int image, first_row, rows;   // less the halo
  int window_row, window_rows;  // of windows that cover the halo too, cut-off ones included
  int pooled_rows;              // of those, that have a gradient
};

__device__ __forceinline__ Tile tile_at(const Plan& p, int number) {
  Tile t;
  int row_tile;
  t.image = p.row_tiles.div(number, row_tile);
  t.first_row = row_tile * p.tile_rows;
  t.rows = min(p.tile_rows, p.h - t.first_row);
  t.window_row = max(t.first_row - 1, 0) / 2;
  t.window_rows = min(t.first_row + t.rows, p.h - 1) / 2 - t.window_row + 1;
  t.pooled_rows = max(min(t.window_rows, p.h / 2 - t.window_row), 0);
  return t;
}

// Of each stage: its tile has been copied, made, and read by all products.
struct Barriers {
  uint64_t full[kStages], made[kStages], empty[kStages];
};

// The stage of a tile, and the parity of its barriers' phase. Counted: every warp would divide by
// the number of stages for every tile.
struct Turn {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void next() {
    if (++stage < kStages) return;
    stage = 0;
    phase ^= 1;
  }
};

// Beside tma_load_4d(): `bytes` in a row, a multiple of 16, as the addresses are.
__device__ __forceinline__ void tma_load_bytes(uint64_t* barrier, uint32_t to, const void* from,
                                               uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// One thread has tile `number` copied to a stage that is free.
template <typename T>
__device__ __forceinline__ void copy_tile(uint64_t* full, unsigned char* stage, int number,
                                          const CUtensorMap* z_map, const CUtensorMap* x_map,
                                          const T* dy, const uint32_t* codes, const Plan& p) {
  const Tile t = tile_at(p, number);
  const int q = p.w / 2, pooled = t.pooled_rows * q;
  const int64_t first = (int64_t{t.image} * (p.h / 2) + t.window_row) * q;
  mbarrier_expect(full,
                  p.loaded() * (kDzRowBytes + kXRowBytes) + pooled * (kPooledBytes + kCodeBytes));
  const uint32_t to = shared_address(stage);
  tma_load_4d(z_map, full, to, 0, -1, t.first_row - 1, t.image);
  if (pooled > 0) {
    tma_load_bytes(full, to + p.dy_offset, dy + first * kFilters, pooled * kPooledBytes);
    tma_load_bytes(full, to + p.codes_offset, codes + first * kVectors, pooled * kCodeBytes);
  }
  tma_load_4d(x_map, full, to + p.x_offset, 0, -1, t.first_row - 1, t.image);
}

// What dz is made with, of a thread's vector of filters.
struct Coefficients {
  float by_grad[kVector], by_input[kVector], offset[kVector];

  // Without a center of their own, as where dz goes to memory.
  __device__ explicit Coefficients(const BackwardCoefficients<float>* of) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      by_grad[k] = of[k].by_grad;
      by_input[k] = of[k].by_input;
      offset[k] = of[k].offset - of[k].center * of[k].by_input;
    }
  }
};

// The pooled gradient of a vector of filters in window `window` of a tile, in pairs.
template <typename T>
__device__ __forceinline__ uint4 pooled_gradient(const T* dy, const Plan& p, int window,
                                                 int vector) {
  if (!p.turned) {
    return *reinterpret_cast<const uint4*>(dy + window * kFilters + vector * kVector);
  }
  const int image = (p.h / 2) * (p.w / 2);  // tiles are whole images then
  alignas(16) T g[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) g[k] = dy[(vector * kVector + k) * image + window];
  return *reinterpret_cast<const uint4*>(g);
}

// z of two positions side by side becomes dz, where they lie. codes: no bits where the maximum is
// at the first one, for the vector's filters; flipped by 0x1..1 the same of the second.
template <typename T>
__device__ __forceinline__ void make_pair(unsigned char* dz, int position, bool second, int vector,
                                          const uint4& g, uint32_t codes, const Coefficients& k) {
  uint4* at[2];
  uint4 z[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    at[e] = reinterpret_cast<uint4*>(dz + (position + e) * kDzRowBytes +
                                     ((vector ^ (position + e & 7)) << 4));
    z[e] = *at[e];
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const uint32_t other = codes ^ 0x11111111u * e;
#pragma unroll
    for (int j = 0; j < kVector; j += 2) {
      uint32_t& pair = reinterpret_cast<uint32_t*>(&z[e])[j / 2];
      const float2 value = unpack_pair<T>(pair);
      const float2 through = unpack_pair<T>(reinterpret_cast<const uint32_t*>(&g)[j / 2]);
      float low = fmaf(value.x, k.by_input[j], k.offset[j]);
      float high = fmaf(value.y, k.by_input[j + 1], k.offset[j + 1]);
      if ((other & 7u << 4 * j) == 0) low = fmaf(through.x, k.by_grad[j], low);
      if ((other & 0x70u << 4 * j) == 0) high = fmaf(through.y, k.by_grad[j + 1], high);
      pair = pack_pair<T>(low, high);
    }
    if (e == 0 || second) *at[e] = z[e];
  }
}

// z of a tile becomes dz, by `threads` threads, each of which keeps to a vector of filters. Zeros
// beside the image stay zeros.
template <typename T>
__device__ __forceinline__ void make_dz(unsigned char* stage, const Plan& p, const Tile& t,
                                        const Coefficients& k, int thread, int threads) {
  const int vector = thread % kVectors, q = p.w / 2, pitch = p.pitch.divisor();
  const int windows = t.window_rows * p.windows.divisor();
  const T* const dy = reinterpret_cast<const T*>(stage + p.dy_offset);
  const uint32_t* const codes = reinterpret_cast<const uint32_t*>(stage + p.codes_offset);
  const int bottom = min(t.rows + 1, p.h - t.first_row);  // the last row that is made
  for (int i = thread / kVectors; i < windows; i += threads / kVectors) {
    int column;
    const int row = p.windows.div(i, column);
    uint4 g{};
    uint32_t bits = kAllStopped;
    if (column < q && row < t.pooled_rows) {
      const int window = row * q + column;
      g = pooled_gradient(dy, p, window, vector);
      bits = codes[window * kVectors + vector];
    }
    const int top = 2 * (t.window_row + row) - t.first_row + 1;  // in the tile
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (top + r < 0 || top + r > bottom) continue;
      make_pair<T>(stage, (top + r) * pitch + 2 * column + 1, 2 * column + 1 < p.w, vector, g,
                   bits ^ 0x22222222u * r, k);
    }
  }
}

}  // namespace
}  // namespace braze::cuda::halo::pooled
