// Tiles of the kernels for all CUDA GPUs.
#pragma once

#include "backward_schedule.h"
#include "draft.h"

namespace flash_ext::plan {

/// The kernel's own configuration decides, which knows the shared memory.
void leave_tiles_to_the_kernel(Draft& draft);
void choose_sm80_decode_tiles(Draft& draft);
void choose_sm80_forward_tiles(Draft& draft);
void choose_sm80_backward_tiles(Draft& draft);

BackwardTiles sm80_backward_tiles(const Problem& p);

/// Rows of a tile of decoding, `group` heads of which share one: more rows read the keys less often.
int64_t sm80_decode_rows(const Problem& p, int64_t group);
/// CTAs that keep the memory of an SM busy: they have fewer warps, and less under way, where rows are long or many.
int64_t sm80_decode_ctas_per_sm(const Problem& p, int64_t rows);

}  // namespace flash_ext::plan
