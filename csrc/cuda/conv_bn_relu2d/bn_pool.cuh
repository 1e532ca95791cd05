// What the kernels of conv_bn_relu2d.h share: 2x2 windows in either layout, and their codes.
//
// NCHW: a thread takes V windows side by side, two vectors of 2V elements of z. NHWC: a thread
// takes N channels of a window, four vectors.
#pragma once

#include "launchers/conv_bn_relu2d.h"
#include "cuda/batch_norm/channel.cuh"
#include "cuda/pool/window.cuh"

namespace braze::cuda {

constexpr int kBnPoolThreads = 256;
constexpr uint32_t kStopped = 4;              // the code where ReLU stops the gradient
constexpr uint32_t kAllStopped = 0x44444444;  // eight of them

// The first `count` codes from element `e` on; they lie in one word.
template <int kCount>
__device__ __forceinline__ uint32_t load_codes(const uint32_t* codes, int64_t e) {
  if constexpr (kCount == 8) return codes[e / 8];
  return codes[e / 8] >> (4 * static_cast<int>(e % 8));
}

// Stores kCount codes of each of a warp's lanes, which hold adjacent elements; lane 0 starts a
// word. Called by whole warps; lanes that have none pass `valid` false and no codes.
template <int kCount>
__device__ __forceinline__ void store_codes(uint32_t* codes, int64_t e, bool valid, uint32_t bits) {
  if constexpr (kCount < 8) {
    bits <<= 4 * static_cast<int>(e % 8);
#pragma unroll
    for (int lanes = 1; lanes < 8 / kCount; lanes *= 2) {
      bits |= __shfl_xor_sync(0xffffffffu, bits, lanes);
    }
  }
  if (valid && e % 8 == 0) codes[e / 8] = bits;
}

// Max and ReLU of four normalised values. Torch's rules: the first of equals wins, NaN beats all.
template <typename A>
__device__ __forceinline__ A pool_window(const A (&v)[4], uint32_t* code) {
  A best = v[0];
  *code = 0;
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    if (v[i] > best || v[i] != v[i]) {
      best = v[i];
      *code = i;
    }
  }
  if (best <= A(0)) {
    best = A(0);
    *code = kStopped;
  }
  return best;
}

// The element of a window that the code points to.
template <typename T>
__device__ __forceinline__ T coded(uint32_t code, T a, T b, T c, T d) {
  const T top = code & 1 ? b : a, bottom = code & 1 ? d : c;
  return code & 2 ? bottom : top;
}

// Extents of z and of the pooled tensor in one image (NHWC) or plane (NCHW). `depth`: see pool.h.
struct BnPoolGeometry {
  int h, w, p, q;
  int64_t c, depth;
  bool turned;

  explicit BnPoolGeometry(const BnPoolShape& shape)
      : h(Window::narrow(shape.h)),
        w(Window::narrow(shape.w)),
        p(h / 2),
        q(w / 2),
        c(shape.c),
        depth(shape.channels_last ? shape.c : 1),
        turned(shape.turned) {}

  __device__ __forceinline__ int64_t input(int64_t image, int row, int column) const {
    return ((image * h + row) * w + column) * depth;
  }
  __device__ __forceinline__ int64_t pooled(int64_t image, int row, int column) const {
    return ((image * p + row) * q + column) * depth;
  }

  // NHWC: N channels of a pooled pixel, from `channel` on.
  template <int N, typename T>
  __device__ __forceinline__ Vec<T, N> load_pooled(const T* from, int64_t image, int row,
                                                   int column, int64_t channel) const {
    if (!turned) return load_vec<N>(from + pooled(image, row, column) + channel);
    from += turned_offset(image, row, column, channel);
    Vec<T, N> v;
#pragma unroll
    for (int k = 0; k < N; ++k) v.v[k] = from[k * p * q];
    return v;
  }
  template <int N, typename T>
  __device__ __forceinline__ void store_pooled(T* to, int64_t image, int row, int column,
                                               int64_t channel, const Vec<T, N>& v) const {
    if (!turned) return store_vec(to + pooled(image, row, column) + channel, v);
    to += turned_offset(image, row, column, channel);
#pragma unroll
    for (int k = 0; k < N; ++k) to[k * p * q] = v.v[k];
  }

  // Of a pooled pixel's channel where the pooled tensor is in NCHW order.
  __device__ __forceinline__ int64_t turned_offset(int64_t image, int row, int column,
                                                   int64_t channel) const {
    return (image * c + channel) * p * q + row * q + column;
  }
};

// 2V adjacent elements: one vector, or one by one where rows of odd length allow no other access.
// `second`: whether there is an element behind the first (V is 1 where there may be none).
template <int V, bool kVector, typename T>
__device__ __forceinline__ Vec<T, 2 * V> load_pairs(const T* row, bool second) {
  if constexpr (kVector) {
    return load_vec<2 * V>(row);
  } else {
    Vec<T, 2 * V> v;
    v.v[0] = row[0];
    v.v[1] = second ? row[1] : row[0];
    return v;
  }
}

template <int V, bool kVector, typename T>
__device__ __forceinline__ void store_pairs(T* row, bool second, const Vec<T, 2 * V>& v) {
  if constexpr (kVector) {
    store_vec(row, v);
  } else {
    row[0] = v.v[0];
    if (second) row[1] = v.v[1];
  }
}

// Calls f(V, vector): how many windows a thread takes at once, and whether it may load them as
// vectors. `planes` and `pooled` are the pointers to tensors of z's and of the pooled shape.
template <typename T, typename F>
void with_windows(const BnPoolShape& shape, std::initializer_list<const void*> planes,
                  std::initializer_list<const void*> pooled, const F& f) {
  const auto fits = [&](int v) {
    bool result = shape.w % (2 * v) == 0;
    for (const void* p : planes) result = result && vectors_fit(static_cast<const T*>(p), 2 * v);
    for (const void* p : pooled) result = result && vectors_fit(static_cast<const T*>(p), v);
    return result;
  };
  if constexpr (kVecWidth<T> >= 8) {
    if (fits(4)) return f(std::integral_constant<int, 4>{}, std::true_type{});
  }
  if constexpr (kVecWidth<T> >= 4) {
    if (fits(2)) return f(std::integral_constant<int, 2>{}, std::true_type{});
  }
  if (fits(1)) return f(std::integral_constant<int, 1>{}, std::true_type{});
  f(std::integral_constant<int, 1>{}, std::false_type{});
}

// Calls f(N): channels that a thread takes at once. Vectors of coefficients are 16-byte accesses.
template <typename T, typename F>
void with_channels(const BnPoolShape& shape, std::initializer_list<const void*> pointers,
                   const F& f) {
  bool aligned = true;
  for (const void* p : pointers) aligned = aligned && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  with_depth_vectors<T>(shape.c, aligned, f);
}

using BnPoolSplit = Split<FastDiv, int>;

}  // namespace braze::cuda
