// The shared memory that a CTA takes in addition to what it asks for.
#pragma once

namespace flash_ext {

constexpr int kReservedSharedBytes = 1024;  // of an SM, for each CTA, beside what the CTA asks for

}  // namespace flash_ext
