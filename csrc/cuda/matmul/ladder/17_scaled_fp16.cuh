// Rung 17: fp32 at fp32's accuracy by three products instead of six.
//
// Rung 14 takes bf16 for its exponents, and pays with 8 bits a part. fp16 has 11: two parts hold 22
// bits, and three products of them (first by first, first by rest, rest by first) are within a few
// of fp32's own roundings. What fp16 lacks is range. Every row of A and column of B is multiplied
// by the power of two that brings its largest magnitude to 2^14, which is exact and undone at the
// end. A value's first part then has all its bits down to 2^-28 of the largest, and so has the
// rest, which is kept 2^11 times as large: products with it are summed apart, and divided by 2^11
// when they join the others. Values below that have fewer bits: their error is less than 2^-50 of
// the largest value of their row.
//
// The price: both matrices are read once more before they are split, for the largest magnitudes.
// Method: after Ootomo and Yokota (arXiv 2203.03341), who scale the rest in the same way.
#pragma once

#include "14_split_fp32.cuh"

namespace braze::cuda::hopper {

template <int kCluster>
using ScaledTile = PartTile<__half, 2, 3, kCluster>;

constexpr int kRestBits = 11;      // by which the rest is larger than it is
constexpr int kLargestBits = 14;   // the largest magnitude's exponent
constexpr int kMostScaling = 126;  // so that the power is a normal number

// s of 2^s, by which what has this largest magnitude is multiplied.
__device__ __forceinline__ int scale_exponent(uint32_t largest) {
  return min(kLargestBits + 127 - static_cast<int>(largest >> 23), kMostScaling);
}
__device__ __forceinline__ float power_of_two(int exponent) {  // of a normal number
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

template <int kStages, int kCluster, int kColumns, int kLoadedColumns>
class PartSums<PartTile<__half, 2, kStages, kCluster, kColumns, kLoadedColumns>> {
  using Tile = PartTile<__half, 2, kStages, kCluster, kColumns, kLoadedColumns>;

 public:
  static constexpr int kCount = Tile::kColumns / 2;
  float sums[kCount];

  __device__ __forceinline__ void clear() {
    stages_ = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = rest_[i] = 0;
  }
  template <int kRowMajor, int kColumnMajor>
  __device__ __forceinline__ void multiply(uint64_t rows, uint64_t columns) {
    wgmma_touch(rest_);
    wgmma_touch(first_);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int row = step * step_of(kRowMajor), column = step * step_of(kColumnMajor);
      run<kRowMajor, kColumnMajor>(rest_, wgmma_advance(rows, Tile::kRowPlane + row),
                                   wgmma_advance(columns, column), true);
      run<kRowMajor, kColumnMajor>(rest_, wgmma_advance(rows, row),
                                   wgmma_advance(columns, Tile::kColumnPlane + column), true);
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      run<kRowMajor, kColumnMajor>(first_, wgmma_advance(rows, step * step_of(kRowMajor)),
                                   wgmma_advance(columns, step * step_of(kColumnMajor)), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_touch(rest_);
    wgmma_touch(first_);
  }
  __device__ __forceinline__ void add() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += first_[i];
    // What truncating takes from long sums would reach fp32's last bit at some time.
    if (++stages_ % kStagesOfRest == 0) add_rest();
  }
  template <typename A>
  __device__ __forceinline__ void finish(const A& a, const Place& p, int row, int column) {
    add_rest();
    const uint32_t* const of_rows =
        a.row.largest + (a.row_batch ? p.batch : 0) * a.row.largest_batch;
    const uint32_t* const of_columns =
        a.column.largest + (a.column_batch ? p.batch : 0) * a.column.largest_batch;
    int scaled[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = min(row + 8 * i, a.rows - 1);
      scaled[i] = scale_exponent(of_rows[at * a.row.largest_outer]);
    }
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = min(column + 8 * i + j, a.columns - 1);
        const int other = scale_exponent(of_columns[at * a.column.largest_outer]);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          // In two steps: the power itself may be no normal number.
          const int exponent = -(scaled[k] + other), half = exponent / 2;
          float& sum = sums[4 * i + 2 * k + j];
          sum = sum * power_of_two(half) * power_of_two(exponent - half);
        }
      }
    }
  }

 private:
  static constexpr int kStagesOfRest = 64;
  static constexpr int step_of(int major) { return major ? 16 * kSwizzle : 32; }
  template <int kRowMajor, int kColumnMajor>
  static __device__ __forceinline__ void run(float (&acc)[kCount], uint64_t rows, uint64_t columns,
                                             bool adds) {
    Wgmma<__half, Tile::kColumns>::template run<kRowMajor, kColumnMajor>(acc, rows, columns, adds);
  }
  __device__ __forceinline__ void add_rest() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums[i] += rest_[i] * (1.0f / (1 << kRestBits));
      rest_[i] = 0;
    }
  }

  float first_[kCount], rest_[kCount];
  int stages_;
};

