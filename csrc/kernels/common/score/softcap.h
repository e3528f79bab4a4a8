// Softcap, its value and its derivative. A product becomes  cap * tanh(x)  with  x = product * scale / cap.  Its
// derivative by product * scale is the slope,  1 - tanh(x)^2.
#pragma once

#if defined(__CUDACC__)
#include "kernels/ptx/arithmetic.h"
#include "units.cuh"
#endif

namespace flash_ext {

#if defined(__CUDACC__)

/// tanh, as precise as weights of this element are.
template <class Element>
__device__ __forceinline__ float softcap_tanh(float x) {
  if constexpr (sizeof(Element) == 4) return tanhf(x);
  return ptx::tanh_approx(x);
}
/// tanh with an error of 1e-7, as precise as an lse in float.
template <class Element>
__device__ __forceinline__ float softcap_tanh_of_lse(float x) {
  if constexpr (sizeof(Element) == 4) return tanhf(x);
  return 1.0f - __fdividef(2.0f, 1.0f + ptx::exp2_approx(2.0f * kLog2E * x));
}

/// The slope where tanh(x) is `tanh`.
__device__ __forceinline__ float softcap_slope(float tanh) { return fmaf(-tanh, tanh, 1.0f); }

#else

/// The slope where tanh(x) is `tanh`: a vector of numbers of type T.
template <class T, class Vector>
static inline Vector softcap_slope(const Vector& tanh) {
  return T(1) - tanh * tanh;
}

#endif

}  // namespace flash_ext
