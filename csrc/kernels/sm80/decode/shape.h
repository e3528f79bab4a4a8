// How the keys of a tile are divided, as far as the host decides it, in one place that the plan reads too. Lengths lie
// on the device, so each decision holds for all sequences.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash_ext::sm80 {

/// The fewest keys of a split, where splits have equal sizes. 64 keys are a tile for each warp of a CTA. Where there
/// are many tiles anyway, sequences much shorter than the capacity of the cache are not split.
constexpr int smallest_split(int64_t tiles) { return tiles < 32 ? 64 : tiles < 128 ? 256 : 1024; }

/// CTAs that share the splits of a tile. Splits of a fixed size are as many as the cache could hold, but most sequences
/// are shorter, and a CTA without keys costs a microsecond; so there are fewer CTAs than splits.
constexpr int64_t ctas_per_tile(int64_t tiles, int64_t splits) {
  constexpr int64_t kCtas = 2048;
  return std::clamp<int64_t>(kCtas / std::max<int64_t>(tiles, 1), 1, splits);
}

}  // namespace flash_ext::sm80
