// What differs between the devices before a kernel is launched. Each library brings the implementation of its own.
#pragma once

#include "checks.h"
#include "plan/plan.h"

namespace flash_ext::api {

/// Fills in the device of a problem: what it is and how many can work at the same time.
void describe_device(const Tensor& q, plan::Problem& problem);

/// The longest packed sequence as far as the host can know it: the values of cu_seqlens on a CPU, else the bound.
int64_t longest_sequence(const Tensor& cu_seqlens, int64_t bound);

/// Bytes that the rows of q, k, v and their like must be aligned to.
int64_t row_alignment();

/// Whether lengths, pages and block lists are to be read and checked: always on a CPU, on CUDA with FLASH_EXT_CHECK=1.
bool wants_value_checks(const Tensor& q);

/// Settings of torch that an operator receives as arguments, and a kernel of aten's has to ask for.
struct TorchSettings {
  bool deterministic = false;  // torch.use_deterministic_algorithms
  bool allow_tf32 = false;     // torch.backends.cuda.matmul.fp32_precision
};

/// Those that matter to this device and dtype in the forward or the backward; the others are false.
TorchSettings torch_settings(const Tensor& q, bool backward);

}  // namespace flash_ext::api
