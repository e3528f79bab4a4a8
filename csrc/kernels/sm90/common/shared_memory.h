// How much shared memory there is on compute capability 9.0.
#pragma once

#include "kernels/common/shared_memory.h"

namespace flash_ext::sm90 {

constexpr int kSharedBytesOfSm = 228 * 1024;
constexpr int kMaxSharedBytes = kSharedBytesOfSm - kReservedSharedBytes;  // of a CTA

}  // namespace flash_ext::sm90
