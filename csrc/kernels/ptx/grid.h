// The size of a kernel's grid.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// Returns gridDim.x. It is read at the place of the call, so that it takes no register elsewhere.
__device__ __forceinline__ uint32_t grid_ctas() {
  uint32_t ctas;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(ctas));
  return ctas;
}

}  // namespace flash_ext::ptx
