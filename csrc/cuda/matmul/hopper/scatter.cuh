// Results whose rows do not lie one after the other, for kernels whose A has kScattered, and
// rows_of<T>(batch), which makes a function of a row of the product: where it goes, or nullptr
// where there is none.
#pragma once

#include "cuda/common/numeric.cuh"
#include "pipeline.cuh"

namespace braze::cuda::hopper {

// Where 64 rows go, of which a warp moves the 16 that it has, each thread four, 16 bytes of a chunk
// of 128. They are found once, and together: one after the other, each waits for divisions.
template <typename T>
class ScatteredRows {
 public:
  template <typename A>
  __device__ __forceinline__ ScatteredRows(const A& a, int batch, int first) {
    const auto to = a.template rows_of<T>(batch);
#pragma unroll
    for (int i = 0; i < kRows; ++i) to_[i] = to(first + row(i));
  }

  // A chunk of them, swizzled, from shared memory. Columns are multiples of 16 bytes.
  __device__ __forceinline__ void store(uint32_t from, int column, int columns) const {
    constexpr int kWidth = 16 / int{sizeof(T)};
    const int part = threadIdx.x % 8, c = column + part * kWidth;
    uint4 v[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t at = from + row(i) * kSwizzle + ((part ^ (row(i) % 8)) << 4);
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w)
                   : "r"(at)
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (to_[i] && c < columns) *reinterpret_cast<uint4*>(to_[i] + c) = v[i];
    }
  }

 private:
  static constexpr int kRows = 4;
  __device__ __forceinline__ static int row(int i) {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 8 + i * 4;
  }
  T* to_[kRows];
};

// From registers; as store_direct(), not swapped. The number of columns is even unless kAnyColumns.
template <typename T, bool kAnyColumns = false, typename A, int kCount>
__device__ __forceinline__ void scatter_direct(const A& a, int batch, const float (&acc)[kCount],
                                               int row, int column) {
  const bool pairs = !kAnyColumns || a.columns % 2 == 0;
  const auto rows = a.template rows_of<T>(batch);
  T* const places[] = {rows(row), rows(row + 8)};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    T* const to = places[half];
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
