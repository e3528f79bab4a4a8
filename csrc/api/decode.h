// The options of attention over a key-value cache, with or without appending to the cache.
#pragma once

#include "attention_args.h"

namespace flash_ext::api {

struct DecodeOptions {
  FLASH_EXT_DECODE_OPTION_LIST(FLASH_EXT_FIRST_MEMBER, FLASH_EXT_MEMBER)
};

}  // namespace flash_ext::api
