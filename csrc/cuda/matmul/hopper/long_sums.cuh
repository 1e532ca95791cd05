// fp32 at fp32's accuracy on the tensor cores, where the sums are long and the results few, and
// both operands are stored along the results' rows and columns: weight gradients.
//
// As in ladder/14_split_fp32.cuh values are three bf16 parts, of whose products six are summed. But
// planes of parts in memory would be written and read once more than the operands, which is what
// such products take their time for. Here a block reads a share of the depth once: two warpgroups,
// the producers, take rows of both operands to registers, split them and write the parts to a stage
// of shared memory, while they have asked for the next stage's rows already. Two other warpgroups
// multiply: each has 64 rows of the tile, or half of its columns, or, of small tiles, every other
// stage. A second launch adds up the blocks' sums in a fixed order.
//
// Code is kept short: of small products every block goes through it but a few times, and fetching
// instructions takes longer than running them.
#pragma once

#include "long_reader.cuh"
#include "cuda/common/graph.cuh"
#include "cuda/common/registers.cuh"
#include "cuda/common/wgmma.cuh"

namespace braze::cuda::hopper {

// sum = first^T second over kRows rows of a stage, the first of which is number `row`.
template <typename Tile, int kRows>
__device__ __forceinline__ void long_multiply(float (&sum)[Tile::kGroup / 2], uint32_t first,
                                              uint32_t second, int row) {
  using Pairs = halo::PartPairs<kLongParts>;
  const uint64_t a =
      wgmma_descriptor<Tile::kRowBytes>(first + row * Tile::kRowBytes, Tile::kFirstLeading);
  const uint64_t b = wgmma_descriptor<Tile::kSecondRowBytes>(second + row * Tile::kSecondRowBytes,
                                                             Tile::kDepth * Tile::kSecondRowBytes);
  wgmma_touch(sum);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kRows / kLongStep; ++step) {
#pragma unroll
    for (int pair = 0; pair < Pairs::kCount; ++pair) {
      Wgmma<__nv_bfloat16, Tile::kGroup>::template run<1, 1>(
          sum,
          wgmma_advance(
              a, Pairs::first(pair) * Tile::kPlaneBytes + step * kLongStep * Tile::kRowBytes),
          wgmma_advance(b, Pairs::second(pair) * Tile::kPlaneBytes +
                               step * kLongStep * Tile::kSecondRowBytes),
          step + pair > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_touch(sum);
}

// A value of a stage: of the operand whose blocks begin at `blocks`.
template <typename Tile, int kRowBytes>
__device__ __forceinline__ float long_value(const unsigned char* blocks, int row, int column) {
  constexpr int kBlock = kRowBytes / 2;
  return halo::unsplit<kLongParts, kRowBytes>(blocks + column / kBlock * (Tile::kDepth * kRowBytes),
                                              Tile::kPlaneBytes, row, column % kBlock);
}

// The same on CUDA cores, for one result of a stage with infinities or NaN, in a row that C has.
template <typename Tile>
__device__ __noinline__ float long_plain(const unsigned char* stage, int row, int column) {
  float sum = 0;
  for (int i = 0; i < Tile::kDepth; ++i) {
    sum += long_value<Tile, Tile::kRowBytes>(stage, i, row) *
           long_value<Tile, Tile::kSecondRowBytes>(stage + Tile::kSecond, i, column);
  }
  return sum;
}

template <typename Tile>
__device__ __forceinline__ void long_consume(const LongArgs& args, const LongPlace& place,
                                             LongRing<Tile::kStages>& ring,
                                             const unsigned char* stages) {
  constexpr int kChain = Tile::kDepth < kLongChain ? Tile::kDepth : kLongChain;
  constexpr int kBlock = Tile::kSecondRowBytes / 2;
  // in a uniform register, as descriptors must be
  const int group = __shfl_sync(~0u, (threadIdx.x - kLongProducers) / 128, 0);
  const int turn = Tile::kTurns > 1 ? group : 0;
  const int group_row = Tile::kGroupsOfRows > 1 ? group * 64 : 0;
  const int group_column = Tile::kTurns == 1 && Tile::kGroupsOfRows == 1 ? group * Tile::kGroup : 0;
  const int lane_row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  const int lane_column = threadIdx.x % 4 * 2;
  float acc[Tile::kGroup / 2], sum[Tile::kGroup / 2];
#pragma unroll
  for (float& v : acc) v = 0;
#pragma unroll 1
  for (int j = turn; j < place.count; j += Tile::kTurns) {
    const unsigned char* const stage = stages + j % Tile::kStages * Tile::kStageBytes;
    const uint32_t first =
        shared_address(stage) + group_row / 64 * (Tile::kDepth * Tile::kRowBytes);
    const uint32_t second = shared_address(stage) + Tile::kSecond +
                            group_column / kBlock * (Tile::kDepth * Tile::kSecondRowBytes);
    ring.wait(j);
    if (ring.special[j % Tile::kStages] != j + 1) {
#pragma unroll 1
      for (int row = 0; row < Tile::kDepth; row += kChain) {
        long_multiply<Tile, kChain>(sum, first, second, row);
#pragma unroll
        for (int i = 0; i < Tile::kGroup / 2; ++i) acc[i] += sum[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kGroup / 2; ++i) {
        acc[i] += long_plain<Tile>(stage, (group_row + lane_row + i / 2 % 2 * 8) % Tile::kRows,
                                   group_column + i / 4 * 8 + lane_column + i % 2);
      }
    }
    ring.release(j);
  }

  const int part = blockIdx.x % args.splits * Tile::kTurns + turn;
  const int tile = blockIdx.x / args.splits, across = Tile::kTurns > 1 ? 0 : group;
  float4* const to = args.partial + (int64_t{part} * args.tiles + tile) * Tile::kItems +
                     across * Tile::kQuads * 128 + threadIdx.x % 128;
  const bool rows_left = place.row + group_row + threadIdx.x / 32 % 4 * 16 < args.first.columns;
  const int columns_left = rows_left ? args.second.columns - place.column - group_column : 0;
#pragma unroll
  for (int i = 0; i < Tile::kQuads; ++i) {
    if (i * 8 < columns_left) {
      to[i * 128] = float4{acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
    }
  }
}

// A block for each tile and split.
template <typename Tile, bool kVectors>
__global__ void __launch_bounds__(kLongThreads, 1)
    long_kernel(const __grid_constant__ LongArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  extern __shared__ unsigned char shared_bytes[];
  unsigned char* const stages = shared_bytes + (-shared_address(shared_bytes) & 1023);
  __shared__ LongRing<Tile::kStages> ring;
  const LongPlace place = long_place<Tile>(args);
  ring.init(Tile::kAcross);
  __syncthreads();
  wait_for_earlier_kernels();
  if (threadIdx.x < kLongProducers) {
    set_registers<kLongRegisters, Tile::kProducerRegisters>();
    long_produce<Tile, kVectors>(args, place, ring, stages);
  } else {
    set_registers<kLongRegisters, Tile::kConsumerRegisters>();
    long_consume<Tile>(args, place, ring, stages);
  }
#endif
}

// C from the blocks' sums. A block has kLongSumThreads / kSlices of a tile's items; each is added
// up by kSlices threads. In fp64, as there are few terms.
constexpr int kLongSumThreads = 256;
template <typename Tile, int kSlices>
__global__ void __launch_bounds__(kLongSumThreads)
    long_sum_kernel(const __grid_constant__ LongArgs args) {
  constexpr int kItems = kLongSumThreads / kSlices, kAtOnce = 4;
  static_assert(Tile::kItems % kItems == 0);
  __shared__ double sums[kSlices][4][kItems];
  wait_for_earlier_kernels();
  const int at = threadIdx.x % kItems, slice = threadIdx.x / kItems;
  const int tile = blockIdx.y, item = blockIdx.x * kItems + at;
  // As a consumer's accumulators lie.
  const int thread = item % 128, quad = item / 128 % Tile::kQuads;
  const int group = item / 128 / Tile::kQuads;
  const int row = tile / args.column_tiles * Tile::kRows +
                  (Tile::kGroupsOfRows > 1 ? group * 64 : 0) + thread / 32 * 16 + thread % 32 / 4;
  const int column = tile % args.column_tiles * Tile::kColumns +
                     (Tile::kGroupsOfRows > 1 ? 0 : group * Tile::kGroup) + quad * 8 +
                     thread % 4 * 2;
  const bool inside = row < args.first.columns && column < args.second.columns;
  const float4* const from = args.partial + int64_t{tile} * Tile::kItems + item;
  const int64_t stride = int64_t{args.tiles} * Tile::kItems;
  double sum[4] = {};
  for (int part = slice; inside && part < args.parts; part += kSlices * kAtOnce) {
    float4 terms[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int of = part + k * kSlices;
      terms[k] = of < args.parts ? from[of * stride] : float4{0, 0, 0, 0};
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      sum[0] += terms[k].x, sum[1] += terms[k].y, sum[2] += terms[k].z, sum[3] += terms[k].w;
    }
  }
  if constexpr (kSlices > 1) {
#pragma unroll
    for (int k = 0; k < 4; ++k) sums[slice][k][at] = sum[k];
    __syncthreads();
    if (slice > 0) return;
    for (int other = 1; other < kSlices; ++other) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] += sums[other][k][at];
    }
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int m = row + k / 2 * 8, n = column + k % 2;
    if (m >= args.first.columns || n >= args.second.columns) continue;
    float v = static_cast<float>(sum[k]);
    if (args.bias) v += args.bias[args.swapped ? m : n];
    if (args.relu && v < 0) v = 0;  // NaN stays NaN
    args.c[m * args.row_stride + n * args.column_stride] = v;
  }
}

}  // namespace braze::cuda::hopper
