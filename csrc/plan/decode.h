// Decoding as far as the kernel table and the tiles need to know it.
#pragma once

#include "problem.h"

namespace flash_ext::plan {

/// The number of queries from which decoding on CUDA may run the forward kernel.
constexpr int64_t kPrefillRows = 128;

/// Whether a call is a chunk of a prompt: so many queries that products limit it, not reading the keys.
bool is_prefill(const Problem& p);

/// Whether a forward that does not split the keys would leave SMs idle.
bool has_few_tiles(const Problem& p);

}  // namespace flash_ext::plan
