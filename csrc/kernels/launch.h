// Calls into the CUDA runtime that throw, and the one way to launch a kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace flash_ext {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // else the next call that asks for the last error would report this one again
  throw std::runtime_error(std::string("flash_ext: ") + what + ": " + cudaGetErrorString(status));
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

/// Shared memory of the current device: what a block can have, and an SM for all its blocks, each of which costs
/// kReservedSharedBytes more.
inline int shared_bytes_per_block() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }
inline int shared_bytes_per_sm() { return device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor); }
constexpr int kReservedSharedBytes = 1024;

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  bool overlaps_previous = false;  // the kernel waits for the previous one by itself (ptx/grid_dependency.h)
};

/// Whether a kernel that waits for its predecessor by itself has been compiled so that it does: code for earlier GPUs,
/// which a later one can run too, has no such instruction.
inline bool waits_for_previous(const void* kernel) {
  cudaFuncAttributes attributes = {};
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  return attributes.ptxVersion >= 90;
}

/// A number of blocks as the first dimension of a grid.
inline unsigned grid_size(int64_t blocks) {
  constexpr int64_t kMostBlocks = INT32_MAX;
  if (blocks > kMostBlocks) {
    throw std::runtime_error("flash_ext: too much work for one launch: batch, heads and lengths make " +
                             std::to_string(blocks) + " blocks, at most " + std::to_string(kMostBlocks) +
                             " are possible");
  }
  return static_cast<unsigned>(blocks);
}

/// A grid without blocks launches nothing.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
            Arguments&&... arguments) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  constexpr size_t kDefaultSharedBytes = 48 * 1024;
  if (shape.shared_bytes > kDefaultSharedBytes) {
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes)),
        name);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  if (shape.overlaps_previous && waits_for_previous(reinterpret_cast<const void*>(kernel))) {
    config.attrs = &overlap;
    config.numAttrs = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...), name);
}

}  // namespace flash_ext
