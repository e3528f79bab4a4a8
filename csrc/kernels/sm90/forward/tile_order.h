// The part of the order of query tiles that the scheduler and the plan, which splits the last tiles, share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/host_device.h"
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

/// The first query of a tile of block_m queries, of `tiles` of a sequence. The partial tile stands first, where a
/// causal mask leaves the fewest keys. A tile with rows for only one warpgroup would take more than half as long as one
/// with three; in that case the second tile gives it the rows of another warpgroup.
FLASH_EXT_HOST_DEVICE int first_query_of_tile(int tile, int tiles, int seqlen_q, int block_m) {
  const int behind = seqlen_q - (tiles - tile) * block_m, query = behind < 0 ? 0 : behind;
  const bool lends = block_m > 2 * kWarpgroupRows && tile == 1 && tiles > 1 && query <= kWarpgroupRows;
  return lends ? query + kWarpgroupRows : query;
}

}  // namespace flash_ext::sm90
