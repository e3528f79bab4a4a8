// Products of a warpgroup whose B has rows across the depth, and A rows along it or across it too, both in shared
// memory: see wgmma.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash_ext::ptx {

#define FLASH_EXT_R32                                                                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_EXT_R48 \
  FLASH_EXT_R32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_EXT_R64                                                                                                \
  FLASH_EXT_R32                                                                                                      \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_EXT_D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define FLASH_EXT_D16(n) FLASH_EXT_D4(n), FLASH_EXT_D4(n + 1), FLASH_EXT_D4(n + 2), FLASH_EXT_D4(n + 3)
#define FLASH_EXT_D32 FLASH_EXT_D16(0), FLASH_EXT_D16(4)
#define FLASH_EXT_D48 FLASH_EXT_D32, FLASH_EXT_D16(8)
#define FLASH_EXT_D64 FLASH_EXT_D32, FLASH_EXT_D16(8), FLASH_EXT_D16(12)

// Registers, the numbers of the operands after them, and whether A has rows across the depth.
#define FLASH_EXT_PRODUCT(TYPE, COLUMNS, REGISTERS, A, B, ACCUMULATE, ACROSS)                                    \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" FLASH_EXT_R##REGISTERS \
               "}, %" #A ", %" #B ", %" #ACCUMULATE ", 1, 1, " #ACROSS ", 1;"                                    \
               : FLASH_EXT_D##REGISTERS                                                                          \
               : "l"(a), "l"(b), "n"(kAccumulate)                                                                \
               : "memory")
#define FLASH_EXT_EITHER_TYPE(...)                 \
  if constexpr (std::is_same_v<Element, __half>) { \
    FLASH_EXT_PRODUCT("f16", __VA_ARGS__);         \
  } else {                                         \
    FLASH_EXT_PRODUCT("bf16", __VA_ARGS__);        \
  }

/// 64 columns.
template <class Element, bool kAccumulate>
__device__ __forceinline__ void wgmma_across(float (&d)[8][4], uint64_t a, uint64_t b) {
  FLASH_EXT_EITHER_TYPE(64, 32, 32, 33, 34, 0)
}
/// 128 columns.
template <class Element, bool kAccumulate>
__device__ __forceinline__ void wgmma_across(float (&d)[16][4], uint64_t a, uint64_t b) {
  FLASH_EXT_EITHER_TYPE(128, 64, 64, 65, 66, 0)
}

/// 64 columns; A has rows across the depth too.
template <class Element, bool kAccumulate>
__device__ __forceinline__ void wgmma_transposed(float (&d)[8][4], uint64_t a, uint64_t b) {
  FLASH_EXT_EITHER_TYPE(64, 32, 32, 33, 34, 1)
}
/// 96 columns.
template <class Element, bool kAccumulate>
__device__ __forceinline__ void wgmma_transposed(float (&d)[12][4], uint64_t a, uint64_t b) {
  FLASH_EXT_EITHER_TYPE(96, 48, 48, 49, 50, 1)
}

#undef FLASH_EXT_EITHER_TYPE
#undef FLASH_EXT_PRODUCT
#undef FLASH_EXT_D64
#undef FLASH_EXT_D48
#undef FLASH_EXT_D32
#undef FLASH_EXT_D16
#undef FLASH_EXT_D4
#undef FLASH_EXT_R64
#undef FLASH_EXT_R48
#undef FLASH_EXT_R32

}  // namespace flash_ext::ptx
