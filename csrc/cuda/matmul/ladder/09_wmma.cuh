// Rung 9: the tensor cores, through the portable interface: nvcuda::wmma. bf16 and fp16, and fp32
// rounded to TF32 where that is allowed; sums in fp32.
//
// A warp multiplies 16 x 16 matrices as a whole: each instruction does what took each lane 128
// multiply-adds (64 for TF32), so that the arithmetic is no longer the bound by far (on an H200 the
// tensor cores do 15 times as much in bf16 as the CUDA cores in fp32, 7 times in TF32). Feeding
// them is: a warp loads 6 fragments from shared memory for 8 products, and its block waits for each
// tile as in rung 7. The interface hides which lane holds which element; so results have to pass
// through shared memory to meet the epilogue; and for bf16 and TF32 nvcc 13.0 does not see through
// it that fragments come from shared memory, and emits generic loads where fp16 gets ldmatrix.
#pragma once

#include <mma.h>

#include "rung.cuh"

namespace braze::cuda::ladder {

namespace wmma = nvcuda::wmma;

// A tile of an operand in shared memory, in the order that the operand has in global memory: wmma
// takes either.
template <typename T, int kOuter, int kDepth, bool kDepthUnit>
struct WmmaTile {
  static constexpr int kVec = kVecWidth<T>;
  static constexpr int kColumns = kDepthUnit ? kDepth : kOuter;
  static constexpr int kRow = kColumns + kVec;  // rows that start in different banks
  static constexpr int kSize = (kDepthUnit ? kOuter : kDepth) * kRow;

  static __device__ __forceinline__ int offset(int outer, int depth) {
    return kDepthUnit ? outer * kRow + depth : depth * kRow + outer;
  }

  template <typename Share>
  static __device__ __forceinline__ void load(T* tile, const Share& share, int k0) {
    share.load(k0, [&](int o, int k, Vec<T, kVec> v) {
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) v.v[i] = wmma::__float_to_tf32(v.v[i]);
      }
      store_vec(tile + offset(o, k), v);
    });
  }
};

struct WmmaBlock {
  static constexpr int kTile = 128, kThreads = 256;
  static constexpr int kRows = 4, kColumns = 2;  // of 16 x 16 matrices in a warp
};

template <typename T, bool kDepthUnitA, bool kDepthUnitB>
__global__ void __launch_bounds__(WmmaBlock::kThreads, 2)
    wmma_kernel(const __grid_constant__ Problem<T> p) {
  constexpr int kTile = WmmaBlock::kTile, kThreads = WmmaBlock::kThreads;
  constexpr int kRows = WmmaBlock::kRows, kColumns = WmmaBlock::kColumns;
  constexpr int kDepth = 64 / sizeof(T), kStep = 32 / sizeof(T);  // of a tile, of a fragment
  using Element = std::conditional_t<sizeof(T) == 4, wmma::precision::tf32, T>;
  using OrderA = std::conditional_t<kDepthUnitA, wmma::row_major, wmma::col_major>;
  using OrderB = std::conditional_t<kDepthUnitB, wmma::col_major, wmma::row_major>;
  using TileA = WmmaTile<T, kTile, kDepth, kDepthUnitA>;
  using TileB = WmmaTile<T, kTile, kDepth, kDepthUnitB>;
  // The tiles, and at the end a piece of C for each warp.
  constexpr int kPieceRow = 16 + 4, kPiece = 16 * kPieceRow;
  __shared__ __align__(128) unsigned char shared[(TileA::kSize + TileB::kSize) * sizeof(T)];
  static_assert(sizeof(shared) >= kThreads / 32 * kPiece * sizeof(float));
  T* const as = reinterpret_cast<T*>(shared);
  T* const bs = as + TileA::kSize;
  const BlockTile block = block_tile<kTile, kTile>(p);
  using Share = TileShare<kThreads, kTile, kDepth, kVecWidth<T>, T>;
  const Share share_a(p.a, block.batch, block.m0), share_b(p.b, block.batch, block.n0);
  // Warps are 2 x 4.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / 4 * (16 * kRows), column = warp % 4 * (16 * kColumns);

  wmma::fragment<wmma::accumulator, 16, 16, kStep, float> sum[kRows][kColumns];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) wmma::fill_fragment(sum[i][j], 0.0f);
  }
  for (int k0 = 0; k0 < p.k; k0 += kDepth) {
    TileA::load(as, share_a, k0);
    TileB::load(bs, share_b, k0);
    __syncthreads();
#pragma unroll 1  // or registers run out
    for (int k = 0; k < kDepth; k += kStep) {
      wmma::fragment<wmma::matrix_b, 16, 16, kStep, Element, OrderB> b[kColumns];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        wmma::load_matrix_sync(b[j], bs + TileB::offset(column + 16 * j, k), TileB::kRow);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        wmma::fragment<wmma::matrix_a, 16, 16, kStep, Element, OrderA> a;
        wmma::load_matrix_sync(a, as + TileA::offset(row + 16 * i, k), TileA::kRow);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) wmma::mma_sync(sum[i][j], a, b[j], sum[i][j]);
      }
    }
    __syncthreads();
  }
  float* const piece = reinterpret_cast<float*>(shared) + warp * kPiece;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      wmma::store_matrix_sync(piece, sum[i][j], kPieceRow, wmma::mem_row_major);
      __syncwarp();
      // A lane finishes two quads of half a row.
      const int m = block.m0 + row + 16 * i + lane / 2;
#pragma unroll
      for (int quad = 0; quad < 8; quad += 4) {
        const int n = lane % 2 * 8 + quad;
        const auto v = load_vec<4>(piece + lane / 2 * kPieceRow + n);
        const OutputQuad<T> out(p.out, block.batch, block.n0 + column + 16 * j + n, p.n);
        if (m < p.m) out.store(v.v, m);
      }
      __syncwarp();  // before the piece is overwritten
    }
  }
}

template <typename T>
void launch_wmma(Stream stream, const MatmulArgs& args) {
  dispatch_majors(args, [&](auto a_depth, auto b_depth) {
    launch_tiles<WmmaBlock::kTile, WmmaBlock::kTile, T>(
        "matmul 09_wmma", stream, args, WmmaBlock::kThreads,
        wmma_kernel<T, a_depth.value, b_depth.value>);
  });
}

void run_wmma(Stream stream, const MatmulArgs& args) {
  switch (args.dtype) {
    case DType::kBFloat16: return launch_wmma<__nv_bfloat16>(stream, args);
    case DType::kFloat16: return launch_wmma<__half>(stream, args);
    default: return launch_wmma<float>(stream, args);
  }
}

}  // namespace braze::cuda::ladder
