// Results whose rows do not lie one after the other, for kernels whose A has kScattered, and
// row_of<T>(batch, row): where a row of the product goes, or nullptr where there is none.
#pragma once

#include "cuda/common/numeric.cuh"
#include "pipeline.cuh"

namespace braze::cuda::hopper {

// 64 rows of 128 bytes, swizzled, from shared memory, by the 128 threads of a consumer: each moves
// 16 bytes of several rows. Columns are multiples of 16 bytes.
template <typename T, typename A>
__device__ __forceinline__ void scatter_rows(const A& a, uint32_t from, int batch, int row,
                                             int column) {
  constexpr int kWidth = 16 / int{sizeof(T)};
  const int part = threadIdx.x % 8;
#pragma unroll 1  // for lack of registers
  for (int r = threadIdx.x % 128 / 8; r < 64; r += 16) {
    T* const to = a.template row_of<T>(batch, row + r);
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from + r * kSwizzle + ((part ^ (r % 8)) << 4))
                 : "memory");
    if (to && column + part * kWidth < a.columns) {
      *reinterpret_cast<uint4*>(to + column + part * kWidth) = v;
    }
  }
}

// From registers; as store_direct(), not swapped. The number of columns is even unless kAnyColumns.
template <typename T, bool kAnyColumns = false, typename A, int kCount>
__device__ __forceinline__ void scatter_direct(const A& a, int batch, const float (&acc)[kCount],
                                               int row, int column) {
  const bool pairs = !kAnyColumns || a.columns % 2 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    T* const to = a.template row_of<T>(batch, row + half * 8);
    if (!to) continue;
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
      const int j = column + i / 4 * 8;
      if (j >= a.columns) continue;
      if (pairs) {
        *reinterpret_cast<Vec<T, 2>*>(to + j) = {convert<T>(acc[i]), convert<T>(acc[i + 1])};
      } else {
        to[j] = convert<T>(acc[i]);
        if (j + 1 < a.columns) to[j + 1] = convert<T>(acc[i + 1]);
      }
    }
  }
}

}  // namespace braze::cuda::hopper
