// Values that the blocks of a cluster send each other (sm_90).
#pragma once

#include "cluster.cuh"
#include "tma.cuh"

namespace braze::cuda {

// Where values of the other blocks arrive in a block's shared memory, N of each at most. They are
// counted at a barrier of the receiver's (st.async): it waits for them alone, where cluster_sync()
// would wait until all memory has seen what the blocks have written before. A block that only sends
// may end behind it. Not for launches without clusters, which have no remote memory.
template <typename T, int N>
struct ClusterMail {
  uint64_t arrived;
  alignas(16) T values[kMaxCluster][N];

  // One thread, and cluster_meet() behind it before anything is sent: so many will come, from all
  // blocks together.
  __device__ __forceinline__ void expect(int count) {
#if __CUDA_ARCH__ >= 900
    mbarrier_init(&arrived, 1);
    mbarrier_init_fence();
    mbarrier_expect(&arrived, count * static_cast<uint32_t>(sizeof(T)));
#endif
  }
  // To values[from][i] of block `to`; `from` is the sender's number in the cluster.
  __device__ __forceinline__ void send(const T& value, int from, int i, int to) const {
#if __CUDA_ARCH__ >= 900
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    const uint32_t place = remote(&values[from][i], to), counter = remote(&arrived, to);
    if constexpr (sizeof(T) == 4) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(place),
          "r"(reinterpret_cast<const uint32_t&>(value)), "r"(counter)
          : "memory");
    } else if constexpr (sizeof(T) == 8) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(place),
          "l"(reinterpret_cast<const uint64_t&>(value)), "r"(counter)
          : "memory");
    } else {
      const auto* const parts = reinterpret_cast<const uint64_t*>(&value);
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];" ::
              "r"(place),
          "l"(parts[0]), "l"(parts[1]), "r"(counter)
          : "memory");
    }
#endif
  }
  // Until all of them are there.
  __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    mbarrier_wait(&arrived, 0);
#endif
  }

 private:
  // What block `to` of the cluster calls it.
  static __device__ __forceinline__ uint32_t remote(const void* shared, int to) {
    uint32_t address = 0;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(shared_address(shared)), "r"(to));
#endif
    return address;
  }
};

}  // namespace braze::cuda
