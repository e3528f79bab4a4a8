// Loads two consecutive 16-bit elements from global memory that no kernel writes meanwhile (PTX ISA, "ld.global.nc").
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// Loads both elements where `exists`, else 0. g_pair is aligned to 4 bytes. The load stays where it is in the program.
__device__ __forceinline__ uint32_t load_pair_if(bool exists, const uint16_t* g_pair) {
  uint32_t pair;
  asm volatile(
      "{\n"
      ".reg .pred exists;\n"
      "setp.ne.u32 exists, %2, 0;\n"
      "mov.u32 %0, 0;\n"
      "@exists ld.global.nc.u32 %0, [%1];\n"
      "}"
      : "=r"(pair)
      : "l"(g_pair), "r"(static_cast<uint32_t>(exists)));
  return pair;
}

}  // namespace flash_ext::ptx
