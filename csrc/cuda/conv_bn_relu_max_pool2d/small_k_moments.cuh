// Moments of the input patches (conv_bn_relu_max_pool2d.h).
//
// With v the window under a 2x2 square of convolution outputs, the sum of v v' over all squares
// holds every product of two taps at each of the four positions: a quarter of the products that
// patches need, and a plain matrix product, for which the fp64 tensor cores take their two operands
// from the same registers. Rows or columns of outputs that are left over at
// an odd extent are squares of which only some positions count; they are summed by launches of
// their own.
#pragma once

#include <vector>

#include "cuda/common/cluster.cuh"
#include "cuda/common/mma.cuh"
#include "small_k.cuh"

namespace braze::cuda::small_k {

constexpr int kMomentThreads = 128, kMomentWarps = kMomentThreads / 32;
constexpr int kMomentBlocks = 4;  // of a multiprocessor
constexpr int kDumpTiles = 4;     // tiles of sums that a block adds up at a time

template <typename Tp>
struct MomentTiles {
  static constexpr int kTiles = (Tp::kWin + 7) / 8;            // of 8 window elements
  static constexpr int kProducts = kTiles * (kTiles + 1) / 2;  // the upper triangle
};

// What a warp has of the sums of window elements and of their products.
template <typename Tp>
class WindowSums {
 public:
  static constexpr int kTiles = MomentTiles<Tp>::kTiles;

