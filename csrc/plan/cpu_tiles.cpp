#include "cpu_tiles.h"

#include "lengths.h"

namespace flash_ext::plan {
namespace {

constexpr int64_t kMinBlockM = 32;
constexpr int64_t kWantedItems = 32;

void choose_products(Draft& draft) {
  if (draft.p.matrix_units) draft.take_variant("products by matrix units (AMX)");
}

}  // namespace

void choose_cpu_backward_tiles(Draft& draft) {
  choose_products(draft);
  draft.plan.block_m = kCpuMaxBlockM;
  draft.plan.block_n = kCpuBlockN;
  draft.because("tile ", kCpuMaxBlockM, " x ", kCpuBlockN, ": an item is a chunk of keys");
}

void choose_cpu_forward_tiles(Draft& draft) {
  choose_products(draft);
  Plan& plan = draft.plan;
  plan.block_m = kCpuMaxBlockM;
  plan.block_n = kCpuBlockN;
  if (draft.p.batch_invariant) {
    plan.block_m = kMinBlockM;
    draft.because("tile ", plan.block_m, " x ", plan.block_n, ": the same for every batch");
    return;
  }
  const auto work_items = [&] { return plan.num_splits * query_tiles(draft.p, plan.head_group, plan.block_m); };
  while (plan.block_m > kMinBlockM && work_items() < kWantedItems) plan.block_m /= 2;
  draft.because("tile ", plan.block_m, " x ", plan.block_n, ": ", work_items(), " work items, at least ", kWantedItems,
                " wanted");
}

}  // namespace flash_ext::plan
