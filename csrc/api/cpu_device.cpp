#include <torch/csrc/stable/ops.h>

#include "device.h"

namespace flash_ext::api {

void describe_device(const Tensor&, plan::Problem& problem) {
  problem.device = plan::Device::kCpu;
  problem.num_workers = torch::stable::get_num_threads();
}

int64_t row_alignment() { return 1; }

bool wants_value_checks(const Tensor&) { return true; }

}  // namespace flash_ext::api
