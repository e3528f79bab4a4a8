// Where CUDA work of an operator goes: the tensor's device, torch's current stream.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include "checks.h"

// A torch without CUDA does not declare it, though a library built beside one runs under a torch that has it.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace flash_ext::api {

/// The tensor's device is the current one for as long as this lives.
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
