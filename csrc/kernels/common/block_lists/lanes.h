// The lanes that process a row of blocks: a warp on CUDA, one thread on a CPU. The code for a row is thus written once
// for both.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FLASH_EXT_LANES_CODE __device__ __forceinline__
#else
#define FLASH_EXT_LANES_CODE static inline
#endif

namespace flash_ext {

#if defined(__CUDACC__)

/// All lanes of a warp call each function together.
struct Lanes {
  static constexpr int kCount = 32;
  int index = static_cast<int>(threadIdx.x) % kCount;

  __device__ __forceinline__ int min(int x) const { return __reduce_min_sync(~0u, x); }
  __device__ __forceinline__ bool any(bool flag) const { return __any_sync(~0u, flag) != 0; }
  __device__ __forceinline__ bool all(bool flag) const { return __all_sync(~0u, flag) != 0; }
  /// How many lanes have the flag; how many of the lanes before this one have it.
  __device__ __forceinline__ int count(bool flag) const { return __popc(__ballot_sync(~0u, flag)); }
  __device__ __forceinline__ int rank(bool flag) const {
    return __popc(__ballot_sync(~0u, flag) & ((1u << index) - 1));
  }
};

#else

struct Lanes {
  static constexpr int kCount = 1;
  static constexpr int index = 0;

  static int min(int x) { return x; }
  static bool any(bool flag) { return flag; }
  static bool all(bool flag) { return flag; }
  static int count(bool flag) { return flag ? 1 : 0; }
  static int rank(bool) { return 0; }
};

#endif

}  // namespace flash_ext
