// Products of a warpgroup whose B has rows across the depth, and A rows along it, both in shared memory: see wgmma.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash_ext::ptx {

#define FLASH_EXT_D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define FLASH_EXT_PRODUCT(TYPE)                                                                                        \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                             \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "     \
               "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, %34, 1, 1, 0, 1;"                    \
               : FLASH_EXT_D4(0), FLASH_EXT_D4(1), FLASH_EXT_D4(2), FLASH_EXT_D4(3), FLASH_EXT_D4(4), FLASH_EXT_D4(5), \
                 FLASH_EXT_D4(6), FLASH_EXT_D4(7)                                                                      \
               : "l"(a), "l"(b), "n"(kAccumulate)                                                                      \
               : "memory")

/// 64 columns.
template <class Element, bool kAccumulate>
__device__ __forceinline__ void wgmma_across(float (&d)[8][4], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<Element, __half>) {
    FLASH_EXT_PRODUCT("f16");
  } else {
    FLASH_EXT_PRODUCT("bf16");
  }
}

#undef FLASH_EXT_PRODUCT
#undef FLASH_EXT_D4

}  // namespace flash_ext::ptx
