// One product for the tiled kernels: operands, output, extents, the split of the depth over blocks,
// and the ordered sum of the parts.
#pragma once

#include <atomic>

#include "cluster.cuh"
#include "gemm_operand.cuh"
#include "launch.cuh"
#include "tile_order.cuh"

namespace braze::cuda {

struct GemmBlock {
  int64_t batch;
  int split, m0, n0, first_tile, tiles;
};

// What rows [begin, end) of a tile, in shared memory as they were stored, add to the sums of C's
// columns and rows; always in the same order. The tile's corner is at (m0, n0).
template <int kTileN, int kRow, int kThreads, typename T>
__device__ __forceinline__ void sum_tile(const FullOutput<T>& out, const acc_t<T>* tile, int m,
                                         int n, int m0, int n0, int begin, int end, int column_part,
                                         int row_part) {
  using Acc = acc_t<T>;
  __syncthreads();
  const int columns = min(kTileN, n - n0);
  if (out.column_parts) {
    for (int column = threadIdx.x; column < columns; column += kThreads) {
      Acc sums[4] = {};  // short chains of additions are fast, and round less
      for (int row = begin; row < end; row += 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (row + i < end) sums[i] += tile[(row + i) * kRow + column];
        }
      }
      out.column_parts[int64_t{column_part} * n + n0 + column] =
          (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
  }
  if (out.row_parts) {
    const int lane = threadIdx.x % 32;
    for (int row = begin + threadIdx.x / 32; row < end; row += kThreads / 32) {
      Acc sum = 0;
#pragma unroll
      for (int column = lane; column < kTileN; column += 32) {
        if (column < columns) sum += tile[row * kRow + column];
      }
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
      if (lane == 0) out.row_parts[int64_t{row_part} * m + m0 + row] = sum;
    }
  }
}

// Out: Output or, for the full epilogue, FullOutput.
template <typename OpA, typename OpB, typename Out = Output<typename OpA::T>>
struct GemmProblem {
  using T = typename OpA::T;
  OpA a;
  OpB b;
  Out out;
  int64_t batch;
  int m, n, k;
  // Set by set_tiles() and launch_gemm(). With more than one split every block writes its part of
  // C, in the accumulation type, to partial[split][batch][m][n]; or, clustered, keeps it in shared
  // memory, where the blocks of the other splits, all of one cluster, find it.
  TileOrder order;
  int splits, depth_tiles;
  FastDiv by_splits;
  acc_t<T>* partial;
  bool clustered;
  unsigned first_block;  // of the launch that works on this product
  bool early_b;          // B may be read before earlier kernels are done (may_read_early)

  // Cuts it into tiles, kDepth deep, and their depth into `parts`. Returns how many blocks that
  // takes.
  template <int kTileM, int kTileN, int kDepth>
  unsigned set_tiles(int parts) {
    const int64_t rows = ceil_div(m, kTileM), columns = ceil_div(n, kTileN);
    const int64_t blocks = rows * columns * batch * parts;
    if (blocks > INT_MAX) throw std::runtime_error("gemm: more than 2^31 - 1 tiles");
    order = TileOrder(rows, columns);
    splits = parts, by_splits = FastDiv(parts);
    depth_tiles = static_cast<int>(ceil_div(k, kDepth));
    return static_cast<unsigned>(blocks);
  }

  // What the calling block works on.
  template <int kTileM, int kTileN>
  __device__ __forceinline__ GemmBlock block() const {
    GemmBlock result;
    int index = static_cast<int>(blockIdx.x - first_block), row, column;
    if (clustered) index = by_splits.div(index, result.split);
    index = order.place(index, row, column);
    result.batch = clustered ? index : by_splits.div(index, result.split);
    result.m0 = row * kTileM, result.n0 = column * kTileN;
    int rest;
    const int each = by_splits.div(depth_tiles, rest);
    result.first_tile = each * result.split + min(rest, result.split);
    result.tiles = each + (result.split < rest);
    return result;
  }

  // The end of a kernel: visit(store) calls store(v, m, n) with four neighbouring values of C each,
  // n a multiple of 4, until every element of the block's tile has been given; what lies outside C
  // is dropped. `shared` holds shared_bytes() and is free to be written once all threads have
  // arrived: threads trade the values they have for whole rows, which memory takes faster. With
  // kGroups groups of threads each gives a part of every element.
  template <int kTileM, int kTileN, int kThreads, int kGroups = 1, typename Visit>
  __device__ __forceinline__ void store_tile(const GemmBlock& block, void* shared,
                                             Visit visit) const {
    using Acc = acc_t<T>;
    constexpr int kRow = tile_row<kTileN>();
    constexpr int kTile = kTileM * kRow;
    Acc* const tile = static_cast<Acc*>(shared);
    Acc* const mine_of_group = tile + threadIdx.x / (kThreads / kGroups) * kTile;
    __syncthreads();
    visit([&](const Acc(&v)[4], int row, int column) {
      write4(mine_of_group + (row - block.m0) * kRow + column - block.n0, v);
    });
    // A thread stays in four columns.
    constexpr int kRowQuads = kTileN / 4, kStep = kThreads / kRowQuads;
    static_assert(kThreads % kRowQuads == 0);
    const int first = threadIdx.x / kRowQuads, column = threadIdx.x % kRowQuads * 4;
    const int rows = min(kTileM, m - block.m0);
    const auto sum_groups = [&](const Acc* from, Acc(&sum)[4]) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const auto part = *reinterpret_cast<const Vec<Acc, 4>*>(from + g * kTile);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += part.v[j];
      }
    };
    const auto store = row_store(block, block.n0 + column);  // reads the bias meanwhile
    const bool inside = block.n0 + column < n;
    // For the sums of columns and rows the finished values go back to where they came from.
    const auto keep = [&](int row, const Acc(&v)[4]) {
      if constexpr (Out::kFull) write4(tile + row * kRow + column, v);
    };
    const auto sum_rows = [&](int begin, int end) {
      if constexpr (Out::kFull) {
        const int parts = clustered ? splits : 1;
        sum_tile<kTileN, kRow, kThreads>(out, tile, m, n, block.m0, block.n0, begin, end,
                                         block.m0 / kTileM * parts + block.split,
                                         block.n0 / kTileN);
      }
    };
    if (!clustered) {
      __syncthreads();
      if (!Out::kFull && !inside) return;
#pragma unroll 2
      for (int row = first; row < (inside ? rows : 0); row += kStep) {
        Acc sum[4] = {};
        sum_groups(tile + row * kRow + column, sum);
        store(sum, block.m0 + row);
        keep(row, sum);
      }
      if (splits == 1) sum_rows(0, rows);
      return;
    }
    // In a cluster every block adds up its share of the rows, always in the order of the splits.
    if constexpr (kGroups > 1) {
      __syncthreads();
#pragma unroll
      for (int row = first; row < kTileM; row += kStep) {
        Acc sum[4] = {};
        sum_groups(tile + row * kRow + column, sum);
        write4(tile + row * kRow + column, sum);
      }
    }
    cluster_sync();
    const int begin = by_splits.div(kTileM * block.split);
    const int end = min(rows, by_splits.div(kTileM * (block.split + 1)));
    for (int row = begin + first; row < (inside ? end : 0); row += kStep) {
      Acc sum[4] = {};
#pragma unroll 8
      for (int s = 0; s < splits; ++s) {
        const auto part =
            *reinterpret_cast<const Vec<Acc, 4>*>(in_cluster(tile + row * kRow + column, s));
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += part.v[j];
      }
      store(sum, block.m0 + row);
      keep(row, sum);
    }
    sum_rows(begin, end);
    // No block ends while another may read its shared memory. What was read has been added up, and
    // for what was written nobody need wait.
    cluster_meet();
  }

