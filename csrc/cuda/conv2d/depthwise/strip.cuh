// What one thread of the depthwise kernels does, in either layout: it owns V channels and a strip
// of kStrip results in each row of its tile, and walks down the rows, a step at a time. Every row
// that it reads is converted once and stays in registers as long as results need it. The registers
// of one row are those of the next row in the next step, so that the loop over the steps is not
// unrolled: code that is longer than the instruction cache nearest to the scheduler (some 700
// instructions) runs at a third of the speed.
#pragma once

#include "cuda/common/numeric.cuh"

namespace braze::cuda::depthwise {

// Results per thread and row: image sizes are mostly multiples of 7.
constexpr int kStrip = 7;

// A convolution of R x R taps reads kStride rows a step. A row of results takes kTurns steps, so
// that many rows of results are under way at a time.
template <int R, int kStride>
struct Walk {
  static constexpr int kTurns = (R + kStride - 1) / kStride;
  static constexpr int kWindow = (kStrip - 1) * kStride + R;  // columns that a strip reads
};

// The other direction, from a gradient at stride 2 to that of the input: two rows of results a
// step, from kTurns rows of the gradient. A strip is kStrip pairs of columns. What columns a pair
// meets depends on the parity of the padding; that of "same" padding needs no column in vain.
template <int R>
struct Spread {
  static constexpr int kTurns = (R + 1) / 2;
  static constexpr int kParity = R / 2 % 2;
  static constexpr int kFirst =
      -((R - 1 - kParity) / 2);  // column of the gradient, from the pair's
  static constexpr int kWindow = kStrip - 1 + (1 + kParity) / 2 - kFirst + 1;
};

// Adds row `row` of the kStride that a step reads to the results that it belongs to: sum[m] is the
// row of results that is complete kTurns - 1 - m steps from now. The first row of a step begins a
// new row of results, and moves the others on: their first sums go where the older row was.
template <int R, int kStride, int V, int kTurns, int kWindow>
__device__ __forceinline__ void add_row(float (&sum)[kTurns][kStrip][V],
                                        const float (&x)[kWindow][V], const float (&w)[R * R][V],
                                        const float (&bias)[V], int row) {
#pragma unroll
  for (int s = 0; s < R; ++s) {
#pragma unroll
    for (int m = kTurns - 1; m >= 0; --m) {
      const int r = m * kStride + row;
      if (r >= R) continue;
      const bool moves = row == 0 && s == 0;
#pragma unroll
      for (int q = 0; q < kStrip; ++q) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const float before = !moves ? sum[m][q][v] : m == 0 ? bias[v] : sum[m - (m > 0)][q][v];
          sum[m][q][v] = before + x[q * kStride + s][v] * w[r * R + s][v];
        }
      }
    }
  }
}

// rows[m] = rows[m - 1].
template <int kTurns, int kCount, int V>
__device__ __forceinline__ void move_rows(float (&rows)[kTurns][kCount][V]) {
#pragma unroll
  for (int m = kTurns - 1; m > 0; --m) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int v = 0; v < V; ++v) rows[m][i][v] = rows[m - 1][i][v];
    }
  }
}

template <int kCount, int V>
__device__ __forceinline__ void fill_row(float (&row)[kCount][V], const float (&value)[V]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int v = 0; v < V; ++v) row[i][v] = value[v];
  }
}

// One of the two rows of input gradients that are complete with dy[0], the newest row.
template <int R, int V, int kTurns, int kWindow>
__device__ __forceinline__ void spread_row(float (&sum)[2 * kStrip][V],
                                           const float (&dy)[kTurns][kWindow][V],
                                           const float (&w)[R * R][V], int row) {
#pragma unroll
  for (int m = 0; m < kTurns; ++m) {
    const int r = 2 * m + row;
    if (r >= R) continue;
#pragma unroll
    for (int column = 0; column < 2 * kStrip; ++column) {
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        const int s = column + Spread<R>::kParity - 2 * (j + Spread<R>::kFirst);
        if (s < 0 || s >= R) continue;
#pragma unroll
        for (int v = 0; v < V; ++v) sum[column][v] += dy[m][j][v] * w[r * R + s][v];
      }
    }
  }
}

// sum += a * b, unless wanted is 0. A branch would keep what lies around it apart.
__device__ __forceinline__ void add_product_if(float& sum, float a, float b, int wanted) {
  asm("{\n .reg .pred p;\n setp.ne.s32 p, %3, 0;\n @p fma.rn.f32 %0, %1, %2, %0;\n}"
      : "+f"(sum)
      : "f"(a), "f"(b), "r"(wanted));
}

// Adds the products of an input row with the rows of dy that it meets, dy[0] that of step `step`,
// to the weights' gradients. Products with what lies outside of dy are left out: zeros would make
// NaN of infinities.
template <int R, int kStride, int V, int kTurns, int kWindow>
__device__ __forceinline__ void add_products(float (&sum)[R * R][V], const float (&x)[kWindow][V],
                                             const float (&dy)[kTurns][kStrip][V], int row,
                                             int step, int rows, int columns) {
#pragma unroll
  for (int m = 0; m < kTurns; ++m) {
    const int r = m * kStride + row;
    if (r >= R || step < m || step - m >= rows) continue;
#pragma unroll
    for (int q = 0; q < kStrip; ++q) {
      const int wanted = q < columns;
#pragma unroll
      for (int s = 0; s < R; ++s) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          add_product_if(sum[r * R + s][v], x[q * kStride + s][v], dy[m][q][v], wanted);
        }
      }
    }
  }
}

// V values at p, which is aligned to them.
template <int V, typename T>
__device__ __forceinline__ void load_values(const T* p, float (&x)[V]) {
  if constexpr (V == 2 && sizeof(T) == 2) {
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(p);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      // Assembler, because the compiler would do it again for every use in another block.
      asm("shl.b32 %0, %1, 16;" : "=f"(x[0]) : "r"(pair));
      asm("and.b32 %0, %1, 0xffff0000;" : "=f"(x[1]) : "r"(pair));
    } else {
      const float2 both = __half22float2(reinterpret_cast<const __half2&>(pair));
      x[0] = both.x, x[1] = both.y;
    }
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) x[v] = convert<float>(p[v]);
  }
}

// The first `count` of V values to p; paired: p is aligned to a pair, and both are wanted.
template <int V, typename T>
__device__ __forceinline__ void store_values(T* p, const float (&x)[V], bool paired, int count) {
  if constexpr (V == 2) {
    if (paired) {
      Vec<T, 2> pair;
      pair.v[0] = convert<T>(x[0]), pair.v[1] = convert<T>(x[1]);
      store_vec(p, pair);
      return;
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (v < count) p[v] = convert<T>(x[v]);
  }
}

// Adds up what the `slices` threads of each lane have, always in the same order: a tree over the
// slices, through (slices + 1) / 2 * count * lanes floats. The sum is slice 0's. All threads of the
// block call it; those with slice >= slices have nothing to add.
template <int kCount>
__device__ __forceinline__ void sum_slices(float (&sum)[kCount], float* shared, int lane, int lanes,
                                           int slice, int slices) {
  for (int n = slices; n > 1;) {
    const int half = (n + 1) / 2;
    __syncthreads();
    if (slice >= half && slice < n) {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        shared[((slice - half) * kCount + i) * lanes + lane] = sum[i];
    }
    __syncthreads();
    if (slice + half < n) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] += shared[(slice * kCount + i) * lanes + lane];
    }
    n = half;
  }
}

}  // namespace braze::cuda::depthwise
