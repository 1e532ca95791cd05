// dgrad of stride 1 in TF32 to which another tensor is added on the way out.
#pragma once

#include "copies.cuh"

namespace braze::cuda::im2col {

struct AddedArgs : WindowArgs {
  static constexpr bool kScattered = true;  // scatter_direct() below stores

  const void* added;  // laid out as the result, whose rows are multiples of 16 bytes
};

// Stores 64 rows of a tile. `row` and `column` are the place of acc[0] in the product.
template <typename T, int kCount>
__device__ __forceinline__ void scatter_direct(const AddedArgs& a, int, const float (&acc)[kCount],
                                               int row, int column) {
  constexpr int kBatch = kCount % 64 == 0 ? 16 : 8;  // loads in flight
  static_assert(kCount / 4 % kBatch == 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + half * 8;
    if (r >= a.rows) continue;
    const int64_t first = r * a.c_ld + column;
    const T* const from = static_cast<const T*>(a.added) + first;
    T* const to = static_cast<T*>(a.c) + first;
#pragma unroll
    for (int i = 0; i < kCount / 4; i += kBatch) {  // pairs, 8 columns apart
      float2 v[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int c = (i + j) * 8;
        if (column + c < a.columns) v[j] = *reinterpret_cast<const float2*>(from + c);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int c = (i + j) * 8, k = (i + j) * 4 + half * 2;
        if (column + c < a.columns) {
          *reinterpret_cast<float2*>(to + c) = {acc[k] + v[j].x, acc[k + 1] + v[j].y};
        }
      }
    }
  }
}

}  // namespace braze::cuda::im2col