  // What a matrix product without splits, or clustered, writes.
  Span written() const { return {out.data, batch * m * n * static_cast<int64_t>(sizeof(T))}; }

  template <int kTileM, int kTileN, int kGroups = 1>
  static constexpr int shared_bytes() {
    return kGroups * kTileM * tile_row<kTileN>() * static_cast<int>(sizeof(acc_t<T>));
  }

 private:
  static __device__ __forceinline__ void write4(acc_t<T>* to, const acc_t<T> (&v)[4]) {
    constexpr int kWidth = sizeof(v) == 32 ? 2 : 4;
#pragma unroll
    for (int i = 0; i < 4; i += kWidth) {
      Vec<acc_t<T>, kWidth> part;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) part.v[j] = v[i + j];
      *reinterpret_cast<Vec<acc_t<T>, kWidth>*>(to + i) = part;
    }
  }
  // Padded, so that the eight rows that a warp writes at once spread over the banks.
  template <int kTileN>
  static constexpr int tile_row() {
    return kTileN + 8;
  }
  // A function (sum, row) that stores four columns from `column` on.
  __device__ __forceinline__ auto row_store(const GemmBlock& block, int column) const {
    const bool final = splits == 1 || clustered;
    constexpr bool kRowMajor = !OpA::kGathered && !OpB::kGathered;  // a matrix product
    const auto quad = [&] {
      if constexpr (Out::kFull) {
        return FullOutputQuad<T>(out, column, n);
      } else {
        return OutputQuad<T, kRowMajor>(out, block.batch, column, n);
      }
    }();
    acc_t<T>* const part = partial + (block.split * batch + block.batch) * m * n + column;
    // FullOutputQuad writes to v.
    using Values = std::conditional_t<Out::kFull, acc_t<T>, const acc_t<T>>;
    return [=](Values(&v)[4], int row) {
      if (final) {
        quad.store(v, row);
        return;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i < n) part[int64_t{row} * n + i] = v[i];
      }
    };
  }
};

