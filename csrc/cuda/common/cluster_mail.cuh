// Values that the blocks of a cluster send each other (sm_90).
#pragma once

#include "cluster.cuh"
#include "tma.cuh"

namespace braze::cuda {

// Values are counted, in bytes, at a barrier of the receiver's (st.async): it waits for them alone,
// where cluster_sync() would wait until all memory has seen what the blocks have written before. A
// block that only sends may end behind it. Not for launches without clusters, which have no remote
// memory.

// One thread, and cluster_meet() behind it before anything is sent: so much will come, from all
// blocks together, and mbarrier_wait(arrived, 0) waits for it.
__device__ __forceinline__ void expect_mail(uint64_t* arrived, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  mbarrier_init(arrived, 1);
  mbarrier_init_fence();
  mbarrier_expect(arrived, bytes);
#endif
}

// What block `to` of the cluster calls it.
__device__ __forceinline__ uint32_t remote_address(const void* shared, int to) {
  uint32_t address = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(shared)), "r"(to));
#endif
  return address;
}

// To block `to` of the cluster; place and arrived: what it calls as the sender calls these.
template <typename T>
__device__ __forceinline__ void send_mail(const T& value, const T* place, const uint64_t* arrived,
                                          int to) {
#if __CUDA_ARCH__ >= 900
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  const uint32_t remote = remote_address(place, to), counter = remote_address(arrived, to);
  if constexpr (sizeof(T) == 4) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote),
        "r"(reinterpret_cast<const uint32_t&>(value)), "r"(counter)
        : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(remote),
        "l"(reinterpret_cast<const uint64_t&>(value)), "r"(counter)
        : "memory");
  } else {
    const auto* const parts = reinterpret_cast<const uint64_t*>(&value);
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];" ::"r"(
            remote),
        "l"(parts[0]), "l"(parts[1]), "r"(counter)
        : "memory");
  }
#endif
}

// Where values of the other blocks arrive in a block's shared memory, N of each at most.
template <typename T, int N>
struct ClusterMail {
  uint64_t arrived;
  alignas(16) T values[kMaxCluster][N];

  // One thread, and cluster_meet() behind it before anything is sent: so many will come, from all
  // blocks together.
  __device__ __forceinline__ void expect(int count) {
    expect_mail(&arrived, count * static_cast<uint32_t>(sizeof(T)));
  }
  // To values[from][i] of block `to`; `from` is the sender's number in the cluster.
  __device__ __forceinline__ void send(const T& value, int from, int i, int to) const {
    send_mail(value, &values[from][i], &arrived, to);
  }
  // Until all of them are there.
  __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    mbarrier_wait(&arrived, 0);
#endif
  }
};

}  // namespace braze::cuda
