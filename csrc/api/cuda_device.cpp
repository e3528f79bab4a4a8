#include "cuda_device.h"

#include <cstdlib>
#include <cstring>
#include <map>

#include "device.h"
#include "kernels/launch.h"

namespace flash_ext::api {
namespace {

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

/// What never changes about a device.
struct DeviceFacts {
  int64_t compute_capability, num_sms, shared_bytes_per_cta, shared_bytes_per_sm;
};

DeviceFacts ask(int device) {
  return {
      10 * attribute(cudaDevAttrComputeCapabilityMajor, device) + attribute(cudaDevAttrComputeCapabilityMinor, device),
      attribute(cudaDevAttrMultiProcessorCount, device),
      attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
      attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
  };
}

/// Asked once for each device: every call needs them.
const DeviceFacts& facts_of(int device) {
  thread_local std::map<int, DeviceFacts> known;
  const auto found = known.find(device);
  return found != known.end() ? found->second : known.emplace(device, ask(device)).first->second;
}

/// An environment variable that is 0 or 1, or unset.
bool read_switch(const char* name, bool otherwise) {
  const char* const value = std::getenv(name);
  if (value == nullptr || *value == '\0') return otherwise;
  const bool on = std::strcmp(value, "1") == 0;
  check(on || std::strcmp(value, "0") == 0, name, " must be 0 or 1, got ", value);
  return on;
}

#ifdef FLASH_EXT_NO_HOPPER
constexpr bool kHopperKernels = false;  // FLASH_EXT_ARCHS names no 90a
#else
constexpr bool kHopperKernels = true;
#endif

}  // namespace

void describe_device(const Tensor& q, plan::Problem& problem) {
  const DeviceFacts& facts = facts_of(q.get_device_index());
  static const bool use_hopper_kernels = kHopperKernels && read_switch("FLASH_EXT_HOPPER", true);
  problem.device = plan::Device::kCuda;
  problem.compute_capability = facts.compute_capability;
  problem.own_kernels = use_hopper_kernels;
  problem.num_workers = facts.num_sms;
  problem.shared_bytes_per_cta = facts.shared_bytes_per_cta;
  problem.shared_bytes_per_sm = facts.shared_bytes_per_sm;
}

int64_t longest_sequence(const Tensor& /*cu_seqlens*/, int64_t bound) { return bound; }

int64_t row_alignment() { return 16; }  // of cp.async and of vectorised stores

bool wants_value_checks(const Tensor& q) {
  static const bool wanted = read_switch("FLASH_EXT_CHECK", false);
  if (!wanted) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(CudaDevice(q).stream(), &status), "cudaStreamIsCapturing");
  check(
      status == cudaStreamCaptureStatusNone,
      "FLASH_EXT_CHECK=1 reads cu_seqlens and its like on the host, which a CUDA graph cannot capture: capture without "
      "it");
  return true;
}

}  // namespace flash_ext::api
