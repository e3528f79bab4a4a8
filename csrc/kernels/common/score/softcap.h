// Softcap, its value and its derivative: a product becomes  cap * tanh(x),  x = product * scale / cap,  and by
// product * scale that has the derivative  1 - tanh(x)^2,  the slope.
#pragma once

#include "kernels/common/host_device.h"
#if defined(__CUDACC__)
#include "kernels/ptx/arithmetic.h"
#include "units.cuh"
#endif

namespace flash_ext {

/// The slope where tanh(x) is `tanh`: a number of type Scalar, or a vector of them.
template <class Scalar, class Numbers = Scalar>
FLASH_EXT_HOST_DEVICE Numbers softcap_slope(const Numbers& tanh) {
  return Scalar(1) - tanh * tanh;
}

#if defined(__CUDACC__)
/// As precise as weights of this element are.
template <class Element>
__device__ __forceinline__ float softcap_tanh(float x) {
  if constexpr (sizeof(Element) == 4) return tanhf(x);
  return ptx::tanh_approx(x);
}
/// To 1e-7, as an lse in float wants it.
template <class Element>
__device__ __forceinline__ float softcap_tanh_of_lse(float x) {
  if constexpr (sizeof(Element) == 4) return tanhf(x);
  return 1.0f - __fdividef(2.0f, 1.0f + ptx::exp2_approx(2.0f * kLog2E * x));
}
#endif

}  // namespace flash_ext
