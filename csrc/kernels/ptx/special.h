// What the unit for special functions computes in one instruction.
#pragma once

namespace flash_ext::ptx {

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

}  // namespace flash_ext::ptx
