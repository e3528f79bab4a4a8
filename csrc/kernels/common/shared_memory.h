// What shared memory costs beside its bytes.
#pragma once

namespace flash_ext {

constexpr int kReservedSharedBytes = 1024;  // that each CTA takes more of an SM's

}  // namespace flash_ext
