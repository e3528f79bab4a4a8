// Tiles, registers and shared memory of the float32 backward, and where the parts of Q and dO lie in memory.
#pragma once

#include "kernels/common/backward/schedule.cuh"
#include "kernels/common/backward/turns.cuh"
#include "kernels/common/backward/workspace.h"
#include "kernels/sm90/common/float_parts.cuh"
#include "shape.h"

namespace flash_ext::sm90 {

template <int kHeadDim_, bool kScoreOptions_>
struct BackwardF32Config {
  static constexpr bool kListsBlocks = false, kPersistent = false, kAnchored = false, kHasTails = false;
  static constexpr bool kZeroesDq = false;
  static constexpr TurnTaking kTurns = TurnTaking::kNever;
  static constexpr int kHeadDim = kHeadDim_;             // of q, k and v, and of the workspace
  static constexpr bool kScoreOptions = kScoreOptions_;  // softcap, ALiBi, any scale
  static constexpr int kBlockM = kBackwardF32BlockM, kBlockN = kBackwardF32BlockN;
  static constexpr int kCluster = backward_f32_ctas_of_cluster(kHeadDim);
  static constexpr int kColumns = kHeadDim / kCluster;  // of a CTA
  static constexpr int kPanels = panels(kColumns);      // of a CTA, counted from its first column
  static constexpr int kFullPanels = kColumns / kPanelColumns;
  static constexpr bool kHasHalf = kPanels > kFullPanels;  // the last panel has half of the columns
  static constexpr int kLastColumns = kHasHalf ? kPanelColumns / 2 : kPanelColumns;
  static constexpr int kThreads = 3 * kWarpgroupThreads;
  // With less than 136, ptxas makes the products of half a panel of dQ wait for each other.
  static constexpr int kRegisters = kHasHalf ? 184 : 192, kDqRegisters = kHasHalf ? 136 : 120;

  // Q and dO have two slots each, of a subtile: at head_dim 64 they hold two tiles, beyond it one.
  static constexpr int kQuerySlots = 2, kTiles = kQuerySlots / kPanels;
  static constexpr int kDsSlots = kTiles;  // of P, and then of dS
  static constexpr int kKeyBytes = kPanels * kSubtileBytes;
  static constexpr int kValuesOffset = kKeyBytes;
  static constexpr int kQueriesOffset = kValuesOffset + kKeyBytes;
  static constexpr int kGradsOffset = kQueriesOffset + kQuerySlots * kSubtileBytes;
  static constexpr int kDsOffset = kGradsOffset + kQuerySlots * kSubtileBytes;
  // After dS: room for the rest of the other CTA's halves of S and dP, which the slot of dS does not hold.
  static constexpr int kHalvesBytes = kCluster > 1 ? kPartBytes : 0;
  static constexpr int kTilesBytes = kDsOffset + kDsSlots * kSubtileBytes + kHalvesBytes;
  static constexpr int kTermBytes = kBlockM * 4;  // lse or D of a tile

  static_assert(kBlockM == kSubtileRows && kBlockN == kSubtileRows && kTiles * kPanels == kQuerySlots);
  static_assert(kCluster == 1 || kDsSlots == 1);
  static_assert(!kHasHalf || kColumns % kPanelColumns == kPanelColumns / 2);
  static_assert(2 * kRegisters + kDqRegisters <= 65536 / kThreads / 8 * 8 * 3,
                "no more registers than the launch allocates, else setmaxnreg waits for ever");
};

/// Scratch memory: the workspace of all backwards, and Q and dO as subtiles, in the order of its tiles.
struct BackwardF32Workspace {
  BackwardWorkspace rows;
  char *queries, *grads;
  int64_t bytes;

  BackwardF32Workspace(const BackwardParams& p, void* memory)
      : rows(p, kBackwardF32BlockM, kBackwardF32BlockN, backward_f32_head_dim(p.head_dim, p.head_dim_v), memory) {
    const int64_t size = p.heads_q * rows.tiles_per_head * tile_bytes_of(p);
    queries = static_cast<char*>(memory) + rows.bytes;
    grads = queries + size;
    bytes = rows.bytes + 2 * size;
  }

 private:
  static int64_t tile_bytes_of(const BackwardParams& p) {
    const int head_dim = backward_f32_head_dim(p.head_dim, p.head_dim_v);
    return int64_t{backward_f32_ctas_of_cluster(head_dim)} * panels(head_dim / backward_f32_ctas_of_cluster(head_dim)) *
           kSubtileBytes;
  }
};

/// Returns the schedule. Its memory lies after the workspace.
inline BackwardSchedule backward_f32_schedule(const BackwardParams& p, const BackwardF32Workspace& workspace,
                                              void* memory) {
  return BackwardSchedule(p, kBackwardF32BlockN, backward_f32_head_dim(p.head_dim, p.head_dim_v), false,
                          static_cast<char*>(memory) + workspace.bytes);
}

}  // namespace flash_ext::sm90
