#include "cuda_device.h"

#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <cstring>

#include "device.h"
#include "kernels/launch.h"

namespace flash_ext::api {
namespace {

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
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
  const int device = q.get_device_index();
  problem.device = plan::Device::kCuda;
  problem.compute_capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, device) + attribute(cudaDevAttrComputeCapabilityMinor, device);
  static const bool use_hopper_kernels = kHopperKernels && read_switch("FLASH_EXT_HOPPER", true);
  problem.own_kernels = use_hopper_kernels;
  problem.num_workers = attribute(cudaDevAttrMultiProcessorCount, device);
  problem.shared_bytes_per_cta = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  problem.shared_bytes_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
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

TorchSettings torch_settings(const Tensor& q, bool backward) {
  const bool is_float32 = q.scalar_type() == ScalarType::Float;
  if (!backward && !is_float32) return {};
  StableIValue settings[1];
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("flash_ext_python::torch_settings", "", settings, TORCH_ABI_VERSION));
  const auto bits = torch::stable::detail::to<int64_t>(settings[0]);
  return {(bits & 1) != 0, is_float32 && (bits & 2) != 0};
}

}  // namespace flash_ext::api
