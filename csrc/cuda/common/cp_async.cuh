// Asynchronous copies from global to shared memory (sm_80+) and the software pipeline built on
// them.
#pragma once

#include <cstdint>

namespace braze::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The same pointer in a register. The compiler computes where a kernel's shared memory begins,
// which takes six instructions in kernels with clusters, before every access; it cannot of what a
// warp has exchanged. Whole warps call it.
__device__ __forceinline__ unsigned char* in_register(unsigned char* shared) {
  const uint32_t address = __shfl_sync(0xffffffffu, shared_address(shared), 0);
  return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}

// Copies kBytes (4, 8 or 16; both addresses so aligned), or writes zeros where `valid` is false:
// the global address is not read then.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool valid) {
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {  // .cg: past L1, which a tile that is read once does not need
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                 "l"(global), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The same where `pending` is known to the launch alone; until fewer are under way where that is
// beyond what there is an instruction for here.
__device__ __forceinline__ void cp_async_wait_for_all_but(int pending) {
  switch (pending) {
    case 0: return cp_async_wait<0>();
    case 1: return cp_async_wait<1>();
    case 2: return cp_async_wait<2>();
    case 3: return cp_async_wait<3>();
    case 4: return cp_async_wait<4>();
    case 5: return cp_async_wait<5>();
    default: return cp_async_wait<6>();
  }
}

// A vector of shared memory, read where it stands: the compiler would rather keep what it has read
// before, even where registers do not suffice.
__device__ __forceinline__ uint4 load_shared_again(const uint4* p) {
  uint4 v;
  asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address(p)));
  return v;
}
template <typename Raw>
__device__ __forceinline__ Raw load_shared_again(const Raw* p) {
  return *p;
}

// Runs compute(stage) for `tiles` tiles while load(stage, tile) fills the stages ahead of it.
// arrived(stage) is called when a thread's own copies are there, and ends with a barrier of the
// threads that share the stages: the stage that is refilled is the one that every warp has left.
template <int kStages, typename Load, typename Compute, typename Arrived>
__device__ __forceinline__ void pipeline(int tiles, Load load, Compute compute, Arrived arrived) {
#pragma unroll
  for (int t = 0; t < kStages - 1; ++t) {
    if (t < tiles) load(t, t);
    cp_async_commit();
  }
  int read = 0, write = kStages - 1;
  for (int t = 0; t < tiles; ++t) {
    cp_async_wait<kStages - 2>();
    arrived(read);
    if (t + kStages - 1 < tiles) load(write, t + kStages - 1);
    cp_async_commit();
    compute(read);
    read = read + 1 == kStages ? 0 : read + 1;
    write = write + 1 == kStages ? 0 : write + 1;
  }
}

// The same for few tiles. The first kStages are asked for at once, and there is one copy of the
// code: a kernel that is over soon spends much of its time on fetching instructions.
template <int kStages, typename Load, typename Compute, typename Arrived>
__device__ __forceinline__ void short_pipeline(int tiles, Load load, Compute compute,
                                               Arrived arrived) {
  static_assert(kStages >= 2);
  int read = 0, write = 0, next = 0;  // stages; the tile to load
#pragma unroll 1
  for (int t = -kStages; t < tiles; ++t) {
    if (t == 0) {
      cp_async_wait<kStages - 1>();
    } else if (t > 0) {
      cp_async_wait<kStages - 2>();
    }
    if (t >= 0) arrived(read);
    if (t != 0) {  // then every stage but the one to be read is full
      if (next < tiles) load(write, next);
      cp_async_commit();
      ++next;
      write = write + 1 == kStages ? 0 : write + 1;
    }
    if (t >= 0) {
      compute(read);
      read = read + 1 == kStages ? 0 : read + 1;
    }
  }
}

}  // namespace braze::cuda
