#include "operations.h"

namespace flash_ext::plan {
namespace {

/// With lengths known to the host, a limit that hides nothing is no limit: one query over a cache is not causal.
bool limits_left(const Problem& p) {
  if (p.window_left < 0) return false;
  const int64_t last_row = p.top_left ? p.seqlen_q - 1 : p.seqlen_k - 1;
  return p.varlen || p.window_left < last_row;
}

bool limits_right(const Problem& p) {
  if (p.window_right < 0) return false;
  const int64_t first_row = p.top_left ? 0 : p.seqlen_k - p.seqlen_q;
  return p.varlen || p.window_right < p.seqlen_k - 1 - first_row;
}

}  // namespace

void choose_mask_class(Draft& draft) {
  const Problem& p = draft.p;
  const bool left = limits_left(p), right = limits_right(p);
  const bool window = left || (right && p.window_right > 0);
  if (window || p.has_mask || p.has_block_mask) {
    draft.plan.mask_class = MaskClass::kGeneral;
    draft.because("mask class general, neither full nor causal:",
                  window ? text(" sliding window (", p.window_left, ", ", p.window_right, ")") : "",
                  p.has_mask ? " mask" : "", p.has_block_mask ? " block mask" : "");
  } else if (right) {
    draft.plan.mask_class = MaskClass::kCausal;
    draft.because("mask class causal: no key to the right of the diagonal, no other limit");
  } else if (p.window_left >= 0 || p.window_right >= 0) {
    draft.because("mask class full: at these lengths the window hides no key");
  } else {
    draft.because("mask class full: no window and no mask");
  }
}

}  // namespace flash_ext::plan
