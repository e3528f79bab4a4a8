// Matrix products of a warpgroup, asynchronous (PTX ISA, "wgmma"): D (64 x kN, float) += A (64 x 16) B (16 x kN).
//
// Warp w of the four owns rows [16 w, + 16) of D, in which d[n][e] lies as in mma.sync's accumulators: with g = lane /
// 4 and t = lane % 4, d[n][0..1] are row g, columns 8 n + 2 t and + 1; d[n][2..3] the same of row g + 8. A in registers
// lies as for mma.sync too.
//
// From the first product to the wait, registers of A and D belong to the tensor core.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_ext::ptx {

/// Must come before the first product after something else has written its registers.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until no more than kPending of the committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving uses of the register over this place: it does not know when wgmma reads or writes it.
__device__ __forceinline__ void fence_operand(float& x) { asm volatile("" : "+f"(x)::"memory"); }
/// The same for accumulators.
template <int kN>
__device__ __forceinline__ void fence_operand(float (&x)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) fence_operand(x[n][e]);
}

/// How a tile of A or B lies in shared memory. kK: rows along the depth (imm-trans 0). kMN: rows across the depth
/// (imm-trans 1).
enum class Major { kK, kMN };

/// Products of 16-bit Elements with kN columns. A and B are descriptors of tiles in shared memory
/// (sm90/common/matrix_descriptor.h), or A is in registers. Without kAccumulate D becomes the product.
template <class Element, int kN>
struct Wgmma;

// Operands %0 ... of the accumulators of 16 columns each, and how they are bound.
#define FLASH_EXT_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASH_EXT_R16 FLASH_EXT_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_EXT_R24 FLASH_EXT_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASH_EXT_R32 FLASH_EXT_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_EXT_R40 FLASH_EXT_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASH_EXT_R48 FLASH_EXT_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_EXT_R56 FLASH_EXT_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FLASH_EXT_R64 FLASH_EXT_R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_EXT_R72 FLASH_EXT_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FLASH_EXT_R80 FLASH_EXT_R72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FLASH_EXT_R88 FLASH_EXT_R80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FLASH_EXT_R96 FLASH_EXT_R88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH_EXT_R104 FLASH_EXT_R96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FLASH_EXT_R112 FLASH_EXT_R104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FLASH_EXT_R120 FLASH_EXT_R112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FLASH_EXT_R128 FLASH_EXT_R120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define FLASH_EXT_D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define FLASH_EXT_D8 FLASH_EXT_D4(0), FLASH_EXT_D4(1)
#define FLASH_EXT_D16 FLASH_EXT_D8, FLASH_EXT_D4(2), FLASH_EXT_D4(3)
#define FLASH_EXT_D24 FLASH_EXT_D16, FLASH_EXT_D4(4), FLASH_EXT_D4(5)
#define FLASH_EXT_D32 FLASH_EXT_D24, FLASH_EXT_D4(6), FLASH_EXT_D4(7)
#define FLASH_EXT_D40 FLASH_EXT_D32, FLASH_EXT_D4(8), FLASH_EXT_D4(9)
#define FLASH_EXT_D48 FLASH_EXT_D40, FLASH_EXT_D4(10), FLASH_EXT_D4(11)
#define FLASH_EXT_D56 FLASH_EXT_D48, FLASH_EXT_D4(12), FLASH_EXT_D4(13)
#define FLASH_EXT_D64 FLASH_EXT_D56, FLASH_EXT_D4(14), FLASH_EXT_D4(15)
#define FLASH_EXT_D72 FLASH_EXT_D64, FLASH_EXT_D4(16), FLASH_EXT_D4(17)
#define FLASH_EXT_D80 FLASH_EXT_D72, FLASH_EXT_D4(18), FLASH_EXT_D4(19)
#define FLASH_EXT_D88 FLASH_EXT_D80, FLASH_EXT_D4(20), FLASH_EXT_D4(21)
#define FLASH_EXT_D96 FLASH_EXT_D88, FLASH_EXT_D4(22), FLASH_EXT_D4(23)
#define FLASH_EXT_D104 FLASH_EXT_D96, FLASH_EXT_D4(24), FLASH_EXT_D4(25)
#define FLASH_EXT_D112 FLASH_EXT_D104, FLASH_EXT_D4(26), FLASH_EXT_D4(27)
#define FLASH_EXT_D120 FLASH_EXT_D112, FLASH_EXT_D4(28), FLASH_EXT_D4(29)
#define FLASH_EXT_D128 FLASH_EXT_D120, FLASH_EXT_D4(30), FLASH_EXT_D4(31)

