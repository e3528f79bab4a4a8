// Constants of an instantiation of the short backward.
#pragma once

#include "kernels/sm90/common/matrix_descriptor.h"
#include "kernels/sm90/common/warpgroup.h"
#include "shape.h"

namespace flash_ext::sm90 {

template <class Element_, int kHeadDim_, int kWarpgroups_>
struct BackwardShortConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kWarpgroups = kWarpgroups_;  // all are consumers
  static constexpr int kRows = kWarpgroups * kWarpgroupRows;
  static constexpr int kThreads = kWarpgroups * kWarpgroupThreads;
  // An SM has registers for four warpgroups of 128 registers a thread, or for two of twice as many. Some load while
  // others compute.
  static constexpr int kWarpgroupsPerSm = kHeadDim == 64 ? 4 : 2;
  static constexpr int kCtasPerSm = kWarpgroups < kWarpgroupsPerSm ? kWarpgroupsPerSm / kWarpgroups : 1;
  static constexpr int kQueriesOfStep = kHeadDim == 64 ? 32 : 64;  // of a step that adds to dK and dV

  // The panels of a block of 64 rows follow each other; a copy by TMA brings one. A single panel comes whole.
  static constexpr int kPanels = panels(kHeadDim);
  static constexpr int kBlockBytes = tile_bytes(kWarpgroupRows, kHeadDim);
  static constexpr int kRowsOfCopy = kPanels == 1 ? kRows : kWarpgroupRows;
  static constexpr int kTileBytes = kWarpgroups * kBlockBytes;
  static constexpr int kKeysOffset = 0;
  static constexpr int kValuesOffset = kTileBytes;
  static constexpr int kQueriesOffset = 2 * kTileBytes;
  static constexpr int kGradsOffset = 3 * kTileBytes;
  // Whether dS passes from the warpgroups that have the keys to those that have the queries. A block of queries has a
  // panel of it, whose rows are keys.
  static constexpr bool kExchangesDs = kHeadDim > 64;
  static constexpr int kDsOffset = 4 * kTileBytes;
  static constexpr int kDsBytes = kExchangesDs ? kWarpgroups * panel_bytes(kRows) : 0;
  static constexpr int kTilesBytes = kDsOffset + kDsBytes;

  /// Where a row of a tile begins.
  static constexpr int row_offset(int row) {
    return kPanels == 1 ? panel_bytes(row) : row / kWarpgroupRows * kBlockBytes + panel_bytes(row % kWarpgroupRows);
  }

  static_assert(kPanels == 1 || kQueriesOfStep == kWarpgroupRows, "descriptors count panels of whole blocks");
  static_assert(!kExchangesDs || kQueriesOfStep == kWarpgroupRows, "a step fills a panel of dS");
};

}  // namespace flash_ext::sm90
