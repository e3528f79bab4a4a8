// What differs between devices before a kernel is launched. Each library implements these functions for its device.
#pragma once

#include "checks.h"
#include "plan/plan.h"

namespace flash_ext::api {

/// Fills in the fields of a problem that describe the device.
void describe_device(const Tensor& q, plan::Problem& problem);

/// The length of the longest packed sequence: on a CPU from the values of cu_seqlens, otherwise `bound`.
int64_t longest_sequence(const Tensor& cu_seqlens, int64_t bound);

/// The alignment in bytes that kernels require of rows of q, k, v, out and gradients.
int64_t row_alignment();

/// Checks a dtype for operators that the plan does not know: float64 is for CPUs alone.
void check_dtype(const Argument& argument);

/// Whether values of lengths, pages and block lists are read and checked: always on a CPU, on CUDA with
/// FLASH_EXT_CHECK=1.
bool wants_value_checks(const Tensor& q);

/// Settings of torch. Operators of this library get them as arguments; overrides of aten's operators must ask for them.
struct TorchSettings {
  bool deterministic = false;  // torch.use_deterministic_algorithms
  bool allow_tf32 = false;     // torch.backends.cuda.matmul.fp32_precision
};

/// The settings that matter to this device and dtype in the forward or the backward; others are false.
TorchSettings torch_settings(const Tensor& q, bool backward);

}  // namespace flash_ext::api
