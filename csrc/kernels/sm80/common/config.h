// What the kernels of this folder are instantiated for.
#pragma once

namespace flash_ext::sm80 {

/// Shared memory that a CTA can have on every GPU since Ampere: 99 KB on those of the RTX line.
constexpr int kSmallestSharedBytes = 99 * 1024;

}  // namespace flash_ext::sm80
