// Products of little depth, up to 128 where C is small (depth 1 has outer.cu). A block takes
// the whole depth of its rows of A and columns of B into shared memory at once, without stages, and
// multiplies on the CUDA cores: what such a product takes is the start, one way to memory and back,
// and fetching the kernel's instructions, which are few.
#include <climits>

#include "cuda/matmul/gemm_plan.cuh"
#include "cuda/common/predicated.cuh"
#include "cuda/matmul/obstacles.h"
#include "cuda/matmul/kernels.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;

// An operand: its outer index is the row of A, the column of B.
template <typename T>
struct Slice {
  const T* data;
  int64_t batch, outer_stride, depth_stride;
  int outer;
  bool depth_major;
  bool quads;  // four elements along the unit stride are aligned, and there or not there together
  int side_shift;  // log2 of the threads side by side along that stride
  int step_shift;  // log2 of the depth between a thread's loads
};

template <typename T>
struct Thin {
  Slice<T> operands[2];
  Output<T> out;
  int m, n, depth;
  FastDiv tiles_m, tiles_n;
};

// kM x kN elements of C are a block's, 4 x 4 a thread's; kGroups groups share out the depth, which
// is kMostDepth at most.
template <int kM_, int kN_, int kGroups_, int kMostDepth_>
struct ThinTile {
  static constexpr int kM = kM_, kN = kN_, kGroups = kGroups_, kMostDepth = kMostDepth_;
  static constexpr int kRow = kN + 4;  // between depths in shared memory, of either operand
  static_assert(kM <= kN && kM / 4 * (kN / 4) * kGroups == kThreads);
  template <typename Acc>
  static int shared_bytes(int depth) {
    const int operands = 2 * depth * kRow, parts = kGroups * kM * kN;
    return (kGroups > 1 ? std::max(operands, parts) : operands) * static_cast<int>(sizeof(Acc));
  }
};
using WideTile = ThinTile<32, 128, 1, 32>;   // for throughput
using SmallTile = ThinTile<16, 32, 8, 128>;  // for many blocks

// `left` loads of W elements each, along the depth or not, kInFlight of them together, to rows of
// kRow elements in shared memory, one for each depth: the first one to the address `to`.
template <int kRow, int W, bool kDepthMajor, int kInFlight, typename T>
__device__ __forceinline__ void copy_slice(const T* from, int64_t from_step, uint32_t to,
                                           uint32_t to_step, int left) {
  const uint32_t end = to + left * to_step;
#pragma unroll 1
  for (; left > 0; left -= kInFlight) {
    Vec<T, W> v[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i, from = advanced(from, from_step)) {
      v[i] = load_inside<W>(from, i < left);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i, to = advanced(to, to_step)) {
      Vec<acc_t<T>, W> wide;
#pragma unroll
      for (int j = 0; j < W; ++j) wide.v[j] = convert<acc_t<T>>(v[i].v[j]);
      // Not i < left: there are few registers for predicates, and loads would wait for them.
      store_shared<kDepthMajor ? kRow : 1>(to, wide, to < end);
    }
  }
}

// What half of the threads do: the operand's rows or columns, from `first` on, to shared memory.
template <int kRow, typename T>
__device__ __forceinline__ void load_slice(const Slice<T>& s, int64_t batch, int first, int depth,
                                           int thread, uint32_t to) {
  const int side = (thread & ((1 << s.side_shift) - 1)) * (s.quads ? 4 : 1);
  const int other = thread >> s.side_shift;
  const int d = s.depth_major ? side : other, outer = s.depth_major ? other : side;
  if (d >= depth || first + outer >= s.outer) return;
  const T* const from =
      s.data + batch * s.batch + (first + outer) * s.outer_stride + d * s.depth_stride;
  constexpr uint32_t kSize = sizeof(acc_t<T>);
  const int64_t from_step = s.depth_stride << s.step_shift;
  const uint32_t to_step = kRow * kSize << s.step_shift;
  const int left = ((depth - 1 - d) >> s.step_shift) + 1;
  to += (d * kRow + outer) * kSize;
  constexpr int kQuads = sizeof(T) == 8 ? 4 : 8;  // in flight
  if (!s.quads) {
    copy_slice<kRow, 1, false, 16>(from, from_step, to, to_step, left);
  } else if (s.depth_major) {
    copy_slice<kRow, 4, true, kQuads>(from, from_step, to, to_step, left);
  } else {
    copy_slice<kRow, 4, false, kQuads>(from, from_step, to, to_step, left);
  }
}

