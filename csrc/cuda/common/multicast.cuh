// TMA and mbarriers across the blocks of a cluster (sm_90): one copy from global memory serves all,
// and each tells the others when it is done with it.
#pragma once

#include "cluster.cuh"
#include "tma.cuh"

namespace braze::cuda {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Arrives at the barrier at the same place in block `rank` of the cluster. Without cluster scope:
// that would wait for all of the thread's memory accesses (MEMBAR.ALL.GPU, 1500 cycles), which is
// more than reads of shared memory by the tensor cores need to be ordered.
__device__ __forceinline__ void mbarrier_arrive_remote(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// As tma_load_4d, into the same place in every block whose bit is set in `blocks`; each block's own
// barrier counts its bytes.
__device__ __forceinline__ void tma_multicast_4d(const CUtensorMap* map, uint64_t* barrier,
                                                 uint32_t to, uint16_t blocks, int c0, int c1,
                                                 int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
      : "memory");
}

// As tma_load_im2col, likewise.
__device__ __forceinline__ void tma_multicast_im2col(const CUtensorMap* map, uint64_t* barrier,
                                                     uint32_t to, uint16_t blocks, int c, int w,
                                                     int h, int n, uint16_t tap_w, uint16_t tap_h) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(c), "r"(w), "r"(h), "r"(n), "h"(tap_w),
      "h"(tap_h), "h"(blocks)
      : "memory");
}

}  // namespace braze::cuda
