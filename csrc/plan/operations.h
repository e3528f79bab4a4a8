// The decisions of each operation after its kernel is chosen; each is defined in a file of its own.
#pragma once

#include <string>

#include "draft.h"

namespace flash_ext::plan {

/// The side whose packed rows form the tiles.
enum class PackedSide { kQueries, kKeys };

void plan_forward(Draft& draft);
void plan_backward(Draft& draft);
void plan_weights(Draft& draft);
void plan_weights_backward(Draft& draft);
void plan_decode(Draft& draft);

/// Sets Plan::mask_class.
void choose_mask_class(Draft& draft);

/// Whether decoding on a GPU runs the kernel of the forward, as for a chunk of a prompt.
bool runs_forward(const Draft& draft);

/// Sets Plan::head_group: heads of a key head share a tile where that saves reading keys, on a CPU and in decoding.
void choose_head_group(Draft& draft);

/// Whether the query tiles of packed sequences are listed on the device, which orders them.
bool lists_query_tiles(const Draft& draft);

/// Says in which order the forward takes query tiles: `heads` of `all_heads` side by side.
void explain_sections(Draft& draft, int64_t heads, int64_t all_heads, const std::string& more = "");

/// Adds a reason that says whether the tiles of packed sequences are listed. The launch itself asks lists_tiles(), with
/// the tiles of the kernel that runs.
void explain_work_list(Draft& draft, PackedSide side);

}  // namespace flash_ext::plan
