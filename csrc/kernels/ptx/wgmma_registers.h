// Products of a warpgroup with A in registers and 64 or 32 columns of B, which has rows across the depth: see wgmma.h.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

#define FLASH_EXT_D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])

/// d += A B in bfloat16, or d = A B without kAccumulate.
template <bool kAccumulate>
__device__ __forceinline__ void wgmma_registers(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, %37, 1, 1, 1;"
      : FLASH_EXT_D4(0), FLASH_EXT_D4(1), FLASH_EXT_D4(2), FLASH_EXT_D4(3), FLASH_EXT_D4(4), FLASH_EXT_D4(5),
        FLASH_EXT_D4(6), FLASH_EXT_D4(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAccumulate)
      : "memory");
}

template <bool kAccumulate>
__device__ __forceinline__ void wgmma_registers(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, %21, 1, 1, "
      "1;"
      : FLASH_EXT_D4(0), FLASH_EXT_D4(1), FLASH_EXT_D4(2), FLASH_EXT_D4(3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAccumulate)
      : "memory");
}

#undef FLASH_EXT_D4

}  // namespace flash_ext::ptx