// Blocks that share a multiprocessor, as far as shared memory and the registers of sums decide.
template <typename Kernel>
constexpr int kSumBytes =  // of a thread
    Kernel::kTileM * Kernel::kTileN * sizeof(acc_t<typename Kernel::T>) / Kernel::kThreads;
template <typename Kernel>
constexpr int kBlocksPerSm = Kernel::kSharedBytes > 112 * 1024                    ? 1
                             : Kernel::kThreads == 256 || kSumBytes<Kernel> > 256 ? 2
                                                                                  : 3;

template <typename Kernel, typename Problem>
__global__ void __launch_bounds__(Kernel::kThreads, kBlocksPerSm<Kernel>)
    gemm_kernel(const __grid_constant__ Problem problem) {
  Kernel::run(problem);  // waits for earlier kernels by itself
}

// C = epilogue(sum of the splits' parts, in their order).
template <typename T>
__global__ void gemm_reduce_kernel(const acc_t<T>* partial, Output<T> out, int64_t batch, int m,
                                   int n, int splits) {
  wait_for_earlier_kernels();
  const int64_t quads = (n + 3) / 4, total = batch * m * quads;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total; i += stride) {
    const int64_t row = i / quads;  // batch * m + row of C
    const int column = static_cast<int>(i - row * quads) * 4;
    acc_t<T> sum[4] = {};
#pragma unroll 4
    for (int s = 0; s < splits; ++s) {
      const acc_t<T>* const from = partial + (s * batch * m + row) * n + column;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (column + j < n) sum[j] += from[j];
      }
    }
    OutputQuad<T>(out, row / m, column, n).store(sum, static_cast<int>(row % m));
  }
}

constexpr int kReduceRows = 32, kReduceColumns = 128, kReduceThreads = 256;

// The same with the full epilogue, tile by tile.
template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    gemm_reduce_full_kernel(const acc_t<T>* partial, const __grid_constant__ FullOutput<T> out,
                            int m, int n, int splits) {
  wait_for_earlier_kernels();
  constexpr int kRow = kReduceColumns + 8, kQuads = kReduceColumns / 4;
  __shared__ __align__(16) acc_t<T> tile[kReduceRows][kRow];
  const int tiles_n = (n - 1) / kReduceColumns + 1;
  const int tile_row = blockIdx.x / tiles_n, tile_column = blockIdx.x % tiles_n;
  const int m0 = tile_row * kReduceRows, n0 = tile_column * kReduceColumns;
  const int rows = min(kReduceRows, m - m0), in_tile = threadIdx.x % kQuads * 4;
  const int column = n0 + in_tile;
  const FullOutputQuad<T> quad(out, column, n);
  for (int row = threadIdx.x / kQuads; row < rows; row += kReduceThreads / kQuads) {
    acc_t<T> sum[4] = {};
#pragma unroll 4
    for (int s = 0; s < splits; ++s) {
      const acc_t<T>* const from = partial + (int64_t{s} * m + m0 + row) * n + column;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (column + j < n) sum[j] += from[j];
      }
    }
    if (column < n) quad.store(sum, m0 + row);
#pragma unroll
    for (int j = 0; j < 4; ++j) tile[row][in_tile + j] = sum[j];
  }
  sum_tile<kReduceColumns, kRow, kReduceThreads>(out, &tile[0][0], m, n, m0, n0, 0, rows, tile_row,
                                                 tile_column);
}

