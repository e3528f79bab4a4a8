// An element type: a float in memory, whose products may be rounded to TF32.
#pragma once

#include "host_device.h"

namespace flash_ext {

struct Tf32 {
  float value;

  Tf32() = default;
  FLASH_EXT_HOST_DEVICE explicit Tf32(float value) : value(value) {}
  FLASH_EXT_HOST_DEVICE explicit operator float() const { return value; }
};

}  // namespace flash_ext
