// What the layer norm kernels share: elements and parameters of rows.
//
// Bytes of an op on rows of 16-bit elements, for each element, parameters aside:
//   forward    4: x, y                (6 where y is float32, under autocast)
//   backward   6: dy, x, dx           (8 where dy is float32), and for the parameters' gradients
//              partial sums, 8 bytes for each column and block, at most one block a multiprocessor
// Who has a row, by its length in elements of 16 bits (of 32 or 64 bits half of that; in single
// elements, where 16 bytes do not divide the row or its address, a quarter):
//   up to 1024             up to 32 lanes of a warp, 24 or 32 elements each       (ahead.cuh);
//                          backward up to 768 with 24 each, up to 512 with 16
//   up to 16384            up to 16 warps, likewise; backward up to 8192 with 16 or 24 each, of
//                          rows of 16 bits up to 16384 with 32
//   up to 32768, forward   16 warps with 64 each, where rows and parameters have 16 bits
//   beyond, forward        a block or a cluster of up to 8, in shared memory      (normalise.cuh)
//   backward, up to 32768  a cluster of two blocks, up to 65536 of four           (backward.cu)
//   beyond                 a block, and memory is read twice
#pragma once

#include "cuda/softmax/row_team.cuh"
#include "launchers/layer_norm.h"

namespace braze::cuda {

// N parameters from element c on, of the elements' own type T or, where `wide`, of acc_t<T>;
// `absent` where there are none.
template <int N, typename T>
__device__ __forceinline__ void load_parameters(const void* values, bool wide, int64_t c,
                                                acc_t<T> absent, acc_t<T> (&out)[N]) {
  if (!values) {
#pragma unroll
    for (int k = 0; k < N; ++k) out[k] = absent;
  } else if (sizeof(T) == 2 && wide) {
    load_acc<N>(static_cast<const acc_t<T>*>(values) + c, out);
  } else {
    load_acc<N>(static_cast<const T*>(values) + c, out);
  }
}

// A channel's parameter, of T or, where `wide`, of acc_t<T>; `absent` where there is none.
template <typename T>
__device__ __forceinline__ acc_t<T> parameter_of(const void* values, bool wide, int64_t channel,
                                                 acc_t<T> absent) {
  acc_t<T> p[1];
  load_parameters<1, T>(values, wide, channel, absent, p);
  return p[0];
}

// N elements of a Packed as accumulation values.
template <typename T, int N>
__device__ __forceinline__ void unpack(const Packed<T, N>& packed, acc_t<T> (&out)[N]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
    // The upper half of a word is a float as it stands: one instruction, where converting takes
    // two.
    const auto* const words = reinterpret_cast<const uint32_t*>(packed.raw);
#pragma unroll
    for (int k = 0; k < N; k += 2) {
      out[k] = __uint_as_float(words[k / 2] << 16);
      out[k + 1] = __uint_as_float(words[k / 2] & 0xffff0000u);
    }
  } else {
    const Vec<T, N> v = packed.unpacked();
#pragma unroll
    for (int k = 0; k < N; ++k) out[k] = convert<acc_t<T>>(v.v[k]);
  }
}

// The widest vectors that the row's length and the addresses allow: f(integral constant N).
template <typename T, typename F>
void with_row_vectors(int64_t size, bool aligned, const F& f) {
  constexpr int kWidth = kVecWidth<T>;
  if (aligned && size % kWidth == 0) return f(std::integral_constant<int, kWidth>{});
  f(std::integral_constant<int, 1>{});
}

}  // namespace braze::cuda
