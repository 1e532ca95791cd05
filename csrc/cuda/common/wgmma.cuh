// wgmma (warpgroup matrix multiply, sm_90a): shared-memory descriptors and the instruction for the
// shapes and types in use. PTX ISA, "Asynchronous warpgroup-level matrix instructions".
//
// All forms compute D (64 x N, fp32) += A (64 x K) B (K x N), K being 32 bytes of the input type:
// 16 for bf16 and fp16, 8 for TF32. Accumulator i of a thread is at
//     row 16 * warp + lane / 4 + 8 * (i / 2 % 2),  column 8 * (i / 4) + 2 * (lane % 4) + i % 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace braze::cuda {

// Swizzle modes of shared-memory descriptors, by the width of a row in bytes.
constexpr uint64_t wgmma_swizzle(int row_bytes) {
  return row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : row_bytes == 32 ? 3 : 0;
}

// Descriptor of an operand whose rows (of 32, 64 or 128 bytes, swizzled by absolute address, as TMA
// writes them) follow each other without gaps. `address` may be shifted by any number of whole rows
// and by K steps of 32 bytes inside a row: the hardware swizzles the address after adding offsets
// (measured for every shift, row width and major). `leading` counts only for MN-major operands: the
// distance in bytes between blocks of row_bytes along M or N.
template <int kRowBytes>
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading = 16) {
  constexpr uint64_t kStride = 8 * kRowBytes;  // between groups of eight rows
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<uint64_t>((leading & 0x3ffff) >> 4) << 16 | (kStride >> 4) << 32 |
         wgmma_swizzle(kRowBytes) << 62;
}

// The descriptor of what lies `bytes`, a multiple of 16, further on. The sum is of the lower words
// alone, where the address is, so that the upper one need not be worked out for each instruction.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, int bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes >> 4);
  return (descriptor & 0xffffffff00000000) | low;
}

// Orders this warpgroup's register and shared-memory accesses before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses of the accumulators across a wait.
template <int kCount>
__device__ __forceinline__ void wgmma_touch(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The instruction for inputs T (float stands for TF32) and N columns. kTransA, kTransB: 0 for a
// K-major operand in shared memory, 1 for an MN-major one (16-bit types only).
template <typename T, int kN>
struct Wgmma;

#define BRAZE_D8(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define BRAZE_D16(i) BRAZE_D8(i), BRAZE_D8(i + 8)
#define BRAZE_D32(i) BRAZE_D16(i), BRAZE_D16(i + 16)
#define BRAZE_D48(i) BRAZE_D32(i), BRAZE_D16(i + 32)
#define BRAZE_D56(i) BRAZE_D48(i), BRAZE_D8(i + 48)
#define BRAZE_D64(i) BRAZE_D32(i), BRAZE_D32(i + 32)
#define BRAZE_D72(i) BRAZE_D64(i), BRAZE_D8(i + 64)
#define BRAZE_D96(i) BRAZE_D64(i), BRAZE_D32(i + 64)
#define BRAZE_D112(i) BRAZE_D64(i), BRAZE_D48(i + 64)
#define BRAZE_D128(i) BRAZE_D64(i), BRAZE_D64(i + 64)

#define BRAZE_LIST16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define BRAZE_LIST32                                                        \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define BRAZE_LIST48                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}"
#define BRAZE_LIST56                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55}"
#define BRAZE_LIST64                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define BRAZE_LIST72                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71}"
#define BRAZE_LIST96                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}"
#define BRAZE_LIST112                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111}"
#define BRAZE_LIST128                                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "   \
  "%127}"

// A in shared memory; then A in registers, which are those of mma.sync's: register i of a warp's 16
// rows is at row lane / 4 + 8 * (i % 2), and in 16 bits has columns 2 * (lane % 4) + 8 * (i / 2)
// and the next, in TF32 column lane % 4 + 4 * (i / 2).
#define BRAZE_WGMMA_16BIT(T, NAME, N, R, O0, O1, O2, O3, O4, O5, O6)                              \
  template <>                                                                                     \
  struct Wgmma<T, N> {                                                                            \
    template <int kTransA, int kTransB>                                                           \
    __device__ __forceinline__ static void run(float (&d)[R], uint64_t a, uint64_t b,             \
                                               int accumulate) {                                  \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #O2                                          \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME " " BRAZE_LIST##R  \
                   ", %" #O0 ", %" #O1 ", p, 1, 1, %" #O3 ", %" #O4 ";}"                          \
                   : BRAZE_D##R(0)                                                                \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));                \
    }                                                                                             \
    template <int kTransB>                                                                        \
    __device__ __forceinline__ static void run(float (&d)[R], const uint32_t (&a)[4], uint64_t b, \
                                               int accumulate) {                                  \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #O5                                          \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME " " BRAZE_LIST##R  \
                   ", {%" #O0 ", %" #O1 ", %" #O2 ", %" #O3 "}, %" #O4 ", p, 1, 1, %" #O6 ";}"    \
                   : BRAZE_D##R(0)                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),         \
                     "n"(kTransB));                                                               \
    }                                                                                             \
  };
#define BRAZE_WGMMA_TF32(N, R, O0, O1, O2, O3, O4, O5)                                            \
  template <>                                                                                     \
  struct Wgmma<float, N> {                                                                        \
    template <int kTransA = 0, int kTransB = 0>                                                   \
    __device__ __forceinline__ static void run(float (&d)[R], uint64_t a, uint64_t b,             \
                                               int accumulate) {                                  \
      static_assert(kTransA == 0 && kTransB == 0, "TF32 operands are K-major");                   \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #O2                                          \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 " BRAZE_LIST##R  \
                   ", %" #O0 ", %" #O1 ", p, 1, 1;}"                                              \
                   : BRAZE_D##R(0)                                                                \
                   : "l"(a), "l"(b), "r"(accumulate));                                            \
    }                                                                                             \
    __device__ __forceinline__ static void run(float (&d)[R], const uint32_t (&a)[4], uint64_t b, \
                                               int accumulate) {                                  \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #O5                                          \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 " BRAZE_LIST##R  \
                   ", {%" #O0 ", %" #O1 ", %" #O2 ", %" #O3 "}, %" #O4 ", p, 1, 1;}"              \
                   : BRAZE_D##R(0)                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));        \
    }                                                                                             \
  };
#define BRAZE_WGMMA(N, R, O0, O1, O2, O3, O4, O5, O6)                             \
  BRAZE_WGMMA_16BIT(__nv_bfloat16, "bf16.bf16", N, R, O0, O1, O2, O3, O4, O5, O6) \
  BRAZE_WGMMA_16BIT(__half, "f16.f16", N, R, O0, O1, O2, O3, O4, O5, O6)          \
  BRAZE_WGMMA_TF32(N, R, O0, O1, O2, O3, O4, O5)

BRAZE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
BRAZE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
BRAZE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
BRAZE_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
BRAZE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
BRAZE_WGMMA(144, 72, 72, 73, 74, 75, 76, 77, 78)
BRAZE_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
BRAZE_WGMMA(224, 112, 112, 113, 114, 115, 116, 117, 118)
BRAZE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef BRAZE_WGMMA
#undef BRAZE_WGMMA_TF32
#undef BRAZE_WGMMA_16BIT
}  // namespace braze::cuda
