#include "kernels/launch.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace flash_ext {

void fail(const char* what) { throw std::runtime_error(std::string("flash_ext: ") + what); }

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // else the next call that asks for the last error would report this one again
  fail((std::string(what) + ": " + cudaGetErrorString(status)).c_str());
}

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

namespace {

LoadedKernel load_kernel(const void* kernel, const char* name) {
  cudaFuncAttributes attributes = {};
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), name);
  const int most = shared_bytes_per_cta() - static_cast<int>(attributes.sharedSizeBytes);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), name);
  return {attributes.ptxVersion >= 90};
}

}  // namespace

// Attributes never change afterwards, so threads may launch a kernel with different amounts of shared memory at the
// same time. Two threads that load it at once set the same values. The lock is not held while loading, because loading
// may wait for kernels that wait for another thread's kernels.
LoadedKernel loaded_kernel(const void* kernel, const char* name) {
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

unsigned grid_size(int64_t ctas, int64_t most) {
  if (ctas < 0 || ctas > most) {
    fail(("too much work for one launch: batch, heads and lengths make " + std::to_string(ctas) + " CTAs, at most " +
          std::to_string(most) + " are possible")
             .c_str());
  }
  return static_cast<unsigned>(ctas);
}

}  // namespace flash_ext
