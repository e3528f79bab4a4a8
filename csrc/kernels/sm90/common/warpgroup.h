// The warpgroup, the unit that issues wgmma.
#pragma once

namespace flash_ext::sm90 {

constexpr int kWarpgroupThreads = 128;  // a warpgroup
constexpr int kWarpgroupWarps = 4;
constexpr int kWarpgroupRows = 64;  // of one wgmma
constexpr int kRowsOfWarp = kWarpgroupRows / kWarpgroupWarps;

}  // namespace flash_ext::sm90
