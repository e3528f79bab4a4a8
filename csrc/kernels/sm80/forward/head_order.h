// Which heads run side by side, in one place that the plan reads too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/scheduler/heads_in_l2.h"

namespace flash_ext::sm80 {

/// What the order of a call's heads depends on.
struct HeadsOfCall {
  int64_t batch, heads_q, heads_kv;
  int64_t key_bytes;     // keys and values of a key head
  bool bias_of_batches;  // bias_of_all_batches()
};

/// Sections of heads, and of batch entries: how many of them run side by side in a section, and how many sections there
/// are.
struct HeadSections {
  int64_t heads, head_sections;
  int64_t batches, batch_sections;
};

/// As many heads run side by side as have keys that stay in L2 together. Batch entries that share a bias run side by
/// side: a part of the bias that is read once then serves all of them.
constexpr HeadSections head_sections(const HeadsOfCall& call) {
  constexpr int64_t kKeyBytesInL2 = 24 << 20, kMaxGridZ = 65535;
  const int64_t key_bytes = std::max<int64_t>(1, call.key_bytes);
  const int64_t fitting_keys = std::max<int64_t>(1, kKeyBytesInL2 / key_bytes);
  const int64_t batches =
      call.bias_of_batches ? std::clamp<int64_t>(fitting_keys, 1, std::max<int64_t>(1, call.batch)) : 1;
  const int64_t batch_sections = (call.batch + batches - 1) / batches;
  const int64_t fitting = heads_in_l2(kKeyBytesInL2, key_bytes * batches, call.heads_q / call.heads_kv, call.heads_q);
  const bool few_sections = batch_sections * ((call.heads_q + fitting - 1) / fitting) <= kMaxGridZ;
  const int64_t heads = few_sections ? fitting : call.heads_q;
  return {heads, (call.heads_q + heads - 1) / heads, batches, batch_sections};
}

}  // namespace flash_ext::sm80