// In 16 bits WideTile gains from as many blocks at once as registers allow without spilling.
template <typename T, typename Tile>
constexpr int kResidentBlocks = sizeof(T) == 2 && Tile::kGroups == 1 ? 5 : 3;

template <typename T, typename Tile>
__global__ void __launch_bounds__(kThreads, kResidentBlocks<T, Tile>)
    thin_kernel(const __grid_constant__ Thin<T> p) {
  using Acc = acc_t<T>;
  constexpr int kM = Tile::kM, kN = Tile::kN, kRow = Tile::kRow;
  extern __shared__ __align__(16) unsigned char thin_shared[];
  Acc* const a = reinterpret_cast<Acc*>(thin_shared);
  Acc* const b = a + p.depth * kRow;
  int column, row;
  const int batch = p.tiles_m.div(p.tiles_n.div(blockIdx.x, column), row);
  column *= kN, row *= kM;
  constexpr int kQuads = kN / 4;
  const int quad = threadIdx.x % kQuads * 4;
  wait_for_earlier_kernels();
  T bias[4];  // converted later: that waits
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool inside = p.out.bias && column + quad + i < p.n;
    bias[i] = load_inside<1>(p.out.bias + column + quad + i, inside).v[0];
  }
  const int half = threadIdx.x / (kThreads / 2);
  load_slice<kRow>(p.operands[half], batch, half ? column : row, p.depth,
                   threadIdx.x % (kThreads / 2),
                   static_cast<uint32_t>(__cvta_generic_to_shared(half ? b : a)));
  __syncthreads();
  const OutputQuad<T, true> out(p.out, batch, column + quad, p.n, bias);

  constexpr int kGroupThreads = kThreads / Tile::kGroups;
  const int group = threadIdx.x / kGroupThreads;
  const int first = threadIdx.x % kGroupThreads / kQuads * 4;  // of four rows
  Acc sum[4][4] = {};
#pragma unroll 2
  for (int d = group; d < p.depth; d += Tile::kGroups) {
    const Vec<Acc, 4> left = load_vec<4>(a + d * kRow + first);
    const Vec<Acc, 4> right = load_vec<4>(b + d * kRow + quad);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j] += left.v[i] * right.v[j];
    }
  }
  if constexpr (Tile::kGroups == 1) {
    // Rolled, which moves the rows but keeps a single copy of the code.
#pragma unroll 1
    for (int i = row + first; i < min(p.m, row + first + 4); ++i) {
      out.store(sum[0], i);
#pragma unroll
      for (int j = 0; j < 12; ++j) sum[j / 4][j % 4] = sum[j / 4 + 1][j % 4];
    }
  } else {
    __syncthreads();  // the operands have been read
    Acc* const parts = a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Vec<Acc, 4> part;
#pragma unroll
      for (int j = 0; j < 4; ++j) part.v[j] = sum[i][j];
      store_vec<4>(parts + (group * kM + first + i) * kN + quad, part);
    }
    __syncthreads();
    const int mine = threadIdx.x / kQuads;
    if (mine >= kM || row + mine >= p.m) return;
    Acc total[4] = {};
#pragma unroll 2
    for (int g = 0; g < Tile::kGroups; ++g) {
      const Vec<Acc, 4> part = load_vec<4>(parts + (g * kM + mine) * kN + quad);
#pragma unroll
      for (int j = 0; j < 4; ++j) total[j] += part.v[j];
    }
    out.store(total, row + mine);
  }
}

