// Tiles of the kernels for all CUDA GPUs.
#pragma once

#include "backward_schedule.h"
#include "draft.h"

namespace flash_ext::plan {

/// Leaves tiles to the kernel's own configuration.
void leave_tiles_to_the_kernel(Draft& draft);
void choose_sm80_decode_tiles(Draft& draft);
void choose_sm80_forward_tiles(Draft& draft);
void choose_sm80_backward_tiles(Draft& draft);
void choose_sm80_bias_memory(Draft& draft);

BackwardTiles sm80_backward_tiles(const Problem& p);

/// Rows of a tile of decoding that `group` heads share. More rows mean that keys are read less often.
int64_t sm80_decode_rows(const Problem& p, int64_t group);
/// CTAs per SM that keep its memory busy. CTAs with long or many rows have fewer warps and fewer bytes in flight.
int64_t sm80_decode_ctas_per_sm(const Problem& p, int64_t rows);

}  // namespace flash_ext::plan
