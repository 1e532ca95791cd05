// Products of fp32 at its own accuracy by mma.sync, from two parts of TF32 of each number.
#pragma once

#include "mma.cuh"

namespace braze::cuda {

// A fragment of fp32 as sums of two parts of TF32 (Ootomo and Yokota, arXiv 2203.03341), for
// products with fp32's accuracy. The first part is truncated: it does not overflow, and the rest
// has its sign, so that no products of infinite size cancel. An infinity is its own first part;
// times another number's rest, which may be 0, it would make NaN: that product takes `finite` for
// it.
template <int kCount>
struct SplitFragment {
  uint32_t first[kCount], rest[kCount], finite[kCount];

  __device__ __forceinline__ void set(int i, uint32_t bits) {
    const bool infinite = (bits & 0x7fffffffu) == 0x7f800000u;
    first[i] = bits & 0xffffe000u;
    finite[i] = infinite ? 0 : first[i];
    const float difference = __uint_as_float(bits) - __uint_as_float(first[i]);
    rest[i] = infinite ? 0 : round_tf32(__float_as_uint(difference));
  }
};

// c += a * b. The tensor core truncates sums, so that they had better be short.
__device__ __forceinline__ void mma_split(float (&c)[4], const SplitFragment<4>& a,
                                          const SplitFragment<2>& b) {
  float sum[4] = {};
  mma_m16n8<float>(sum, a.rest, b.rest);  // counts where the sum is of few products
  mma_m16n8<float>(sum, a.rest, b.finite);
  mma_m16n8<float>(sum, a.finite, b.rest);
  mma_m16n8<float>(sum, a.first, b.first);
#pragma unroll
  for (int e = 0; e < 4; ++e) c[e] += sum[e];
}

}  // namespace braze::cuda
