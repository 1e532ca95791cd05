// mbarriers and bulk tensor copies (TMA), sm_90. PTX ISA, "Asynchronous operations".
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cp_async.cuh"  // shared_address

namespace braze::cuda {

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// Waits until the phase of that parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Orders ordinary shared-memory writes before reads by the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same, and before its reads of what this thread wrote to global memory.
__device__ __forceinline__ void fence_async_proxy_everywhere() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Brings a tensor map near, so that the first copy does not wait for it.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box at the coordinates (innermost first) of a 4-D tensor map; elements outside read as zero.
__device__ __forceinline__ void tma_load_4d(const CUtensorMap* map, uint64_t* barrier, uint32_t to,
                                            int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// `bytes` in a row, a multiple of 16, as the addresses are.
__device__ __forceinline__ void tma_load_bytes(uint64_t* barrier, uint32_t to, const void* from,
                                               uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
// Channels from c on of a run of pixels, to be had from an im2col map. The run begins at pixel (w,
// h, n) of the map's bounding box, goes through the box line by line and image by image, and each
// of its pixels is read (tap_w, tap_h) further on; what lies outside the images reads as zero.
__device__ __forceinline__ void tma_load_im2col(const CUtensorMap* map, uint64_t* barrier,
                                                uint32_t to, int c, int w, int h, int n,
                                                uint16_t tap_w, uint16_t tap_h) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(c), "r"(w), "r"(h), "r"(n), "h"(tap_w), "h"(tap_h)
      : "memory");
}
// The other direction; elements outside are not written.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, uint32_t from, int c0, int c1,
                                             int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most kPending groups of this thread still read their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Barrier `id` (1 to 15) for `threads` threads of the block.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Host: a function of the driver, which has it or not, as that version of CUDA declares it.
template <typename Function>
Function driver_function(const char* name, unsigned int version = 12000) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found);
  if (found != cudaDriverEntryPointSuccess) {
    throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  }
  return reinterpret_cast<Function>(function);
}

inline CUtensorMapSwizzle tensor_map_swizzle(int row_bytes) {
  return row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
         : row_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                           : CU_TENSOR_MAP_SWIZZLE_NONE;
}

// encode(CUtensorMap*) calls the driver's function of that name.
template <typename Encode>
CUtensorMap encoded_map(const char* name, Encode&& encode) {
  CUtensorMap map;
  CUresult result = encode(&map);
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // The first call of a thread, for example autograd's: only the runtime makes the device's
    // context the thread's by itself.
    int device = 0;
    cudaGetDevice(&device);
    cudaSetDevice(device);
    result = encode(&map);
  }
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(name) + ": error " + std::to_string(result));
  }
  return map;
}

// A tensor map of a 4-D tensor, extents and strides innermost first (the innermost stride is one
// element; `strides` are the other three, in bytes). The inner box is one swizzle row wide; rows of
// more than 128 bytes are not swizzled.
inline CUtensorMap make_tensor_map(CUtensorMapDataType type, const void* data,
                                   const uint64_t (&extents)[4], const uint64_t (&strides)[3],
                                   const uint32_t (&box)[4], int row_bytes) {
  constexpr char kName[] = "cuTensorMapEncodeTiled";
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>(kName);
  const uint32_t element_strides[4] = {1, 1, 1, 1};
  return encoded_map(kName, [&](CUtensorMap* map) {
    return encode(map, type, 4, const_cast<void*>(data), extents, strides, box, element_strides,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, tensor_map_swizzle(row_bytes),
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
}

// How pixels are taken from images: of a bounding box that begins `lower` pixels from each image's
// first one (negative: before it) and ends `upper` pixels from its last one, every `stride`th in
// either direction. w comes first.
struct PixelBox {
  int lower[2], upper[2];  // -128 to 127
  uint32_t stride[2];      // 1 to 8
};

// A map for tma_load_im2col() of images with extents (c, w, h, n) and the strides of w, h and n in
// bytes, multiples of 16. A copy brings `channels`, a swizzle row of up to 128 bytes, of `pixels`.
inline CUtensorMap make_im2col_map(CUtensorMapDataType type, const void* data,
                                   const uint64_t (&extents)[4], const uint64_t (&strides)[3],
                                   const PixelBox& box, int channels, int pixels, int row_bytes) {
  constexpr char kName[] = "cuTensorMapEncodeIm2col";
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeIm2col)>(kName);
  const uint32_t element_strides[4] = {1, box.stride[0], box.stride[1], 1};
  return encoded_map(kName, [&](CUtensorMap* map) {
    return encode(map, type, 4, const_cast<void*>(data), extents, strides, box.lower, box.upper,
                  channels, pixels, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  tensor_map_swizzle(row_bytes), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
}

}  // namespace braze::cuda
