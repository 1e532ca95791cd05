// Stripes of columns: what wide images are cut into, so that a tile has several rows of one.
//
// A stripe of y or dy has to end where the next one begins, since the positions behind a row meet
// inputs of the next row. So it is a dimension of its own in the tensor map, beside the columns
// within it: what lies behind them is outside of that dimension, reads as zero and is not written.
// x has no need of that.
#pragma once

#include "tiles.cuh"

namespace braze::cuda::halo {

// Beside tma_load_4d().
__device__ __forceinline__ void tma_load_5d(const CUtensorMap* map, uint64_t* barrier, uint32_t to,
                                            int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The other direction; elements outside are not written.
__device__ __forceinline__ void tma_store_5d(const CUtensorMap* map, uint32_t from, int c0, int c1,
                                             int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
      "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Channels, columns of a stripe, stripes, rows, images of `t`; a copy brings `box`: channels,
// columns, rows and images of one stripe.
inline CUtensorMap stripe_map(DType dtype, const Tensor4dRef& t, int64_t c, int64_t columns,
                              int64_t stripes, int64_t h, int64_t n, const uint32_t (&box)[4],
                              int row_bytes) {
  constexpr char kName[] = "cuTensorMapEncodeTiled";
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>(kName);
  const auto u = [](int64_t v) { return static_cast<uint64_t>(v); };
  const int64_t size = size_of(dtype);
  const uint64_t extents[5] = {u(c), u(columns), u(stripes), u(h), u(n)};
  const uint64_t strides[4] = {u(t.w * size), u(columns * t.w * size), u(t.h * size),
                               u(t.n * size)};
  const uint32_t boxes[5] = {box[0], box[1], 1, box[2], box[3]};
  const uint32_t element_strides[5] = {1, 1, 1, 1, 1};
  return encoded_map(kName, [&](CUtensorMap* map) {
    return encode(map, tensor_map_type(dtype), 5, const_cast<void*>(t.data), extents, strides,
                  boxes, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  tensor_map_swizzle(row_bytes), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
}

}  // namespace braze::cuda::halo
