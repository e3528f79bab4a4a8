#include "plan.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>

namespace flash_ext::plan {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kHeadDimStep = 8;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_backward(const Problem& p) {
  return p.operation == Operation::kBackward || p.operation == Operation::kWeightsBackward;
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  ((out << parts), ...);
  return out.str();
}

template <class... Parts>
Support refuse(const Parts&... parts) {
  return {false, text(parts...)};
}

// ---- What is supported ----------------------------------------------------------------------------------------------

Support check_sizes(const Problem& p) {
  const struct {
    const char* name;
    int64_t value;
  } sizes[] = {{"batch", p.batch}, {"seqlen_q", p.seqlen_q}, {"seqlen_k", p.seqlen_k}};
  for (const auto& size : sizes) {
    if (size.value < 0) return refuse(size.name, " must be >= 0, got ", size.value);
  }
  if (p.heads_q < 1 || p.heads_kv < 1) {
    return refuse("heads must be >= 1, got ", p.heads_q, " heads in q and ", p.heads_kv, " in k and v");
  }
  if (p.heads_q % p.heads_kv != 0) {
    return refuse("the heads of k and v must divide those of q: got ", p.heads_q, " heads in q and ", p.heads_kv,
                  " in k and v");
  }
  const struct {
    const char* name;
    int64_t value;
  } dims[] = {{"head_dim of q and k", p.head_dim}, {"head_dim of v", p.head_dim_v}};
  for (const auto& dim : dims) {
    if (dim.value < kHeadDimStep || dim.value > kMaxHeadDim || dim.value % kHeadDimStep != 0) {
      return refuse(dim.name, " must be a multiple of ", kHeadDimStep, " from ", kHeadDimStep, " to ", kMaxHeadDim,
                    ", got ", dim.value);
    }
  }
  return {};
}

Support check_options(const Problem& p) {
  if (!std::isfinite(p.softmax_scale)) return refuse("softmax_scale must be finite, got ", p.softmax_scale);
  if (!std::isfinite(p.softcap) || p.softcap < 0) {
    return refuse("softcap must be finite and >= 0 (0 = off), got ", p.softcap);
  }
  if (!(p.dropout_p >= 0 && p.dropout_p <= 1)) return refuse("dropout_p must be in [0, 1], got ", p.dropout_p);
  if (p.window_left < -1)
    return refuse("window_left (window_size[0]) must be >= -1 (-1 = unlimited), got ", p.window_left);
  if (p.window_right < -1)
    return refuse("window_right (window_size[1]) must be >= -1 (-1 = unlimited), got ", p.window_right);
  if (p.num_splits < 0) return refuse("num_splits must be >= 0 (0 = the library decides), got ", p.num_splits);
  if (p.batch_invariant && p.num_splits > 1) {
    return refuse("batch_invariant=True fixes how keys are split: num_splits must be 0 or 1, got ", p.num_splits);
  }
  return {};
}

Support check_device(const Problem& p) {
  if (p.num_workers < 1) return refuse("num_workers must be >= 1, got ", p.num_workers);
  if (p.device == Device::kCpu) return {};
  if (p.dtype == DType::kFloat64) return refuse("float64 is supported on CPU only");
  return refuse("attention has no CUDA kernel yet: move the tensors to the CPU");
}

// ---- How it runs ----------------------------------------------------------------------------------------------------

/// With lengths known to the host, a limit that cuts off nothing is no limit: one query over a cache is not causal.
bool limits_left(const Problem& p) {
  if (p.window_left < 0) return false;
  const int64_t last_row = p.top_left ? p.seqlen_q - 1 : p.seqlen_k - 1;
  return p.varlen || last_row - p.window_left > 0;
}

bool limits_right(const Problem& p) {
  if (p.window_right < 0) return false;
  const int64_t first_row = p.top_left ? 0 : p.seqlen_k - p.seqlen_q;
  return p.varlen || first_row + p.window_right < p.seqlen_k - 1;
}

void choose_mask_class(const Problem& p, Plan& plan) {
  const bool left = limits_left(p), right = limits_right(p);
  if (p.has_mask || p.has_block_mask || left || (right && p.window_right > 0)) {
    plan.mask_class = MaskClass::kGeneral;
    std::string why;
    if (left || (right && p.window_right > 0)) why += text(", window (", p.window_left, ", ", p.window_right, ")");
    if (p.has_mask) why += ", mask";
    if (p.has_block_mask) why += ", block mask";
    plan.reasons.push_back("mask class general: " + why.substr(2));
  } else if (right) {
    plan.mask_class = MaskClass::kCausal;
    plan.reasons.push_back("mask class causal: no key to the right of the diagonal, no other limit");
  } else if (p.window_left >= 0 || p.window_right >= 0) {
    plan.reasons.push_back("mask class full: at these lengths the window hides no key");
  } else {
    plan.reasons.push_back("mask class full: no window and no mask");
  }
}

const char* kernel_of(Operation operation) {
  switch (operation) {
    case Operation::kForward:
      return "cpu/forward";
    case Operation::kDecode:
      return "cpu/forward";
    case Operation::kWeights:
      return "cpu/weights";
    case Operation::kBackward:
    case Operation::kWeightsBackward:
      return "cpu/backward";
  }
  return "";
}

/// Tiles of the CPU kernels. Keys: K and V tiles of head_dim 64 and a panel of scores fit the L1 cache. Rows: as many
/// as the kernels hold, so that a tile of keys is loaded for many of them.
constexpr int64_t kCpuBlockN = 64;
constexpr int64_t kCpuMaxBlockM = 128;

/// Queries and heads that are worked on together, where that saves reading keys.
void choose_head_group(const Problem& p, Plan& plan) {
  constexpr int64_t kFewQueries = 64;
  const bool forward = p.operation == Operation::kForward || p.operation == Operation::kDecode;
  const bool together =
      forward && p.heads_q > p.heads_kv && p.seqlen_q <= kFewQueries && !p.has_block_mask && !(p.dropout_p > 0);
  if (!together) return;
  plan.head_group = p.heads_q / p.heads_kv;
  plan.reasons.push_back(
      text(plan.head_group, " heads share a tile: with ", p.seqlen_q, " queries, reading the keys is what costs"));
}

int64_t query_tiles(const Problem& p, const Plan& plan, int64_t block_m) {
  return p.batch * (p.heads_q / plan.head_group) * ceil_div(p.seqlen_q * plan.head_group, block_m);
}

void choose_splits(const Problem& p, Plan& plan) {
  if (p.operation != Operation::kDecode) {
    plan.reasons.push_back("1 split: the result does not depend on the number of threads");
    return;
  }
  if (p.batch_invariant) {
    plan.split_size = kBatchInvariantSplitSize;
    plan.num_splits = std::max<int64_t>(1, ceil_div(p.seqlen_k, plan.split_size));
    plan.reasons.push_back(
        text("split every ", plan.split_size, " keys: batch_invariant, so nothing but the sequence itself decides"));
  } else if (p.num_splits > 0) {
    const int64_t most = std::clamp<int64_t>(ceil_div(p.seqlen_k, kCpuBlockN), 1, kMaxSplits);
    plan.num_splits = std::min(p.num_splits, most);
    plan.reasons.push_back(text(plan.num_splits, " splits: num_splits = ", p.num_splits, ", at most ", most, " for ",
                                p.seqlen_k, " keys in tiles of ", kCpuBlockN));
  } else {
    const int64_t work_items = query_tiles(p, plan, kCpuMaxBlockM);
    plan.num_splits = choose_num_splits(work_items, p.num_workers, p.seqlen_k);
    plan.reasons.push_back(text(plan.num_splits, " splits: ", work_items, " tiles of (batch, head, query) for ",
                                p.num_workers, " workers, ", p.seqlen_k, " keys"));
  }
}

void choose_tiles(const Problem& p, Plan& plan) {
  constexpr int64_t kWantedItems = 32;
  constexpr int64_t kMinBlockM = 32;
  plan.block_n = kCpuBlockN;
  plan.block_m = kCpuMaxBlockM;
  const auto because = [&](const std::string& why) {
    plan.reasons.push_back(text("tile ", plan.block_m, " x ", plan.block_n, ": ", why));
  };
  if (is_backward(p)) return because("work is cut along the keys");
  if (p.batch_invariant) {
    plan.block_m = kMinBlockM;
    return because("the same for every batch");
  }
  while (plan.block_m > kMinBlockM && plan.num_splits * query_tiles(p, plan, plan.block_m) < kWantedItems) {
    plan.block_m /= 2;
  }
  because(
      text(plan.num_splits * query_tiles(p, plan, plan.block_m), " work items, at least ", kWantedItems, " wanted"));
}

void choose_chunks(const Problem& p, Plan& plan) {
  constexpr int64_t kChunkKeys = 512;  // enough work to pay for one more partial dq
  constexpr int64_t kWorkItems = 16;   // wanted in all, to keep a few threads busy at the end as well
  if (p.operation == Operation::kWeightsBackward) {
    plan.reasons.push_back("1 key chunk per head: dlse of a query sums over all its keys");
  } else if (p.operation == Operation::kBackward) {
    const int64_t heads = std::max<int64_t>(1, p.batch * p.heads_kv);
    plan.num_chunks = std::max<int64_t>(1, std::min(ceil_div(p.seqlen_k, kChunkKeys), ceil_div(kWorkItems, heads)));
    plan.reasons.push_back(text(plan.num_chunks, " key chunks per head: ", heads, " pairs of batch and head, ",
                                p.seqlen_k, " keys; shapes alone decide, so results do not depend on the threads"));
  }
}

}  // namespace

Support supports(const Problem& problem) {
  for (const auto rule : {check_sizes, check_options, check_device}) {
    const Support support = rule(problem);
    if (!support.ok) return support;
  }
  return {};
}

int64_t choose_num_splits(int64_t work_items, int64_t num_workers, int64_t seqlen_k) {
  const int64_t to_fill = ceil_div(num_workers, std::max<int64_t>(1, work_items));
  const int64_t worthwhile = seqlen_k / kMinSplitSize;
  return std::clamp<int64_t>(std::min(to_fill, worthwhile), 1, kMaxSplits);
}

Plan make_plan(const Problem& problem) {
  const Support support = supports(problem);
  if (!support.ok) throw std::invalid_argument(support.reason);
  Plan plan;
  plan.kernel = kernel_of(problem.operation);
  choose_mask_class(problem, plan);
  choose_head_group(problem, plan);
  choose_splits(problem, plan);
  choose_tiles(problem, plan);
  choose_chunks(problem, plan);
  return plan;
}

}  // namespace flash_ext::plan
