// Limits that let NaN through.
#pragma once

namespace flash_ext::ptx {

/// x within [low, high]; NaN for NaN (PTX ISA, "min", "max").
__device__ __forceinline__ float clamp(float x, float low, float high) {
  float y;
  asm("{\n.reg .f32 t;\nmax.NaN.f32 t, %1, %2;\nmin.NaN.f32 %0, t, %3;\n}" : "=f"(y) : "f"(x), "f"(low), "f"(high));
  return y;
}

}  // namespace flash_ext::ptx
