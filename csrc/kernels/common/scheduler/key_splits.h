// How query tiles of the forward are split along their keys over CTAs: the plan's choice (csrc/plan/key_splits.h).
#pragma once

#include <cstdint>

namespace flash_ext {

/// Each of `tiles` query tiles is split into short_splits of its first keys and long_splits of the others.
struct KeySplits {
  static constexpr int32_t kWholeShare = 1 << 16;

  int64_t first_tile = 0;     // in the order of query tiles; tiles before it are not split
  int32_t tiles = 0;          // query tiles that are split; 0: none
  int32_t unsplit_after = 0;  // tiles after these, which are not split
  int32_t long_splits = 0;
  int32_t short_splits = 0;
  int32_t short_share = 0;  // of kWholeShare: the keys of a short split; long ones share the rest

  constexpr int32_t per_tile() const { return long_splits + short_splits; }
  /// How many positions the splits add to the order.
  constexpr int64_t more_positions() const { return tiles > 0 ? int64_t{tiles} * (per_tile() - 1) : 0; }
};

}  // namespace flash_ext
