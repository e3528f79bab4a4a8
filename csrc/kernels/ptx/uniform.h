// Values that all lanes of a warp have.
#pragma once

namespace flash_ext::ptx {

/// Returns x of the first lane. The compiler then knows that all lanes have this value, and can keep it in a uniform
/// register.
template <class T>
__device__ __forceinline__ T uniform(T x) {
  return __shfl_sync(~0u, x, 0);
}

}  // namespace flash_ext::ptx
