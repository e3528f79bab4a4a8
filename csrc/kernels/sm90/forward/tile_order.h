// The order of query tiles. The scheduler follows it; the plan explains it and splits the last tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/host_device.h"
#include "kernels/common/scheduler/heads_in_l2.h"
#include "kernels/sm90/common/warpgroup.h"

namespace flash_ext::sm90 {

/// For equal lengths and tiles of different cost: the head (counted over all batch entries) from which on the tiles of
/// all heads stand longest first. These tiles are about the last two waves. The result is a multiple of `head_group`
/// below the number of all heads. all_see_all: every query sees every key.
constexpr int64_t last_section(int64_t heads, int64_t head_group, int64_t tiles_of_head, int64_t ctas,
                               bool all_see_all) {
  constexpr int64_t kTailWaves = 2;
  const int64_t tail_tiles = kTailWaves * ctas;
  const int64_t tail_heads =
      all_see_all ? tail_tiles / tiles_of_head : (tail_tiles + tiles_of_head - 1) / tiles_of_head;
  return std::clamp<int64_t>(heads - tail_heads, 0, heads - 1) / head_group * head_group;
}

/// What the order of a call's heads depends on.
struct HeadsOfCall {
  int64_t heads;       // of all batch entries
  int64_t head_group;  // query heads that share a key head
  int64_t key_bytes;   // of keys and values of a key head
  int64_t seqlen_q;
  bool equal_lengths;  // of all sequences
  bool see_all;        // every query sees every key of its sequence
  bool has_options;    // bias, masks or dropout
};

struct HeadOrder {
  int64_t side_by_side;  // heads of a section
  int64_t last_section;  // first head of the last section, which has all later ones too; a multiple of the above
};

/// With equal lengths, the query tiles of one key head stand side by side. CTAs that start together then read the same
/// keys, and the load on memory is even over time. The order balances the tail wave: tiles with the most keys come
/// first or, where all queries see all keys, tiles with fewer rows come last. With other lengths, and in the variants
/// with bias, masks or dropout under a window, heads form sections whose keys fit into L2. Sections have equal sizes,
/// so that the last one is not small.
inline HeadOrder head_order(const HeadsOfCall& call, int64_t block_m, int64_t ctas) {
  const int64_t heads = call.heads, group = call.head_group;
  const int64_t fitting = heads_in_l2(kBytesInL2, call.key_bytes, group, heads);
  const int64_t sections = (heads + fitting - 1) / fitting;
  const int64_t even = ((heads + sections - 1) / sections + group - 1) / group * group;
  const bool equal_tiles = call.equal_lengths && call.see_all;
  const int64_t section = equal_tiles || (call.equal_lengths && !call.has_options) ? group : even;
  if (!call.equal_lengths || call.has_options || (equal_tiles && call.seqlen_q % block_m == 0)) {
    return {section, (heads - 1) / section * section};
  }
  const int64_t tiles_of_head = (call.seqlen_q + block_m - 1) / block_m;
  return {section, last_section(heads, section, tiles_of_head, ctas, equal_tiles)};
}

/// Returns the first query of a tile; the sequence has `tiles` tiles of block_m queries. The partial tile stands first,
/// where a causal mask leaves the fewest keys. A tile with rows for only one warpgroup would take more than half as
/// long as a tile with rows for three; in that case the second tile gives it the rows of another warpgroup.
FLASH_EXT_HOST_DEVICE int first_query_of_tile(int tile, int tiles, int seqlen_q, int block_m) {
  const int start = seqlen_q - (tiles - tile) * block_m, query = start < 0 ? 0 : start;
  const bool lends = block_m > 2 * kWarpgroupRows && tile == 1 && tiles > 1 && query <= kWarpgroupRows;
  return lends ? query + kWarpgroupRows : query;
}

}  // namespace flash_ext::sm90
