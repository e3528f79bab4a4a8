// The backward for head dims above 128: what its CTAs share, as storage.cuh has it for the others.
#pragma once

#include "storage.cuh"

namespace flash_ext::sm90 {

template <class Element_, int kHeadDim_, bool kInTurns_ = false>
struct BackwardWideConfig {
  using Element = Element_;
  static constexpr bool kListsBlocks = false, kInTurns = kInTurns_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr BackwardShape kShape = backward_shape(kHeadDim);
  static constexpr int kGroups = kShape.groups;  // CTAs of a cluster
  static constexpr int kBlockM = kBackwardBlockM;
  static constexpr int kBlockN = kGroups * kWarpgroupRows;  // of a cluster
  static constexpr int kStages = 2;                         // of Q and dO
  static constexpr int kThreads = 3 * kWarpgroupThreads;
  static constexpr int kCluster = kGroups;
  static constexpr int kLoadedKeys = kWarpgroupRows;
  static constexpr int kDqHeadDim = 256;  // of the workspace: row terms are summed up by powers of two

  static constexpr int kPanels = panels(kHeadDim);
  static constexpr bool kTakesTurns = kPanels % 2 != 0;                     // who computes the middle panel of dQ
  static constexpr int kOtherPanels = kTakesTurns ? kPanels : kPanels / 2;  // of the other CTA's K
  static constexpr int kKeyBytes = tile_bytes(kWarpgroupRows, kHeadDim);    // K, V of a CTA
  static constexpr int kQueryBytes = tile_bytes(kBlockM, kHeadDim);         // a stage of Q or dO
  static constexpr int kDsBytes = panel_bytes(kBlockM);                     // P, then dS, of a CTA's keys
  static constexpr int kValuesOffset = kKeyBytes;
  static constexpr int kOtherKeysOffset = kValuesOffset + kKeyBytes;
  static constexpr int kQueriesOffset = kOtherKeysOffset + kOtherPanels * panel_bytes(kWarpgroupRows);
  static constexpr int kGradsOffset = kQueriesOffset + kStages * kQueryBytes;
  static constexpr int kDsOffset = kGradsOffset + kStages * kQueryBytes;
  static constexpr int kOtherDsOffset = kDsOffset + kDsBytes;
  static constexpr int kTilesBytes = kOtherDsOffset + kDsBytes;
  static constexpr int kTermBytes = kBlockM * 4;  // lse or D of a tile

  static_assert(kGroups == 2, "dS goes to the other block");
  static_assert(kWarpgroupRows == kPanelColumns, "dS of a block's keys is a panel");
  // What the launch allocates and the others leave; more than that, and setmaxnreg would wait for ever.
  static constexpr int kGradientRegisters = 65536 / kThreads / 8 * 8 * 3 - kShape.registers - kShape.dq_registers;
};

/// Behind the tiles in shared memory. A barrier's name says what the end of its phase means.
template <class Config>
struct BackwardWideStorage {
  static constexpr int kStages = Config::kStages;

  float lse[kStages][Config::kBlockM];  // base 2
  float minus_delta[kStages][Config::kBlockM];
  uint64_t k_full, v_full, other_k_full;
  uint64_t q_full[kStages], q_empty[kStages];    // with lse
  uint64_t do_full[kStages], do_empty[kStages];  // with minus_delta
  uint64_t p_full, ds_full, other_ds_full, ds_empty;
  uint64_t sanitised;  // Q and dO of a tile that some key is hidden from
  __align__(8) unsigned char work_tile_bytes[sizeof(BackwardWorkTile<Config>)];

  __device__ __forceinline__ BackwardWorkTile<Config>& work_tile() {
    return *reinterpret_cast<BackwardWorkTile<Config>*>(work_tile_bytes);
  }

  /// By one thread.
  __device__ __forceinline__ void init() {
    constexpr int kReaders = 2 * kWarpgroupWarps;
    for (uint64_t* full : {&k_full, &v_full, &other_k_full, &other_ds_full}) init_barrier(*full, 1);
    init_barriers(q_full, 1);
    init_barriers(q_empty, kReaders);
    init_barriers(do_full, 1);
    init_barriers(do_empty, kReaders);
    init_barrier(sanitised, kReaders);
    init_barrier(p_full, kWarpgroupWarps);
    init_barrier(ds_full, kWarpgroupWarps);
    init_barrier(ds_empty, kWarpgroupWarps * Config::kGroups);
    ptx::mbarrier_init_fence();
  }
};

}  // namespace flash_ext::sm90
