// The number of ranges of keys whose results are combined afterwards.
#pragma once

#include "draft.h"

namespace flash_ext::plan {

/// Leaves the keys in one range, as every operation except decoding does.
void keep_keys_together(Draft& draft);

void choose_decode_splits(Draft& draft);

}  // namespace flash_ext::plan
