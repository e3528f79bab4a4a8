// Warp-wide matrix products C (16x8, float) += A (16x16) B (16x8) (PTX ISA, "mma.sync.m16n8k16").
//
// With g = lane / 4 and t = lane % 4, a lane holds
//   c[0..1]: row g,     columns 2t, 2t + 1      c[2..3]: row g + 8, the same columns
//   a[0]: row g, a[1]: row g + 8, columns 2t, 2t + 1;  a[2], a[3]: the same rows, columns 2t + 8, 2t + 9
//   b[0]: rows 2t, 2t + 1 of column g;  b[1]: rows 2t + 8, 2t + 9
// so two neighbouring C tiles, packed to 16 bits, are an A tile without any exchange between lanes.
//
// TF32 (mma.sync.m16n8k8, A 16x8, B 8x8): C as above;
//   a[0]: row g, a[1]: row g + 8, column t;  a[2], a[3]: the same rows, column t + 4
//   b0: row t of column g;  b1: row t + 4
// The 13 low bits of A and B are ignored.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_ext::ptx {

template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace flash_ext::ptx
