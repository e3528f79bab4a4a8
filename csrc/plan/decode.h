// Decoding as far as the kernel table and the tiles need to know it.
#pragma once

#include "problem.h"

namespace flash_ext::plan {

/// The number of queries from which decoding on CUDA may run the forward kernel.
constexpr int64_t kPrefillRows = 128;

/// Whether a call is no chunk of a prompt: so few queries a sequence that reading the keys limits it, not products.
bool has_few_queries(const Problem& p);

/// Whether a forward that does not split the keys would leave SMs idle.
bool has_few_tiles(const Problem& p);

}  // namespace flash_ext::plan
