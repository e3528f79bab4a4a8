// Decoding as far as the kernel table and the tiles need to know it.
#pragma once

#include "problem.h"

namespace flash_ext::plan {

/// The number of queries from which decoding on CUDA may run the forward kernel.
constexpr int64_t kPrefillRows = 128;

/// Whether a sequence has so few queries that reading the keys limits the call, not the products. A chunk of a prompt
/// has more.
bool has_few_queries(const Problem& p);

/// Whether a forward that does not split the keys would leave SMs idle.
bool has_few_tiles(const Problem& p);

}  // namespace flash_ext::plan
