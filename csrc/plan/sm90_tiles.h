// Tiles of the kernels for Hopper.
#pragma once

#include "backward_schedule.h"
#include "draft.h"

namespace flash_ext::plan {

void choose_sm90_forward_tiles(Draft& draft);
void choose_sm90_forward_short_tiles(Draft& draft);
void choose_sm90_cache_tiles(Draft& draft);
void choose_sm90_forward_f32_tiles(Draft& draft);
void choose_sm90_backward_tiles(Draft& draft);
void choose_sm90_backward_persistent_tiles(Draft& draft);
void choose_sm90_backward_options_tiles(Draft& draft);
void choose_sm90_backward_wide_tiles(Draft& draft);
void choose_sm90_backward_short_tiles(Draft& draft);
void choose_sm90_backward_f32_tiles(Draft& draft);

/// Sets the variant of a kernel that has two: one for scaled products, one for softcap, ALiBi and any scale.
void take_score_variant(Draft& draft);

BackwardTiles sm90_backward_tiles(const Problem& p);
BackwardTiles sm90_backward_persistent_tiles(const Problem& p);
BackwardTiles sm90_backward_options_tiles(const Problem& p);
BackwardTiles sm90_backward_wide_tiles(const Problem& p);
BackwardTiles sm90_backward_f32_tiles(const Problem& p);

/// Whether sm90/forward_short serves the lengths of a problem.
bool is_short_sm90_forward(const Problem& p);
/// Whether sm90/backward, whose products overlap, serves the options of a problem.
bool overlaps_sm90_backward(const Problem& p);
/// Whether the persistent kernel serves the block mask of a problem, if it has one.
bool persists_sm90_backward(const Problem& p);
/// Whether only the kernels for wide heads have these head dims.
bool has_wide_heads(const Problem& p);

}  // namespace flash_ext::plan
