// The decisions of each operation, once its kernel is chosen: one file each.
#pragma once

#include "draft.h"

namespace flash_ext::plan {

/// Whose packed rows are cut into tiles.
enum class PackedSide { kQueries, kKeys };

void plan_forward(Draft& draft);
void plan_backward(Draft& draft);
void plan_weights(Draft& draft);
void plan_weights_backward(Draft& draft);
void plan_decode(Draft& draft);

/// What the visibility rule asks of the inner loop.
void choose_mask_class(Draft& draft);

/// Heads with the same key head whose rows share a tile, where that saves reading keys: on a CPU, and in decoding.
void choose_head_group(Draft& draft);

/// For the reader: whether the tiles of packed sequences are listed. Launches ask lists_tiles() themselves, with the
/// tiles of the kernel that runs.
void explain_work_list(Draft& draft, PackedSide side);

}  // namespace flash_ext::plan