// The largest magnitudes, as bits, of rows and of columns, where 0 was before; or what each of
// p.maxima blocks has found, and zeros for the flags of infinities. The blocks' second coordinate
// tells the matrix.
constexpr int kLargestThreads = 256, kLargestRows = 16;
constexpr int kLargestWords = 8;  // of four values that a thread reads of a row

// How many pieces the warps take.
__host__ __device__ inline int64_t largest_pieces(const Parts& p) {
  if (p.scaled == Scaled::kColumns) {
    return p.batch * ((p.outer + kLargestRows - 1) / kLargestRows) * ((p.inner + 127) / 128);
  }
  return p.batch * p.outer * ((p.inner + 128 * kLargestWords - 1) / (128 * kLargestWords));
}

// Of infinities and NaN 0: their tiles are summed otherwise, but they may share their scale with
// others, of which nothing would be left beside an infinity.
__device__ __forceinline__ uint32_t magnitude(float v) {
  const uint32_t bits = __float_as_uint(v) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;
}

__device__ __forceinline__ void find_largest_of_columns(const Parts& p, int64_t piece, int lane) {
  const int64_t across = (p.inner + 127) / 128, down = (p.outer + kLargestRows - 1) / kLargestRows;
  const int64_t column = piece % across * 128 + lane * 4, batch = piece / across / down;
  const int64_t first = piece / across % down * kLargestRows;
  const float* const from = p.data + batch * p.batch_stride;
  const auto row_at = [&](int i) { return from + min(first + i, p.outer - 1) * p.row_stride; };
  uint32_t largest[4] = {};
  const auto take = [&](const float(&v)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) largest[j] = max(largest[j], magnitude(v[j]));
  };
  if (p.vectors && column + 4 <= p.inner) {  // told before, so that all loads are in flight at once
    float v[kLargestRows][4];
#pragma unroll
    for (int i = 0; i < kLargestRows; ++i) {
      *reinterpret_cast<float4*>(v[i]) = *reinterpret_cast<const float4*>(row_at(i) + column);
    }
#pragma unroll
    for (int i = 0; i < kLargestRows; ++i) take(v[i]);
  } else {
    for (int i = 0; i < kLargestRows; ++i) {
      float v[4];
      p.load(row_at(i), column, v);
      take(v);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (column + j < p.inner) atomicMax(p.largest + batch * p.inner + column + j, largest[j]);
  }
}

static __global__ void __launch_bounds__(kLargestThreads)
    find_largest_kernel(const __grid_constant__ Parts a, const __grid_constant__ Parts b) {
  __shared__ uint32_t of_block;
  wait_for_earlier_kernels();
  const Parts& p = blockIdx.y == 0 ? a : b;
  const int lane = threadIdx.x % 32, warps = gridDim.x * (kLargestThreads / 32);
  if (threadIdx.x == 0) of_block = 0;
  __syncthreads();
  const int64_t across = (p.inner + 128 * kLargestWords - 1) / (128 * kLargestWords);
  uint32_t of_all = 0;
  for (int64_t piece = (blockIdx.x * kLargestThreads + threadIdx.x) / 32; piece < largest_pieces(p);
       piece += warps) {
    if (p.scaled == Scaled::kColumns) {
      find_largest_of_columns(p, piece, lane);
      continue;
    }
    const int64_t row = piece / across, batch = row / p.outer;
    const float* const from =
        p.data + batch * p.batch_stride + (row - batch * p.outer) * p.row_stride;
    const int64_t column = piece % across * (128 * kLargestWords) + lane * 4;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kLargestWords; ++i) {
      float v[4];
      p.load(from, column + i * 128, v);
#pragma unroll
      for (int j = 0; j < 4; ++j) largest = max(largest, magnitude(v[j]));
    }
    of_all = max(of_all, largest);
    if (p.scaled == Scaled::kRows) {
      largest = __reduce_max_sync(~0u, largest);
      if (lane == 0) atomicMax(p.largest + row, largest);
    }
  }
  if (p.scaled != Scaled::kAll) return;
  of_all = __reduce_max_sync(~0u, of_all);
  if (lane == 0) atomicMax(&of_block, of_all);
  __syncthreads();
  if (threadIdx.x == 0) p.largest[1 + blockIdx.x] = of_block;
  for (int64_t i = blockIdx.x * int64_t{kLargestThreads} + threadIdx.x; i < p.batch * p.blocks;
       i += int64_t{gridDim.x} * kLargestThreads) {
    p.special[i] = 0;
  }
}