// How many parts the depth is split into, so that `blocks` tiles of C fill the device: 1 where they
// do already. Every part keeps at least 4 tiles of depth.
inline int plan_splits(int64_t blocks, int64_t depth_tiles, int blocks_per_sm) {
  const int64_t slots = int64_t{sm_count()} * blocks_per_sm;
  if (blocks == 0 || 2 * blocks > slots) return 1;
  return static_cast<int>(
      std::max<int64_t>(1, std::min({slots / blocks, depth_tiles / 4, int64_t{256}})));
}

template <typename T>
int64_t split_bytes(int splits, int64_t batch, int64_t m, int64_t n) {
  return splits == 1 ? 0 : splits * batch * m * n * static_cast<int64_t>(sizeof(acc_t<T>));
}

template <typename T>
void launch_gemm_reduce(Stream stream, const acc_t<T>* partial, const Output<T>& out, int64_t batch,
                        int m, int n, int splits) {
  constexpr int kThreads = 128;
  const int blocks = grid_stride_blocks(batch * m * ceil_div(n, 4), kThreads);
  launch_early(gemm_reduce_kernel<T>, blocks, kThreads, 0, stream, partial, out, batch, m, n,
               splits);
  check_launch("gemm_reduce");
}

template <typename T>
void launch_gemm_reduce(Stream stream, const acc_t<T>* partial, const FullOutput<T>& out, int64_t,
                        int m, int n, int splits) {
  const int64_t blocks = ceil_div(m, kReduceRows) * ceil_div(n, kReduceColumns);
  if (blocks > INT_MAX) throw std::runtime_error("gemm_reduce: more than 2^31 - 1 tiles");
  launch_early(gemm_reduce_full_kernel<T>, static_cast<unsigned>(blocks), kReduceThreads, 0, stream,
               partial, out, m, n, splits);
  check_launch("gemm_reduce");
}

// A kernel must be told once per device that it may use more than 48 KiB of shared memory; `done`
// is its own set of devices.
inline void allow_shared_memory(const void* kernel, int bytes, std::atomic<uint64_t>& done) {
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (done.load(std::memory_order_relaxed) & bit) return;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("gemm: ") + std::to_string(bytes) +
                             " bytes of shared memory refused: " + cudaGetErrorString(error));
  }
  done.fetch_or(bit, std::memory_order_relaxed);
}

// `workspace` holds split_bytes(splits, ...), unless the splits' blocks form clusters.
template <typename Kernel, typename Problem>
void launch_gemm(Stream stream, Problem problem, int splits, void* workspace,
                 bool clustered = false) {
  using T = typename Problem::T;
  const unsigned blocks =
      problem.template set_tiles<Kernel::kTileM, Kernel::kTileN, Kernel::kDepth>(
          workspace || clustered ? splits : 1);
  problem.partial = static_cast<acc_t<T>*>(workspace);
  problem.clustered = clustered && problem.splits > 1;
  if constexpr (Kernel::kOrders) {
    problem.early_b = problem.batch == 1 && may_read_early(stream, span_of(problem.b));
  }
  static std::atomic<uint64_t> done{0};
  allow_shared_memory(reinterpret_cast<const void*>(gemm_kernel<Kernel, Problem>),
                      Kernel::kSharedBytes, done);
  if (problem.clustered) {
    launch_clusters("gemm", stream, gemm_kernel<Kernel, Problem>, blocks, Kernel::kThreads,
                    Kernel::kSharedBytes, problem.splits, problem);
    if constexpr (Kernel::kOrders) note_ordering_kernel(stream, {problem.written()});
    return;
  }
  launch_early(gemm_kernel<Kernel, Problem>, blocks, Kernel::kThreads, Kernel::kSharedBytes, stream,
               problem);
  check_launch("gemm");
  if (problem.splits > 1) {
    launch_gemm_reduce<T>(stream, problem.partial, problem.out, problem.batch, problem.m, problem.n,
                          problem.splits);
  } else if constexpr (Kernel::kOrders) {
    note_ordering_kernel(stream, {problem.written()});
  }
}

}  // namespace braze::cuda