  // v[i]: element 8i + lane / 4 of the window of square lane % 4, for four squares.
  __device__ __forceinline__ void add(const double (&v)[kTiles]) {
    int pair = 0;
#pragma unroll
    for (int i = 0; i < kTiles; i += 2) {
#pragma unroll
      for (int j = i; j < kTiles; ++j, ++pair) {
        if (i + 1 < kTiles) {
          mma_m16n8(products_[pair], v[i], v[i + 1], v[j]);
        } else {
          mma_m8n8(products_[pair], v[i], v[j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) sums_[i] += v[i];
  }
  // Of the products of elements 8i to 8i + 7 with 8j to 8j + 7, j >= i, what mma_m8n8 leaves.
  __device__ __forceinline__ const double* product(int i, int j) const {
    const int even = i / 2;
    return products_[even * kTiles - even * (even - 1) + j - 2 * even] + i % 2 * 2;
  }
  // Of elements 8i + lane / 4, over all squares.
  __device__ __forceinline__ double sum(int i) const {
    double sum = sums_[i];  // of one square in four
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }

 private:
  // Of rows 8i to 8i + 15, i even, with columns from 8i on.
  static constexpr int kRowPairs = (kTiles + 1) / 2;
  double products_[kRowPairs * kTiles - kRowPairs * (kRowPairs - 1)][4] = {};
  double sums_[kTiles] = {};
};

// Squares of outputs of which the same positions exist, and the blocks that take them. The blocks
// of a cluster leave one set of moments.
struct MomentPart {
  Tiling tiling;
  bool right, below;  // whether those positions exist
  int blocks, cluster;

  int sets() const { return blocks / cluster; }
  // Two tiles' inputs and, as the window of what is no square, zeros.
  template <typename Tp>
  int shared_bytes() const {
    const int doubles = 2 * tiling.staged(Tp::C) + zeros<Tp>(tiling);
    return std::max(kMomentWarps * kDumpTiles * 64, doubles) * static_cast<int>(sizeof(double));
  }
  template <typename Tp>
  static __host__ __device__ int zeros(const Tiling& tiling) {
    return ((Tp::C - 1) * tiling.height + Tp::R) * tiling.pitch + Tp::kWinW;
  }
};

// Whole squares first; then, where an extent is odd, those cut off at the right, at the bottom, or
// both.
inline std::vector<MomentPart> moment_parts(const SmallKShape& a) {
  const int p = static_cast<int>(a.p), q = static_cast<int>(a.q), multiprocessors = sm_count();
  const int cluster = runs_sm90_code() ? kMaxCluster : 1;
  std::vector<MomentPart> parts;
  for (int i = 0; i < 4; ++i) {
    const bool right = i % 2 == 0, below = i / 2 == 0;
    if ((!right && q % 2 == 0) || (!below && p % 2 == 0)) continue;
    const Squares squares{below ? 0 : p - 1, right ? 0 : q - 1, below ? p / 2 : 1,
                          right ? q / 2 : 1};
    const Tiling tiling(a, squares, wanted_tiles(1), sizeof(double));
    const int blocks = std::min({tiling.tiles, kMomentBlocks * multiprocessors,
                                 static_cast<int>(kSmallKMostSets) / 4 * cluster});
    parts.push_back(
        {tiling, right, below, static_cast<int>(ceil_div(blocks, cluster)) * cluster, cluster});
  }
  return parts;
}

// The windows of a block's squares, in two buffers of shared memory of a tile's size: where a
// thread's elements lie, and the squares' corners.
template <typename Tp>
class StagedWindows {
 public:
  // corners: [2][kMaxTileSquares], in shared memory, as is `staged`, of part.shared_bytes(). A
  // barrier has to follow.
  __device__ __forceinline__ StagedWindows(const Tiling& tiling, double* staged, int* corners)
      : tiling_(tiling), size_(tiling.staged(Tp::C)), corners_(corners) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int e = 8 * i + static_cast<int>(threadIdx.x) % 32 / 4;
      const int offset = e < Tp::kWin ? staged_offset<Tp>(tiling, e) : 0;  // others: never picked
      places_[i] = static_cast<uint32_t>(__cvta_generic_to_shared(staged + offset));
    }
    const int zeros = MomentPart::zeros<Tp>(tiling);
    for (int i = threadIdx.x; i < zeros; i += kMomentThreads) staged[2 * size_ + i] = 0;
  }
  // Says which squares a tile in a buffer has. A barrier has to follow.
  __device__ __forceinline__ void locate(int buffer, const Tile& tile) {
    for (int square = threadIdx.x; square < kMaxTileSquares; square += kMomentThreads) {
      int in_plane, corner;
      const bool valid = tile.locate(tiling_, square, &in_plane, &corner);
      corners_[buffer * kMaxTileSquares + square] =
          kBytes * (valid ? corner : (2 - buffer) * size_);
    }
  }
  // Adds the warp's part of the squares in a buffer.
  __device__ __forceinline__ void add_to(WindowSums<Tp>& sums, int buffer) const {
    // Four squares a step, one to each of the lanes that differ in lane % 4.
    const int squares = tiling_.rows * tiling_.columns, from = buffer * size_ * kBytes;
    const int* const corners = corners_ + buffer * kMaxTileSquares + threadIdx.x % 4;
#pragma unroll 4
    for (int square = threadIdx.x / 32 * 4; square < squares; square += 4 * kMomentWarps) {
      const uint32_t at = from + corners[square];
      double v[kTiles];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        // (Through a pointer the compiler works out anew where shared memory begins.)
        asm volatile("ld.shared.f64 %0, [%1];" : "=d"(v[i]) : "r"(places_[i] + at) : "memory");
      }
      sums.add(v);
    }
  }

 private:
  static constexpr int kTiles = MomentTiles<Tp>::kTiles, kBytes = sizeof(double);
  const Tiling& tiling_;
  const int size_;
  int* const corners_;
  uint32_t places_[kTiles];
};

// What leave_moments() needs of a block's shared memory. (Declared by its callers: arrays of a
// function that several kernels call may be laid into the memory of all the file's kernels.)
template <typename Tp>
struct BlockMoments {
  static constexpr int kExtent = 8 * MomentTiles<Tp>::kTiles;
  double gram[kExtent][kExtent + 1];  // the last column: sums of the elements
  double moments[Tp::kMoments];
};

// Leaves the cluster's sums of p_i and of p_i p_j (j >= i) at sums_of_sets[set][kMoments]. `staged`
// is free to be overwritten after a barrier, which this has.
template <typename Tp>
__device__ __forceinline__ void leave_moments(const MomentPart& part, int set,
                                              const WindowSums<Tp>& sums, double* staged,
                                              BlockMoments<Tp>& block, double* sums_of_sets) {
  using M = MomentTiles<Tp>;
  constexpr int kExtent = BlockMoments<Tp>::kExtent;
  auto& gram = block.gram;
  auto& moments = block.moments;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // The block's sums, warp after warp in a fixed order, some tiles at a time. The sums of the
  // elements are one more tile.
  double* const dump = staged;  // [warps][kDumpTiles][64]
#pragma unroll
  for (int first = 0; first <= M::kProducts; first += kDumpTiles) {
    __syncthreads();
    double* const mine = dump + warp * kDumpTiles * 64;
    int tile = -first;  // of those that are dumped now
#pragma unroll
    for (int i = 0; i < M::kTiles; ++i) {
#pragma unroll
      for (int j = i; j < M::kTiles; ++j, ++tile) {
        if (tile < 0 || tile >= kDumpTiles) continue;
        const double* const product = sums.product(i, j);
        mine[64 * tile + 2 * lane] = product[0];
        mine[64 * tile + 2 * lane + 1] = product[1];
      }
    }
    if (tile >= 0 && tile < kDumpTiles) {
#pragma unroll
      for (int i = 0; i < M::kTiles; ++i) {
        const double sum = sums.sum(i);
        if (lane % 4 == 0) mine[64 * tile + 8 * i + lane / 4] = sum;
      }
    }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < kDumpTiles * 64; part += kMomentThreads) {
      const int at = part + static_cast<int>(threadIdx.x), entry = at % 64;
      int j = first + at / 64, i = 0;
      const bool elements = j == M::kProducts;
      if (j > M::kProducts || (elements && entry >= kExtent)) continue;
      double total = 0;
#pragma unroll
      for (int v = 0; v < kMomentWarps; ++v) total += dump[v * kDumpTiles * 64 + at];
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
  for (int m = threadIdx.x; m < Tp::K * (Tp::K + 1); m += kMomentThreads) {
    const int row = m % Tp::K, column = m / Tp::K - 1;  // column -1: the sum of p_row
    if (column >= 0 && column < row) continue;
    double total = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((j % 2 && !part.right) || (j / 2 && !part.below)) continue;
      const int e = Tp::in_window(row) + Tp::shift(j);
      total += gram[e][column < 0 ? kExtent : Tp::in_window(column) + Tp::shift(j)];
    }
    moments[column < 0 ? row : Tp::pair(row, column)] = total;
  }

  // The cluster's blocks in their order.
  const int cluster = part.cluster;
  if (cluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (blockIdx.x % cluster == 0) {
    double* const to = sums_of_sets + int64_t{set} * Tp::kMoments;
    for (int m = threadIdx.x; m < Tp::kMoments; m += kMomentThreads) {
      double total = 0;
#pragma unroll
      for (int rank = 0; rank < kMaxCluster; ++rank) {
        if (rank < cluster) total += in_cluster(moments, rank)[m];
      }
      to[m] = total;
    }
  }
  // No block may leave before its sums are read. For what was written nobody need wait.
  if (cluster > 1) cluster_meet();
}

// Leaves the sums of p_i and of p_i p_j (j >= i) of each cluster's squares in
// sums[set][kMoments]. The work of block `index` of part.blocks, kMomentThreads each, of the pixels
// that make_pixels() gives once earlier kernels are done.
template <typename Tp, typename MakePixels>
__device__ __forceinline__ void sum_moments(const MomentPart& part, int index,
                                            const MakePixels& make_pixels, double* sums_of_sets) {
  const Tiling& tiling = part.tiling;
  extern __shared__ double staged[];
  __shared__ int corners[2 * kMaxTileSquares];
  __shared__ BlockMoments<Tp> block;
  StagedWindows<Tp> windows(tiling, staged, corners);
  WindowSums<Tp> sums;
  int2 extent{}, other_extent{};  // of the tiles that `corners` is for, this buffer's and the other
  const int set = index / part.cluster, size = tiling.staged(Tp::C);
  wait_for_earlier_kernels();
  InputLoader<Tp, decltype(make_pixels()), 8> loader(tiling, make_pixels());
  if (index < tiling.tiles) loader.load(Tile(tiling, index));
  for (int buffer = 0; index < tiling.tiles; index += part.blocks, buffer ^= 1) {
    const Tile tile(tiling, index);
    double* const input = staged + buffer * size;
    if (extent.x != tile.rows || extent.y != tile.columns) {
      extent = {tile.rows, tile.columns};
      windows.locate(buffer, tile);
    }
    loader.store(tile, [&](int i, auto value) { input[i] = convert<double>(value); });
    const int next = index + part.blocks;
    if (next < tiling.tiles) loader.load(Tile(tiling, next));
    __syncthreads();  // one a tile: the next one goes to the other buffer
    windows.add_to(sums, buffer);
    const int2 previous = extent;
    extent = other_extent;
    other_extent = previous;
  }
  leave_moments<Tp>(part, set, sums, staged, block, sums_of_sets);
}

// Counts the batch, where `batches` is not null.
template <typename Tp, typename T>
__global__ void __launch_bounds__(kMomentThreads)
    moments_kernel(const __grid_constant__ MomentPart part, const T* x, double* sums,
                   int64_t* batches) {
  const auto pixels = [&] {
    if (batches && blockIdx.x == 0 && threadIdx.x == 0) *batches += 1;
    return TensorPixels<T>(part.tiling, x);
  };
  sum_moments<Tp>(part, static_cast<int>(blockIdx.x), pixels, sums);
}

}  // namespace braze::cuda::small_k
