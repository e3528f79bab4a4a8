// Calls into the CUDA runtime that throw, and the one way to launch a kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
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

/// Shared memory of the current device: what a CTA can have, and an SM for all its CTAs, each of which costs
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

/// A kernel as one device has it.
struct LoadedKernel {
  // Code for earlier GPUs, which a later one can run too, has no instruction that waits for the previous kernel.
  bool waits_for_previous;
};

/// Loads a kernel, and allows it as much dynamic shared memory as the device has beside its static one. That only
/// permits: what a launch gets, and how many CTAs share an SM, follows from its own shared_bytes.
inline LoadedKernel load_kernel(const void* kernel, const char* name) {
  cudaFuncAttributes attributes = {};
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), name);
  const int most = shared_bytes_per_block() - static_cast<int>(attributes.sharedSizeBytes);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), name);
  return {attributes.ptxVersion >= 90};
}

/// The same, once for each kernel and device: its attributes never change again, so that threads may launch it with
/// different amounts of shared memory at the same time. Threads that come first together set the same; the lock is
/// not held meanwhile, as loading may wait for kernels that wait for another thread's.
inline LoadedKernel loaded_kernel(const void* kernel, const char* name) {
  static std::mutex& mutex = *new std::mutex;  // never destroyed: threads may launch until the process ends
  static auto& kernels = *new std::map<std::pair<const void*, int>, LoadedKernel>;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = kernels.find({kernel, device});
    if (found != kernels.end()) return found->second;
  }
  const LoadedKernel loaded = load_kernel(kernel, name);
  const std::lock_guard<std::mutex> lock(mutex);
  kernels.emplace(std::pair{kernel, device}, loaded);
  return loaded;
}

/// A number of CTAs as a dimension of a grid; `most` is what that dimension can count to.
inline unsigned grid_size(int64_t blocks, int64_t most = INT32_MAX) {
  if (blocks < 0 || blocks > most) {
    throw std::runtime_error("flash_ext: too much work for one launch: batch, heads and lengths make " +
                             std::to_string(blocks) + " blocks, at most " + std::to_string(most) + " are possible");
  }
  return static_cast<unsigned>(blocks);
}

/// A grid. Whatever makes one goes through here: a product of sizes that it cannot count is refused, not cut.
inline dim3 grid_of(int64_t x, int64_t y = 1, int64_t z = 1) {
  constexpr int64_t kMostInYAndZ = 65535;
  return dim3(grid_size(x), grid_size(y, kMostInYAndZ), grid_size(z, kMostInYAndZ));
}

/// A grid without CTAs launches nothing.
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
