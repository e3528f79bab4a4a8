#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "device.h"
#include "kernels/cpu/attention.h"

namespace flash_ext::api {

void describe_device(const Tensor& q, plan::Problem& problem) {
  problem.device = plan::Device::kCpu;
  problem.matrix_units = q.scalar_type() == ScalarType::BFloat16 && cpu::uses_matrix_units();
  problem.num_workers = torch::stable::get_num_threads();
}

int64_t longest_sequence(const Tensor& cu_seqlens, int64_t bound) {
  const auto* const values = static_cast<const int32_t*>(cu_seqlens.const_data_ptr());
  int64_t longest = 0;
  for (int64_t b = 0; b + 1 < cu_seqlens.size(0); ++b) longest = std::max(longest, int64_t{values[b + 1]} - values[b]);
  return std::min(longest, bound);
}

int64_t row_alignment() { return 1; }

void check_dtype(const Argument& argument) { argument.dtype_floating(); }

bool wants_value_checks(const Tensor&) { return true; }

TorchSettings torch_settings(const Tensor&, bool /*backward*/) { return {}; }  // always deterministic, never TF32

}  // namespace flash_ext::api
