// The unit that wgmma is issued by.
#pragma once

namespace flash_ext::sm90 {

constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kGroupWarps = 4;
constexpr int kGroupRows = 64;  // of one wgmma

}  // namespace flash_ext::sm90