constexpr int log2_of(int power) { return power == 1 ? 0 : 1 + log2_of(power / 2); }

// kOuter: rows or columns of a tile.
template <typename T, int kOuter>
Slice<T> slice_of(const MatrixRef& ref, int64_t batch, int64_t outer, int64_t depth,
                  int64_t outer_stride, int64_t depth_stride) {
  const bool depth_major = depth > 1 && depth_stride <= outer_stride;
  const int64_t unit = depth_major ? depth_stride : outer_stride;
  const int64_t other = depth_major ? outer_stride : depth_stride;
  const int64_t along = depth_major ? depth : outer, lines = depth_major ? outer : depth;
  const bool quads = unit == 1 && along % 4 == 0 && (lines == 1 || other % 4 == 0) &&
                     (batch == 1 || ref.batch % 4 == 0) &&
                     reinterpret_cast<uintptr_t>(ref.data) % alignof(Vec<T, 4>) == 0;
  // Along the depth so many threads are side by side that each stays in a row or column: few, so
  // that their stores go to different banks.
  constexpr int kHalf = log2_of(kThreads / 2), kLines = log2_of(kOuter);
  const int width = quads ? 2 : 0;  // log2
  const int side = depth_major ? kHalf - kLines : kLines - width;
  const int step = depth_major ? side + width : kHalf - side;
  return {static_cast<const T*>(ref.data),
          ref.batch,
          outer_stride,
          depth_stride,
          static_cast<int>(outer),
          depth_major,
          quads,
          side,
          step};
}

template <typename Tile>
int64_t blocks_of(const MatmulArgs& p) {
  return p.batch * ceil_div(p.m, Tile::kM) * ceil_div(p.n, Tile::kN);
}

template <typename T, typename Tile>
void launch(Stream stream, const MatmulArgs& args) {
  Thin<T> p{};
  p.operands[0] = slice_of<T, Tile::kM>(args.a, args.batch, args.m, args.k, args.a.row, args.a.col);
  p.operands[1] = slice_of<T, Tile::kN>(args.b, args.batch, args.n, args.k, args.b.col, args.b.row);
  p.out = matmul_output<T>(args);
  p.m = static_cast<int>(args.m);
  p.n = static_cast<int>(args.n);
  p.depth = static_cast<int>(args.k);
  p.tiles_m = FastDiv(ceil_div(args.m, Tile::kM));
  p.tiles_n = FastDiv(ceil_div(args.n, Tile::kN));
  const int64_t blocks = blocks_of<Tile>(args);
  if (blocks > INT_MAX) throw std::runtime_error("thin: more than 2^31 - 1 tiles");
  static std::atomic<uint64_t> done{0};
  allow_shared_memory(reinterpret_cast<const void*>(thin_kernel<T, Tile>),
                      Tile::template shared_bytes<acc_t<T>>(Tile::kMostDepth), done);
  launch_early(thin_kernel<T, Tile>, static_cast<unsigned>(blocks), kThreads,
               Tile::template shared_bytes<acc_t<T>>(p.depth), stream, p);
}

}  // namespace

const char* thin_obstacle(const MatmulArgs& args) {
  if (args.k == 0) return "there is nothing to multiply";
  if (args.k > SmallTile::kMostDepth) return "it takes depths up to 128";
  return too_large(args);
}

bool prefers_thin(const MatmulArgs& args) {
  // Up to a depth of 8 it is the result that takes time; beyond, tensor cores and pipelines win
  // where there is much to multiply.
  const int64_t products = args.batch * args.m * args.n * args.k;
  return args.k <= 8 || (args.k <= 32 && products <= 1 << 25) || products <= 1 << 23;
}

void thin_matmul(Stream stream, const MatmulArgs& args) {
  const bool wide = args.k <= WideTile::kMostDepth && blocks_of<WideTile>(args) >= sm_count();
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    wide ? launch<T, WideTile>(stream, args) : launch<T, SmallTile>(stream, args);
  });
  check_launch("thin");
}

}  // namespace braze::cuda
