// Maps of tensors, as TMA reads them (PTX ISA, "prefetch{.tensormap}").
#pragma once

#include <cuda.h>

namespace flash_ext::ptx {

/// Prefetches a map, so that later copies that name it need not wait for it.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace flash_ext::ptx
