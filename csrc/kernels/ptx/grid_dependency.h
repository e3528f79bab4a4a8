// Kernels that start before their predecessor in the stream has ended (PTX ISA, "griddepcontrol"). Before Hopper there
// are none, and both calls do nothing.
#pragma once

namespace flash_ext::ptx {

/// Lets the next kernel of the stream start once all CTAs have called this or ended.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the previous kernel of the stream has ended and what it wrote is visible.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash_ext::ptx
