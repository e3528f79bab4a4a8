// Moves registers between the warpgroups of a CTA (PTX ISA, "setmaxnreg"). All warps of a warpgroup call it.
#pragma once

namespace flash_ext::ptx {

/// Waits until others have released the registers.
template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters) : "memory");
}

}  // namespace flash_ext::ptx
