// The number of ranges of keys whose results are combined afterwards.
#pragma once

#include "draft.h"

namespace flash_ext::plan {

/// One range: for every operation except decoding.
void keep_keys_together(Draft& draft);

void choose_decode_splits(Draft& draft);

}  // namespace flash_ext::plan
