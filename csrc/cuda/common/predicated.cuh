// Loads and stores under a predicate, for kernels that ask for all of their memory at once and then
// use it.
#pragma once

#include <cstring>

#include "numeric.cuh"

namespace braze::cuda {

// The N elements of global memory at p, which is aligned to a Vec of them; zeros unless `inside`.
// In assembler, because loads written so stay together, while the compiler would put what uses
// each of them in between.
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_inside(const T* p, bool inside) {
  constexpr int kBytes = sizeof(T) * N;
  Vec<T, N> result;
  if constexpr (kBytes == 2) {
    uint16_t v = 0;
    asm volatile("{.reg .pred q; setp.ne.u32 q, %2, 0; @q ld.global.u16 %0, [%1];}"
                 : "+h"(v)
                 : "l"(p), "r"(static_cast<int>(inside)));
    memcpy(&result, &v, kBytes);
  } else if constexpr (kBytes == 4) {
    uint32_t v = 0;
    asm volatile("{.reg .pred q; setp.ne.u32 q, %2, 0; @q ld.global.u32 %0, [%1];}"
                 : "+r"(v)
                 : "l"(p), "r"(static_cast<int>(inside)));
    memcpy(&result, &v, kBytes);
  } else if constexpr (kBytes == 8) {
    uint2 v{};
    asm volatile("{.reg .pred q; setp.ne.u32 q, %3, 0; @q ld.global.v2.u32 {%0, %1}, [%2];}"
                 : "+r"(v.x), "+r"(v.y)
                 : "l"(p), "r"(static_cast<int>(inside)));
    memcpy(&result, &v, kBytes);
  } else {
    static_assert(kBytes % 16 == 0);
    uint4 v[kBytes / 16]{};
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      asm volatile(
          "{.reg .pred q; setp.ne.u32 q, %5, 0; @q ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
          : "+r"(v[i].x), "+r"(v[i].y), "+r"(v[i].z), "+r"(v[i].w)
          : "l"(reinterpret_cast<const uint4*>(p) + i), "r"(static_cast<int>(inside)));
    }
    memcpy(&result, v, kBytes);
  }
  return result;
}

// The word at p, or the 16 bits that it begins with where nothing more belongs to a tensor that
// ends there; zeros where neither is wanted.
__device__ __forceinline__ uint32_t load_word_inside(const uint32_t* p, bool word, bool half) {
  uint32_t v = 0;
  asm volatile(
      "{.reg .pred q, r; setp.ne.u32 q, %2, 0; setp.ne.u32 r, %3, 0;"
      " @q ld.global.u32 %0, [%1]; @r ld.global.u16 %0, [%1];}"
      : "+r"(v)
      : "l"(p), "r"(static_cast<int>(word)), "r"(static_cast<int>(half)));
  return v;
}

// Element j of v to shared[j * kStep], where shared is an address in shared memory, if `inside`: a
// branch around the stores would cost as much code as they do.
template <int kStep, int N, typename T>
__device__ __forceinline__ void store_shared(uint32_t shared, const Vec<T, N>& v, bool inside) {
  const int predicate = inside;
  if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      asm volatile("{.reg .pred q; setp.ne.u32 q, %2, 0; @q st.shared.f64 [%0], %1;}" ::"r"(shared),
                   "d"(v.v[j]), "r"(predicate)
                   : "memory");
      shared += kStep * sizeof(T);
    }
  } else if constexpr (kStep == 1 && N == 4) {
    asm volatile(
        "{.reg .pred q; setp.ne.u32 q, %5, 0; @q st.shared.v4.f32 [%0], {%1, %2, %3, %4};}" ::"r"(
            shared),
        "f"(v.v[0]), "f"(v.v[1]), "f"(v.v[2]), "f"(v.v[3]), "r"(predicate)
        : "memory");
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      asm volatile("{.reg .pred q; setp.ne.u32 q, %2, 0; @q st.shared.f32 [%0], %1;}" ::"r"(shared),
                   "f"(v.v[j]), "r"(predicate)
                   : "memory");
      shared += kStep * sizeof(T);
    }
  }
}

// The pointer, or the address, `step` further on. In a register: else each of the addresses that
// follow would be worked out from the first one.
template <typename T>
__device__ __forceinline__ const T* advanced(const T* p, int64_t step) {
  p += step;
  asm volatile("" : "+l"(p));
  return p;
}
__device__ __forceinline__ uint32_t advanced(uint32_t address, uint32_t step) {
  address += step;
  asm volatile("" : "+r"(address));
  return address;
}

}  // namespace braze::cuda
