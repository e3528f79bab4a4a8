// What the table and the tiles have to know of decoding.
#pragma once

#include "problem.h"

namespace flash_ext::plan {

/// Queries from which decoding on CUDA may go through the forward kernel.
constexpr int64_t kPrefillRows = 128;

/// Parts of prompts: so many queries that products are what costs, not reading the keys.
bool is_prefill(const Problem& p);

}  // namespace flash_ext::plan
