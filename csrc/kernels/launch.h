// CUDA runtime calls that throw on errors, and launch(), through which every kernel is launched.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "kernels/common/shared_memory.h"

namespace flash_ext {

/// Throws std::runtime_error("flash_ext: ...").
[[noreturn]] void fail(const char* what);

/// Throws in the same way if CUDA reports an error.
void check_cuda(cudaError_t status, const char* what);

/// Reads an attribute of the current device.
int device_attribute(cudaDeviceAttr attribute);

/// Shared memory of the current device in bytes: the most that a CTA can have, and what an SM has for all its CTAs.
/// Each CTA takes kReservedSharedBytes more than it asks for.
inline int shared_bytes_per_cta() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }
inline int shared_bytes_per_sm() { return device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor); }

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  // Programmatic dependent launch: the kernel may start early, and waits for the previous one itself
  // (ptx/grid_dependency.h).
  bool overlaps_previous = false;
};

/// A kernel as loaded on one device.
struct LoadedKernel {
  // Code compiled for GPUs before compute capability 9.0 has no instruction that waits for the previous kernel.
  bool waits_for_previous;
};

/// Loads a kernel, once for each device, and raises its limit of dynamic shared memory to all that its static shared
/// memory leaves. The limit only permits: the shared_bytes of a launch decide how much it gets, and how many CTAs share
/// an SM.
LoadedKernel loaded_kernel(const void* kernel, const char* name);

/// Converts a number of CTAs to a dimension of a grid. Throws std::runtime_error beyond `most`, the limit of that
/// dimension.
unsigned grid_size(int64_t ctas, int64_t most = INT32_MAX);

/// Builds a grid. Every launch builds its grid here, so that a product of sizes beyond the limits throws instead of
/// wrapping.
inline dim3 grid_of(int64_t x, int64_t y = 1, int64_t z = 1) {
  constexpr int64_t kMostInYAndZ = 65535;
  return dim3(grid_size(x), grid_size(y, kMostInYAndZ), grid_size(z, kMostInYAndZ));
}

/// Launches a kernel; does nothing for a grid without CTAs. Throws std::runtime_error with `name` if CUDA reports an
/// error.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
            Arguments&&... arguments) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  constexpr size_t kDefaultSharedBytes = 48 * 1024;
  if (shape.shared_bytes > kDefaultSharedBytes || shape.overlaps_previous) {
    const LoadedKernel loaded = loaded_kernel(reinterpret_cast<const void*>(kernel), name);
    if (shape.overlaps_previous && loaded.waits_for_previous) {
      config.attrs = &overlap;
      config.numAttrs = 1;
    }
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...), name);
}

}  // namespace flash_ext
