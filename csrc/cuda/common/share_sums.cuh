// Sums that several warps of a block hold parts of.
#pragma once

namespace braze::cuda {

// Adds up what `parts` warps have of the same sums, in the order of their numbers: bitwise
// repeatable. Valid in the warp that is part 0. slot: room for 32 * kCount floats that these warps
// share; parts is the same for the whole block, all of which has to call it.
template <int kCount>
__device__ __forceinline__ void share_sums(float (&sums)[kCount], int part, int parts,
                                           float* slot) {
  const int lane = threadIdx.x % 32;
  for (int other = 1; other < parts; ++other) {
    __syncthreads();  // the slot has been read
    if (part == other) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) slot[i * 32 + lane] = sums[i];
    }
    __syncthreads();
    if (part == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] += slot[i * 32 + lane];
    }
  }
}

}  // namespace braze::cuda
