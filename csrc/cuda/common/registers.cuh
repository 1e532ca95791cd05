// The registers of warpgroups that do different work (setmaxnreg, sm_90a). PTX ISA, "Miscellaneous
// instructions".
#pragma once

namespace braze::cuda {

// Called by whole warpgroups, whose threads began with kFirst registers: gives up registers, or
// waits until others have.
template <int kFirst, int kCount>
__device__ __forceinline__ void set_registers() {
  if constexpr (kCount > kFirst) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
  } else if constexpr (kCount < kFirst) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
  }
}

}  // namespace braze::cuda
