#include "cuda_device.h"

#include <cstdlib>
#include <cstring>

#include "../kernels/launch.h"
#include "device.h"

namespace flash_ext::api {
namespace {

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

bool read_check_switch() {
  const char* const value = std::getenv("FLASH_EXT_CHECK");
  if (value == nullptr || *value == '\0' || std::strcmp(value, "0") == 0) return false;
  check(std::strcmp(value, "1") == 0, "FLASH_EXT_CHECK must be 0 or 1, got ", value);
  return true;
}

}  // namespace

void describe_device(const Tensor& q, plan::Problem& problem) {
  const int device = q.get_device_index();
  problem.device = plan::Device::kCuda;
  problem.compute_capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, device) + attribute(cudaDevAttrComputeCapabilityMinor, device);
  problem.num_workers = attribute(cudaDevAttrMultiProcessorCount, device);
}

int64_t row_alignment() { return 16; }  // of cp.async and of vectorised stores

bool wants_value_checks(const Tensor& q) {
  static const bool wanted = read_check_switch();
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
