// What the rungs from 03 on share, so that each of their files holds its one idea: which tile of C
// a block owns, how elements come from operands of any strides, and how they leave.
#pragma once

#include "cuda/matmul/gemm_plan.cuh"
#include "rungs.h"

namespace braze::cuda::ladder {

template <typename T>
using Problem = GemmProblem<MatrixOperand<T>, MatrixOperand<T>>;

struct BlockTile {
  int64_t batch;
  int m0, n0;  // its first row and column of C
};

// Blocks take the tiles of C row by row, one matrix of the batch after the other.
template <int kTileM, int kTileN, typename T>
__device__ __forceinline__ BlockTile block_tile(const Problem<T>& p) {
  const unsigned tiles_m = (p.m - 1) / kTileM + 1, tiles_n = (p.n - 1) / kTileN + 1;
  const unsigned row = blockIdx.x / tiles_n;
  return {row / tiles_m, static_cast<int>(row % tiles_m * kTileM),
          static_cast<int>(blockIdx.x % tiles_n * kTileN)};
}

// kernel(problem) with one block for every kTileM x kTileN tile of C.
template <int kTileM, int kTileN, typename T>
void launch_tiles(const char* name, Stream stream, const MatmulArgs& args, int threads,
                  void (*kernel)(Problem<T>)) {
  const int64_t blocks = ceil_div(args.m, kTileM) * ceil_div(args.n, kTileN) * args.batch;
  if (blocks > INT_MAX) throw std::runtime_error(std::string(name) + ": more than 2^31 - 1 tiles");
  kernel<<<static_cast<unsigned>(blocks), threads, 0, as_cuda(stream)>>>(matmul_problem<T>(args));
  check_launch(name);
}

// A thread's share of an operand's tiles of kOuter x kDepth elements: vectors of kWidth neighbours
// along whichever index has the unit stride, neighbouring threads taking neighbouring vectors.
template <int kThreads, int kOuter, int kDepth, int kWidth, typename T>
class TileShare {
 public:
  // A share of the tiles of a block of C that begins at row or column outer0.
  __device__ TileShare(const MatrixOperand<T>& op, int64_t batch, int outer0)
      : op_(op), outers_(op.outer_extent - outer0) {
    static_assert(kThreads % kDepthVectors == 0 && kThreads % kOuterVectors == 0);
    along_depth_ = op.depth_stride <= op.outer_stride;
    const int thread = threadIdx.x;
    o_ = along_depth_ ? thread / kDepthVectors : thread % kOuterVectors * kWidth;
    k_ = along_depth_ ? thread % kDepthVectors * kWidth : thread / kOuterVectors;
    first_ = op.data + batch * op.batch + (outer0 + o_) * op.outer_stride + k_ * op.depth_stride;
  }

  __device__ bool along_depth() const { return along_depth_; }

  // visit(o, k, address, how many of the vector's elements exist) for the thread's vectors of the
  // tile at depth k0; o and k, the first element's place, count from the tile's corner.
  template <typename Visit>
  __device__ __forceinline__ void for_each(int k0, Visit visit) const {
    constexpr int kCount = kOuter * kDepth / kWidth / kThreads;
    static_assert(kCount * kWidth * kThreads == kOuter * kDepth);
    const int depths = op_.depth_extent - k0;
    // From one of the thread's vectors to the next.
    const int o_step = along_depth_ ? kThreads / kDepthVectors : 0;
    const int k_step = along_depth_ ? 0 : kThreads / kOuterVectors;
    const int64_t step = o_step * op_.outer_stride + k_step * op_.depth_stride;
    const T* from = first_ + k0 * op_.depth_stride;
    int o = o_, k = k_;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool inside = o < outers_ && k < depths;
      visit(o, k, from, !inside ? 0 : along_depth_ ? depths - k : outers_ - o);
      o += o_step, k += k_step, from += step;
    }
  }

  // put(o, k, vector) for the same vectors; zeros stand for what does not exist.
  template <typename Put>
  __device__ __forceinline__ void load(int k0, Put put) const {
    const int64_t stride = along_depth_ ? op_.depth_stride : op_.outer_stride;
    for_each(k0, [&](int o, int k, const T* from, int count) {
      Vec<T, kWidth> v;
      if (kWidth > 1 && op_.vectors && count > 0) {
        v = load_vec<kWidth>(from);
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i, from += stride) {
          v.v[i] = i < count ? *from : convert<T>(acc_t<T>(0));
        }
      }
      put(o, k, v);
    });
  }

 private:
  static constexpr int kDepthVectors = kDepth / kWidth, kOuterVectors = kOuter / kWidth;

  const MatrixOperand<T>& op_;
  const T* first_;
  bool along_depth_;
  int outers_, o_, k_;
};

// One element of C, with the epilogue, if it exists.
template <typename T>
__device__ __forceinline__ void store_element(const Problem<T>& p, int64_t batch, int row,
                                              int column, acc_t<T> sum) {
  if (row >= p.m || column >= p.n) return;
  p.out.data[batch * p.out.batch + row * p.out.row_stride + column] =
      p.out.finish(sum, batch, row, column);
}

}  // namespace braze::cuda::ladder
