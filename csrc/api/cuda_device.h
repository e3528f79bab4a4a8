// The device and the stream of an operator's CUDA work: the tensor's device, torch's current stream.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include "checks.h"

// Declared here because headers of a torch without CUDA lack it. A library built with those also runs under a torch
// with CUDA.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace flash_ext::api {

/// Makes the tensor's device the current one while it lives.
class CudaDevice {
 public:
  explicit CudaDevice(const Tensor& tensor) : index_(tensor.get_device_index()), guard_(index_) {}

  cudaStream_t stream() const {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    return static_cast<cudaStream_t>(stream);
  }

 private:
  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
};

}  // namespace flash_ext::api
