// Moments of the input patches (small_k.h).
//
// With v the window under a 2x2 square of convolution outputs, the sum of v v' over all squares
// holds every product of two taps at each of the four positions: a quarter of the products that
// patches need, and a plain matrix product, for which the fp64 tensor cores (mma.m8n8k4, sm_80+)
// take their two operands from the same register. Rows or columns of outputs that are left over at
// an odd extent are squares of which only some positions count; they are summed apart.
#pragma once

#include <array>

#include "small_k.cuh"

namespace braze::cuda::small_k {

constexpr int kMomentThreads = 256, kMomentWarps = kMomentThreads / 32;  // 512 measured slower
constexpr int kDumpTiles = kMomentThreads / 64;  // tiles of sums that a block adds up at a time

template <typename Tp>
struct MomentTiles {
  static constexpr int kTiles = (Tp::kWin + 7) / 8;            // of 8 window elements
  static constexpr int kProducts = kTiles * (kTiles + 1) / 2;  // the upper triangle
};

// c (8x8) += a (8x4) * b (4x8). Lane l holds a[l / 4][l % 4], b[l % 4][l / 4] and
// c[l / 4][l % 4 * 2 + {0, 1}].
__device__ __forceinline__ void mma_f64(double (&c)[2], double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+d"(c[0]), "+d"(c[1])
      : "d"(a), "d"(b));
}

// The squares of outputs: whole ones first; then, where an extent is odd, those cut off at the
// right, at the bottom, or both.
struct MomentWork {
  std::array<Tiling, 4> tilings;
  int right[4], below[4];  // whether those positions exist
  int kinds, blocks;       // blocks for each kind

  explicit MomentWork(const SmallKShape& a) : MomentWork(a, sm_count()) {}

  int shared_bytes(int channels) const {
    int elements = kMomentWarps * kDumpTiles * 64;
    for (int i = 0; i < kinds; ++i) {
      elements = std::max(elements, 2 * tilings[i].staged(channels));
    }
    return elements * static_cast<int>(sizeof(double));
  }

 private:
  MomentWork(const SmallKShape& a, int multiprocessors) : tilings(fill(whole(a, multiprocessors))) {
    const int p = static_cast<int>(a.p), q = static_cast<int>(a.q);
    kinds = 0;
    blocks = 0;
    for (int i = 0; i < 4; ++i) {
      const bool to_right = i % 2 == 0, to_below = i / 2 == 0;
      if ((!to_right && q % 2 == 0) || (!to_below && p % 2 == 0)) continue;
      const Squares squares{to_below ? 0 : p - 1, to_right ? 0 : q - 1, to_below ? p / 2 : 1,
                            to_right ? q / 2 : 1};
      if (i > 0) tilings[kinds] = Tiling(a, squares, multiprocessors, sizeof(double));
      right[kinds] = to_right;
      below[kinds] = to_below;
      blocks = std::max(blocks, std::min(tilings[kinds].tiles, 2 * multiprocessors));
      ++kinds;
    }
  }

  static Tiling whole(const SmallKShape& a, int multiprocessors) {
    return Tiling(a, Squares::pooled(a), multiprocessors, sizeof(double));
  }
  static std::array<Tiling, 4> fill(const Tiling& t) { return {t, t, t, t}; }
};

