#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

#include "cuda_stream.h"
#include "device.h"
#include "kernels/launch.h"
#include "plan/kernel_table.h"

// Declared here because headers of a torch without CUDA lack it. A library built with those also runs under a torch
// with CUDA.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

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

#define FLASH_EXT_TEXT_OF(tokens) #tokens
#define FLASH_EXT_TEXT(macro) FLASH_EXT_TEXT_OF(macro)

#ifndef FLASH_EXT_OWN_ARCHS
#error "FLASH_EXT_OWN_ARCHS must be defined: without it no architecture would have kernels of its own"
#endif

/// Whether FLASH_EXT_ARCHS named an architecture when this library was built: build_command.py joins the architectures
/// that have kernels of their own with underscores.
bool is_built(const plan::Architecture& architecture) {
  const std::string built = std::string("_") + FLASH_EXT_TEXT(FLASH_EXT_OWN_ARCHS) + "_";
  return built.find(std::string("_") + architecture.target + "_") != std::string::npos;
}

/// The compute capabilities that have kernels of their own. The environment is read once.
const std::set<int64_t>& with_own_kernels() {
  static const std::set<int64_t> found = [] {
    std::set<int64_t> capabilities;
    for (const plan::Architecture& architecture : plan::special_architectures())
      if (is_built(architecture) && read_switch(architecture.environment, true))
        capabilities.insert(architecture.compute_capability);
    return capabilities;
  }();
  return found;
}

std::atomic<bool> uses_own_kernels{true};

bool use_own_kernels(bool on) { return uses_own_kernels.exchange(on); }

}  // namespace

void describe_device(const Tensor& q, plan::Problem& problem) {
  const int device = q.get_device_index();
  problem.device = plan::Device::kCuda;
  problem.compute_capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, device) + attribute(cudaDevAttrComputeCapabilityMinor, device);
  problem.own_kernels = uses_own_kernels && with_own_kernels().count(problem.compute_capability) != 0;
  problem.num_workers = attribute(cudaDevAttrMultiProcessorCount, device);
  problem.shared_bytes_per_cta = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  problem.shared_bytes_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
}

int64_t longest_sequence(const Tensor& /*cu_seqlens*/, int64_t bound) { return bound; }

int64_t row_alignment() { return 16; }  // of cp.async and of vectorised stores

void check_dtype(const Argument& argument) {
  argument.dtype_in({ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
}

bool wants_value_checks(const Tensor& q) {
  static const bool wanted = read_switch("FLASH_EXT_CHECK", false);
  if (!wanted) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream_of(q), &status), "cudaStreamIsCapturing");
  check(
      status == cudaStreamCaptureStatusNone,
      "FLASH_EXT_CHECK=1 reads cu_seqlens and its like on the host, which a CUDA graph cannot capture: capture without "
      "it");
  return true;
}

TorchSettings torch_settings(const Tensor& q, bool backward) {
  const bool is_float32 = q.scalar_type() == ScalarType::Float;
  if (!backward && !is_float32) return {};
  StableIValue settings[] = {torch::stable::detail::from(is_float32)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("flash_ext_python::torch_settings", "", settings, TORCH_ABI_VERSION));
  const auto bits = torch::stable::detail::to<int64_t>(settings[0]);
  return {(bits & 1) != 0, (bits & 2) != 0};
}

cudaStream_t stream_of(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CompositeExplicitAutograd, m) {
  m.impl("use_own_kernels", TORCH_BOX(&use_own_kernels));
}

}  // namespace flash_ext::api
