// Into how many ranges keys are cut, whose results are merged afterwards.
#pragma once

#include "draft.h"

namespace flash_ext::plan {

/// Of every operation but decoding.
void keep_keys_together(Draft& draft);

void choose_decode_splits(Draft& draft);

}  // namespace flash_ext::plan
