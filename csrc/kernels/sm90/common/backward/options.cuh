// Which options a call of the backward has.
#pragma once

#include <iterator>
#include <type_traits>

#include "kernels/common/backward/options.cuh"
#include "kernels/common/score/bias_tile.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"
#include "kernels/sm90/common/backward/variant.h"

namespace flash_ext::sm90 {

/// Whether the mask is a key-padding mask, which acts as a per-key bias of 0 and -inf. Other masks are of pairs.
inline bool masks_keys(const AttentionParams& p) { return same_for_all_queries(p.mask) && !p.blocks.offsets; }
inline bool masks_pairs(const AttentionParams& p) { return (p.mask.data || p.blocks.offsets) && !masks_keys(p); }

inline bool has_options(const BackwardParams& p) {
  return p.softcap > 0 || p.alibi_slopes || hides_pairs(p) || p.dropout.rule.threshold > 0;
}

/// Calls run(std::integral_constant<int, options()>) for the variant of the table that is for these options. kHasAny:
/// or for kAnyOptions, if the table has none.
template <const auto& kVariants, bool kHasAny = false, size_t kIndex = 0, class Run>
void with_options_of(int options, Run run) {
  if constexpr (kIndex < std::size(kVariants)) {
    if (options == kVariants[kIndex]) return run(std::integral_constant<int, kVariants[kIndex]>());
    with_options_of<kVariants, kHasAny, kIndex + 1>(options, run);
  } else if constexpr (kHasAny) {
    run(std::integral_constant<int, kAnyOptions>());
  } else {
    fail("no variant of the backward is for these options");
  }
}

inline BackwardAsked asked_of(const BackwardParams& p) {
  const bool bias_of_keys = same_for_all_queries(p.bias);
  return {p.softcap > 0,
          p.alibi_slopes != nullptr,
          p.dropout.rule.threshold > 0,
          p.bias.data != nullptr,
          bias_of_keys,
          masks_keys(p),
          masks_pairs(p),
          p.bias.data && !bias_of_keys && can_stage_bias(p.bias) && p.bias.dtype != DType::kFloat32,
          p.bias.dtype == p.dtype,
          p.softcap > kLargestSoftcapAlone};
}

}  // namespace flash_ext::sm90
