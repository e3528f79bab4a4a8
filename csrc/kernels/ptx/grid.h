// What a kernel knows of its launch.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// gridDim.x, read where it stands: it takes no register elsewhere.
__device__ __forceinline__ uint32_t grid_ctas() {
  uint32_t ctas;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(ctas));
  return ctas;
}

}  // namespace flash_ext::ptx