constexpr int kSplitThreads = 256;

// The largest of the maxima, which the first block keeps for the products.
__device__ __forceinline__ uint32_t merge_maxima(const Parts& p) {
  __shared__ uint32_t of_warps[kSplitThreads / 32];
  const int lane = threadIdx.x % 32;
  uint32_t largest = 0;
  for (int i = threadIdx.x; i < p.maxima; i += kSplitThreads) {
    largest = max(largest, p.largest[1 + i]);
  }
  largest = __reduce_max_sync(~0u, largest);
  if (lane == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  largest = __reduce_max_sync(~0u, of_warps[lane % (kSplitThreads / 32)]);
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.largest = largest;
  return largest;
}

// Eight values a thread, as split_planes_kernel.
static __global__ void __launch_bounds__(kSplitThreads)
    split_scaled_kernel(const __grid_constant__ Parts a, const __grid_constant__ Parts b) {
  wait_for_earlier_kernels();
  const Parts& p = blockIdx.y == 0 ? a : b;
  const uint32_t of_all = p.scaled == Scaled::kAll ? merge_maxima(p) : 0;
  const int64_t groups = p.ld / 8, total = p.batch * p.outer * groups;
  const int64_t plane = p.batch * p.outer * p.ld;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total; i += stride) {
    const int64_t row = i / groups, column = (i - row * groups) * 8;
    const int64_t batch = row / p.outer, outer = row - batch * p.outer;
    float v[8];
    p.load(p.data + batch * p.batch_stride + outer * p.row_stride, column, v);
    if (p.scaled == Scaled::kColumns) {
      const uint32_t* const largest = p.largest + batch * p.inner + column;
      uint32_t bits[8];
      if (column + 8 <= p.inner && batch * p.inner % 4 == 0) {
        *reinterpret_cast<uint4*>(bits) = *reinterpret_cast<const uint4*>(largest);
        *reinterpret_cast<uint4*>(bits + 4) = *reinterpret_cast<const uint4*>(largest + 4);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) bits[j] = column + j < p.inner ? largest[j] : 0;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] *= power_of_two(scale_exponent(bits[j]));
    } else {
      const float scale =
          power_of_two(scale_exponent(p.scaled == Scaled::kRows ? p.largest[row] : of_all));
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] *= scale;
    }
    float check = 0;  // stays finite as long as the values are
    uint32_t firsts[4], rests[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const __half2 first = __floats2half2_rn(v[2 * j], v[2 * j + 1]);
      const float2 held = __half22float2(first);
      const float rest0 = v[2 * j] - held.x, rest1 = v[2 * j + 1] - held.y;
      check += rest0 + rest1;
      const __half2 rest = __floats2half2_rn(rest0 * (1 << kRestBits), rest1 * (1 << kRestBits));
      firsts[j] = *reinterpret_cast<const uint32_t*>(&first);
      rests[j] = *reinterpret_cast<const uint32_t*>(&rest);
    }
    auto* const to = static_cast<__half*>(p.planes) + row * p.ld + column;
    __stcg(reinterpret_cast<uint4*>(to), uint4{firsts[0], firsts[1], firsts[2], firsts[3]});
    __stcg(reinterpret_cast<uint4*>(to + plane), uint4{rests[0], rests[1], rests[2], rests[3]});
    // Tiles of infinities and NaN are marked, and never read.
    if (check != check) {
      p.special[batch * p.blocks + (p.block_inner ? column : outer) / p.block] = 1;
    }
  }
}

}  // namespace braze::cuda::hopper
