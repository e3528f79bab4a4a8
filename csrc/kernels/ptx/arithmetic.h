// Single instructions that C++ has no word for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_ext::ptx {

/// 2^x to 2 ulp; 0 for -inf, inf for inf (PTX ISA, "ex2").
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// log2(x) to 2^-22, relative beyond [1/2, 2] (PTX ISA, "lg2").
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x to 1 ulp (PTX ISA, "rcp").
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// tanh to about 2^-11 relative: no more than 16-bit inputs carry (PTX ISA, "tanh").
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The smaller one; NaN if one of them is (PTX ISA, "min").
__device__ __forceinline__ float min_or_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

/// The larger one; NaN if one of them is (PTX ISA, "max").
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

/// Rounds to TF32, to nearest with ties away from zero: a float whose 13 low bits are 0 (PTX ISA, "cvt").
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

/// Spreads the sign of each half of x over all 16 bits of that half (PTX ISA, "prmt": a selector
/// nibble 8 + k is the sign of byte k).
__device__ __forceinline__ uint32_t spread_signs(uint32_t x) {
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(y) : "r"(x));
  return y;
}

/// Returns a mask of `count` bits from bit `first` on. It takes one instruction and no constant in a register (PTX ISA,
/// "bmsk").
__device__ __forceinline__ uint32_t bit_field(int first, int count) {
  uint32_t bits;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(first), "r"(count));
  return bits;
}

/// Rounds two floats to 16 bits, and packs them with `low` in the low half.
template <class Element>
__device__ __forceinline__ uint32_t pack2(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

/// Unpacks the two floats of pack2().
template <class Element>
__device__ __forceinline__ float2 unpack2(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack2<__half>(uint32_t packed) {
  return __half22float2(reinterpret_cast<const __half2&>(packed));
}

template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000u)};
}

}  // namespace flash_ext::ptx
