#include "plan.h"

#include <stdexcept>
#include <utility>

#include "operations.h"

namespace flash_ext::plan {
namespace {

/// Adds the reasons for the kernel of the operation.
void explain_kernel(Draft& draft) {
  if (!draft.explain) return;
  const std::string obstacle = why_not_special(draft.p, task_of(draft.p.operation), draft.kernel);
  if (!obstacle.empty()) draft.because(draft.kernel.name, ": ", obstacle);
  if (draft.kernel.reason != nullptr) draft.because(draft.kernel.reason);
}

/// Chooses the kernel that computes the gradient of bias next to the backward, if the problem has a bias.
void choose_bias_kernel(Draft& draft) {
  const Problem& p = draft.p;
  if (p.operation != Operation::kBackward || p.device == Device::kCpu || !p.has_bias) return;
  const KernelRow& row = choose_kernel(p, Task::kBiasGradient);
  draft.plan.bias_kernel = row.id;
  draft.plan.bias_reads_by_tma = row.reads_by_tma;
  if (!draft.explain) return;
  const std::string obstacle = why_not_special(p, Task::kBiasGradient, row);
  if (!obstacle.empty()) draft.because("gradient of bias: ", row.name, ", as ", obstacle);
  if (row.reason != nullptr) draft.because("gradient of bias: ", row.name, ", ", row.reason);
}

/// Chooses how the kernel of the gradient of bias runs, where the plan decides it.
void choose_bias_kernel_tiles(Draft& draft) {
  if (draft.plan.bias_kernel == KernelId::kNone) return;
  const KernelRow& row = row_of(draft.plan.bias_kernel);
  if (row.choose_tiles != nullptr) row.choose_tiles(draft);
}

/// Tells the reader which products stand for a product of float32. The kernel looks at allow_tf32 itself.
void explain_products(Draft& draft) {
  const KernelRow& kernel = draft.kernel;
  if (draft.p.dtype != DType::kFloat32 || kernel.float_products == nullptr) return;
  if (draft.p.allow_tf32 && kernel.has_tf32_setting) {
    draft.because("products in TF32, rounded to 11 bits: torch's float32 matmul setting allows it");
  } else {
    draft.because("products of ", kernel.float_products, " each, as accurate as float32",
                  kernel.has_tf32_setting ? ": torch's float32 matmul setting allows no less" : "");
  }
}

void plan_operation(Draft& draft) {
  switch (draft.p.operation) {
    case Operation::kForward:
      return plan_forward(draft);
    case Operation::kBackward:
      return plan_backward(draft);
    case Operation::kWeights:
      return plan_weights(draft);
    case Operation::kWeightsBackward:
      return plan_weights_backward(draft);
    case Operation::kDecode:
      return plan_decode(draft);
  }
}

}  // namespace

Plan make_plan(const Problem& problem, bool explain) {
  const Support support = supports(problem);
  if (!support.ok) throw std::invalid_argument(support.reason);
  const KernelRow& kernel = choose_kernel(problem, task_of(problem.operation));
  Draft draft{problem, kernel, explain, {}};
  draft.plan.kernel = kernel.id;
  draft.plan.reads_by_tma = kernel.reads_by_tma;
  choose_bias_kernel(draft);
  choose_bias_kernel_tiles(draft);
  explain_kernel(draft);
  choose_mask_class(draft);
  explain_products(draft);
  plan_operation(draft);
  return std::move(draft.plan);
}

}  // namespace flash_ext::plan