// The number of columns, the number of their accumulators, and the numbers of the six operands that follow. Constants
// are bools: an int of 0 would make nvcc define zeros of the code around it elsewhere.
#define FLASH_EXT_WGMMA(ELEMENT, TYPE, COLUMNS, REGISTERS, O0, O1, O2, O3, O4, O5)                                   \
  template <>                                                                                                        \
  struct Wgmma<ELEMENT, COLUMNS> {                                                                                   \
    template <bool kAccumulate, Major kMajorA = Major::kK, Major kMajorB = Major::kK>                                \
    __device__ __forceinline__ static void multiply(float (&d)[COLUMNS / 8][4], uint64_t a, uint64_t b) {            \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" FLASH_EXT_R##REGISTERS \
                   "}, %" #O0 ", %" #O1 ", %" #O2 ", 1, 1, %" #O3 ", %" #O4 ";"                                      \
                   : FLASH_EXT_D##REGISTERS                                                                          \
                   : "l"(a), "l"(b), "n"(kAccumulate), "n"(kMajorA == Major::kMN), "n"(kMajorB == Major::kMN)        \
                   : "memory");                                                                                      \
    }                                                                                                                \
    /* A in registers; B is MN-major. */                                                                             \
    template <bool kAccumulate>                                                                                      \
    __device__ __forceinline__ static void multiply_registers(float (&d)[COLUMNS / 8][4], const uint32_t (&a)[4],    \
                                                              uint64_t b) {                                          \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" FLASH_EXT_R##REGISTERS \
                   "}, {%" #O0 ", %" #O1 ", %" #O2 ", %" #O3 "}, %" #O4 ", %" #O5 ", 1, 1, 1;"                       \
                   : FLASH_EXT_D##REGISTERS                                                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAccumulate)                            \
                   : "memory");                                                                                      \
    }                                                                                                                \
  };

#define FLASH_EXT_WGMMA_16BIT(...)                    \
  FLASH_EXT_WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__) \
  FLASH_EXT_WGMMA(__half, "f16", __VA_ARGS__)

FLASH_EXT_WGMMA_16BIT(32, 16, 16, 17, 18, 19, 20, 21)
FLASH_EXT_WGMMA_16BIT(64, 32, 32, 33, 34, 35, 36, 37)
FLASH_EXT_WGMMA_16BIT(80, 40, 40, 41, 42, 43, 44, 45)
FLASH_EXT_WGMMA_16BIT(96, 48, 48, 49, 50, 51, 52, 53)
FLASH_EXT_WGMMA_16BIT(128, 64, 64, 65, 66, 67, 68, 69)
FLASH_EXT_WGMMA_16BIT(192, 96, 96, 97, 98, 99, 100, 101)
FLASH_EXT_WGMMA_16BIT(256, 128, 128, 129, 130, 131, 132, 133)

#undef FLASH_EXT_WGMMA_16BIT
#undef FLASH_EXT_WGMMA
#undef FLASH_EXT_D4
#undef FLASH_EXT_R8
#undef FLASH_EXT_D8
#undef FLASH_EXT_R16
#undef FLASH_EXT_D16
#undef FLASH_EXT_R24
#undef FLASH_EXT_D24
#undef FLASH_EXT_R32
#undef FLASH_EXT_D32
#undef FLASH_EXT_R40
#undef FLASH_EXT_D40
#undef FLASH_EXT_R48
#undef FLASH_EXT_D48
#undef FLASH_EXT_R56
#undef FLASH_EXT_D56
#undef FLASH_EXT_R64
#undef FLASH_EXT_D64
#undef FLASH_EXT_R72
#undef FLASH_EXT_D72
#undef FLASH_EXT_R80
#undef FLASH_EXT_D80
#undef FLASH_EXT_R88
#undef FLASH_EXT_D88
#undef FLASH_EXT_R96
#undef FLASH_EXT_D96
#undef FLASH_EXT_R104
#undef FLASH_EXT_D104
#undef FLASH_EXT_R112
#undef FLASH_EXT_D112
#undef FLASH_EXT_R120
#undef FLASH_EXT_D120
#undef FLASH_EXT_R128
#undef FLASH_EXT_D128

}  // namespace flash_ext::ptx
