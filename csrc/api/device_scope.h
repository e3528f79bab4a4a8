// The device of an operator's work: that of its tensors.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "checks.h"

namespace flash_ext::api {

/// Makes the tensor's device the current one while it lives; a tensor on a CPU leaves it.
class DeviceScope {
 public:
  explicit DeviceScope(const Tensor& tensor) {
    if (!tensor.is_cpu()) guard_.emplace(tensor.get_device_index());
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace flash_ext::api