// Leaves the sums of p_i and of p_i p_j (j >= i) of each block's squares in
// partial[blockIdx.y * gridDim.x + blockIdx.x][kMoments]. blockIdx.y: the kind of squares. Counts
// the batch, where `batches` is not null.
template <typename Tp, typename T>
__global__ void __launch_bounds__(kMomentThreads)
    moments_kernel(const __grid_constant__ MomentWork work, const T* __restrict__ x,
                   double* __restrict__ partial, int64_t* __restrict__ batches) {
  wait_for_earlier_kernels();
  using M = MomentTiles<Tp>;
  extern __shared__ double staged[];
  const Tiling& tiling = work.tilings[blockIdx.y];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (batches && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *batches += 1;

  int place[M::kTiles];  // of the window elements 8i + lane / 4
#pragma unroll
  for (int i = 0; i < M::kTiles; ++i) {
    const int e = 8 * i + lane / 4;
    place[i] = e < Tp::kWin ? staged_offset<Tp>(tiling, e) : 0;  // others are never picked
  }
  double products[M::kProducts][2] = {};
  double sums[M::kTiles] = {};
  InputLoader<Tp, T> loader(tiling, x);
  int index = blockIdx.x, size = tiling.staged(Tp::C);
  if (index < tiling.tiles) loader.load(Tile(tiling, index));
  double* input = staged;
  for (; index < tiling.tiles; index += gridDim.x) {
    const Tile tile(tiling, index);
    loader.store(tile, [&](int i, T value) { input[i] = convert<double>(value); });
    const int next = index + static_cast<int>(gridDim.x);
    if (next < tiling.tiles) loader.load(Tile(tiling, next));
    __syncthreads();
    // Four squares a step, one to each of the lanes that differ in lane % 4.
#pragma unroll 2
    for (int square = 4 * warp; square < tiling.rows * tiling.columns; square += 4 * kMomentWarps) {
      int in_plane, corner;
      const bool valid = tile.locate(tiling, square + lane % 4, &in_plane, &corner);
      double v[M::kTiles];
#pragma unroll
      for (int i = 0; i < M::kTiles; ++i) {
        v[i] = valid ? input[corner + place[i]] : 0.0;
        sums[i] += v[i];
      }
      int product = 0;
#pragma unroll
      for (int i = 0; i < M::kTiles; ++i) {
#pragma unroll
        for (int j = i; j < M::kTiles; ++j, ++product) mma_f64(products[product], v[i], v[j]);
      }
    }
    input = input == staged ? staged + size : staged;  // the other buffer: one barrier a tile
  }

  // The block's sums, warp after warp in a fixed order, some tiles at a time. The sums of the
  // elements are one more tile.
  constexpr int kExtent = 8 * M::kTiles;
  __shared__ double gram[kExtent][kExtent + 1];  // the last column: sums of the elements
  double* const dump = staged;                   // [warps][kDumpTiles][64]
#pragma unroll
  for (int first = 0; first <= M::kProducts; first += kDumpTiles) {
    __syncthreads();
    double* const mine = dump + warp * kDumpTiles * 64;
#pragma unroll
    for (int tile = 0; tile < kDumpTiles; ++tile) {
      if (first + tile < M::kProducts) {
        mine[64 * tile + 2 * lane] = products[first + tile][0];
        mine[64 * tile + 2 * lane + 1] = products[first + tile][1];
      } else if (first + tile == M::kProducts) {
#pragma unroll
        for (int i = 0; i < M::kTiles; ++i) {  // a lane has summed one square in four
          double sum = sums[i];
          sum += __shfl_xor_sync(~0u, sum, 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
          if (lane % 4 == 0) mine[64 * tile + 8 * i + lane / 4] = sum;
        }
      }
    }
    __syncthreads();
    const int entry = threadIdx.x % 64;
    int j = first + static_cast<int>(threadIdx.x) / 64, i = 0;
    const bool elements = j == M::kProducts;
    if (j < M::kProducts || (elements && entry < kExtent)) {
      double total = 0;
#pragma unroll
      for (int v = 0; v < kMomentWarps; ++v) total += dump[v * kDumpTiles * 64 + threadIdx.x];
      while (j >= M::kTiles - i && !elements) j -= M::kTiles - i++;
      if (elements) {
        gram[entry][kExtent] = total;
      } else {
        gram[8 * i + entry / 8][8 * (i + j) + entry % 8] = total;
      }
    }
  }
  __syncthreads();

  // From windows to patches: each position that exists sees the window from another corner on.
  partial += (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * Tp::kMoments;
  for (int m = threadIdx.x; m < Tp::kMoments; m += kMomentThreads) {
    int row = m, column = -1;  // m < K: the sum of p_m
    if (m >= Tp::K) {
      row = 0;
      column = m - Tp::K;
      while (column >= Tp::K - row) column -= Tp::K - row++;
      column += row;
    }
    double total = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((j % 2 && !work.right[blockIdx.y]) || (j / 2 && !work.below[blockIdx.y])) continue;
      const int e = Tp::in_window(row) + Tp::shift(j);
      total += gram[e][column < 0 ? kExtent : Tp::in_window(column) + Tp::shift(j)];
    }
    partial[m] = total;
  }
}

}  // namespace braze::cuda::small_k
