// The tiles of conv_gradients.cu's kernel: the copies that bring them, and how z becomes dz where
// it lies.
#pragma once

#include "conv_gradients_products.cuh"

namespace braze::cuda::halo::pooled {
namespace {

constexpr int kStages = 3;  // a tile that is on its way, one that is made, one that is multiplied
constexpr int kPooledBytes = kFilters * 2, kCodeBytes = kFilters / 2;  // of a window
constexpr int kVector = 8, kVectors = kFilters / kVector;  // filters that a thread takes at once
// Results on their way out, [position][channel].
constexpr int kStagedBytes = kPositions * kXRowBytes;

struct Plan16 : Plan {
  int dy_offset, codes_offset;  // of a stage
  bool turned;                  // dy is contiguous
};

// Of each stage: its tile has been copied, made, and read by all products.
struct Barriers {
  uint64_t full[kStages], made[kStages], empty[kStages];
};

// One thread has tile `number` copied to a stage that is free.
template <typename T>
__device__ __forceinline__ void copy_tile(uint64_t* full, unsigned char* stage, int number,
                                          const CUtensorMap* z_map, const CUtensorMap* x_map,
                                          const T* dy, const uint32_t* codes, const Plan16& p) {
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
__device__ __forceinline__ uint4 pooled_gradient(const T* dy, const Plan16& p, int window,
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
__device__ __forceinline__ void make_dz(unsigned char* stage, const Plan16& p, const Tile& t,
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

// The input's gradient from the sums of multiply_positions. to: of the tile's first pixel. Called
// by a warpgroup.
template <typename T>
__device__ __forceinline__ void store_positions(const float (&acc)[kPositions / 2],
                                                unsigned char* staged, int barrier, const Plan& p,
                                                int rows, int first, T* to) {
  constexpr int kBlocks = kPositions / 8;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, thread = threadIdx.x % 128;
  const auto place = [&](int position, int chunk) {
    return staged + position * kXRowBytes + ((chunk ^ (position / 2 & 3)) << 4);
  };
  uint32_t pairs[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const float2 gradients = gradients_at(acc, b);
    pairs[b] = pack_pair<T>(gradients.x, gradients.y);
  }
  named_barrier(barrier, 128);  // nobody reads what was staged before
#pragma unroll
  for (int b = 0; b < kBlocks; b += 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                     shared_address(place(8 * b + lane % 16, warp))),
                 "r"(pairs[b]), "r"(pairs[b + 1])
                 : "memory");
  }
  named_barrier(barrier, 128);
#pragma unroll
  for (int i = 0; i < kPositions; i += 32) {
    const int position = i + thread / 4, c = thread % 4 * 8;
    int column;
    const int row = p.pitch.div(first + position, column);
    if (position < kResults && column < p.w && row < rows && c < p.channels) {
      *reinterpret_cast<uint4*>(to + (row * p.w + column) * p.channels + c) =
          *reinterpret_cast<const uint4*>(place(position, thread % 4));
    }
  }
}

}  // namespace
}  // namespace braze::cuda::halo::pooled
