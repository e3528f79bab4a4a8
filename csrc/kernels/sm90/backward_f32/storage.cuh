// What a CTA of the float32 backward has in shared memory, and where the parts of Q and dO lie in memory.
#pragma once

#include "kernels/common/backward/split_sums.cuh"
#include "kernels/ptx/bulk.h"
#include "kernels/ptx/cluster.h"
#include "kernels/sm90/backward/storage.cuh"
#include "kernels/sm90/common/float_parts.cuh"
#include "shape.h"

namespace flash_ext::sm90 {

template <int kHeadDim_, bool kOptions_>
struct BackwardF32Config {
  static constexpr bool kListsBlocks = false;
  static constexpr TurnTaking kTurns = TurnTaking::kNever;
  static constexpr int kHeadDim = kHeadDim_;        // of q, k and v, and of the workspace
  static constexpr bool kScoreOptions = kOptions_;  // softcap, ALiBi, any scale
  static constexpr int kBlockM = kBackwardF32BlockM, kBlockN = kBackwardF32BlockN;
  static constexpr int kGroups = 1;  // of keys
  static constexpr int kCluster = backward_f32_blocks(kHeadDim);
  static constexpr int kColumns = kHeadDim / kCluster;  // of a CTA
  static constexpr int kPanels = panels(kColumns);      // of a CTA, counted from its first column
  static constexpr int kFullPanels = kColumns / kPanelColumns;
  static constexpr bool kHasHalf = kPanels > kFullPanels;  // the last panel has half of the columns
  static constexpr int kLastColumns = kHasHalf ? kPanelColumns / 2 : kPanelColumns;
  static constexpr int kThreads = 3 * kWarpgroupThreads;
  // With less than 136, ptxas has the products of half a panel of dQ wait for each other.
  static constexpr int kRegisters = kHasHalf ? 184 : 192, kDqRegisters = kHasHalf ? 136 : 120;

  // Q and dO have two places of a piece each: those of one tile at head_dim 128, of two at 64.
  static constexpr int kQuerySlots = 2, kTiles = kQuerySlots / kPanels;
  static constexpr int kDsSlots = kTiles;  // of P, and then of dS
  static constexpr int kKeyBytes = kPanels * kPieceBytes;
  static constexpr int kValuesOffset = kKeyBytes;
  static constexpr int kQueriesOffset = kValuesOffset + kKeyBytes;
  static constexpr int kGradsOffset = kQueriesOffset + kQuerySlots * kPieceBytes;
  static constexpr int kDsOffset = kGradsOffset + kQuerySlots * kPieceBytes;
  // Behind dS: what its slot does not hold of the other CTA's halves of S and dP.
  static constexpr int kHalvesBytes = kCluster > 1 ? kPartBytes : 0;
  static constexpr int kTilesBytes = kDsOffset + kDsSlots * kPieceBytes + kHalvesBytes;
  static constexpr int kTermBytes = kBlockM * 4;  // lse or D of a tile

  static_assert(kBlockM == kPieceRows && kBlockN == kPieceRows && kTiles * kPanels == kQuerySlots);
  static_assert(kCluster == 1 || kDsSlots == 1);
  static_assert(!kHasHalf || kColumns % kPanelColumns == kPanelColumns / 2);
  static_assert(2 * kRegisters + kDqRegisters <= 65536 / kThreads / 8 * 8 * 3,
                "no more registers than the launch allocates, else setmaxnreg waits for ever");
};

/// Scratch memory: that of all backwards, and Q and dO as pieces, in the order of its tiles.
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
    return int64_t{backward_f32_blocks(head_dim)} * panels(head_dim / backward_f32_blocks(head_dim)) * kPieceBytes;
  }
};

/// Behind the workspace in the same memory.
inline BackwardSchedule backward_f32_schedule(const BackwardParams& p, const BackwardF32Workspace& workspace,
                                              void* memory) {
  return BackwardSchedule(p, kBackwardF32BlockN, backward_f32_head_dim(p.head_dim, p.head_dim_v), false,
                          static_cast<char*>(memory) + workspace.bytes);
}

/// Barriers of the halves of S and dP that the CTAs of a cluster exchange: none for one CTA.
template <int kCluster>
struct BackwardF32Exchange {
  __device__ __forceinline__ void init() {}
};

template <>
struct BackwardF32Exchange<2> {
  uint64_t s_half_full[kWarpgroupWarps], dp_half_full[kWarpgroupWarps];  // of a warp, here
  uint64_t other_empty;                                                  // the slots for halves in the other CTA

  __device__ __forceinline__ void init() {
    init_barriers(s_half_full, 1);
    init_barriers(dp_half_full, 1);
    init_barrier(other_empty, kWarpgroupWarps);
  }
};

/// Behind the pieces in shared memory. A barrier's name says what the end of its phase means.
template <class Config>
struct BackwardF32Storage : BackwardF32Exchange<Config::kCluster> {
  static constexpr int kQuerySlots = Config::kQuerySlots, kDsSlots = Config::kDsSlots;
  using WorkTile = BackwardWorkTile<Config>;

  __align__(16) float lse[Config::kTiles][Config::kBlockM];  // brought by copies of 16 bytes
  float minus_delta[Config::kTiles][Config::kBlockM];
  uint64_t q_full[kQuerySlots], q_empty[kQuerySlots];  // the first panel's: with lse and minus_delta
  uint64_t do_full[kQuerySlots], do_empty[kQuerySlots];
  uint64_t p_full[kDsSlots], ds_full[kDsSlots], ds_empty[kDsSlots];
  WorkTile work_tile;

  /// By one thread.
  __device__ __forceinline__ void init() {
    init_barriers(q_full, 1);
    init_barriers(q_empty, kWarpgroupWarps);
    init_barriers(do_full, 1);
    init_barriers(do_empty, 2 * kWarpgroupWarps);
    init_barriers(p_full, kWarpgroupWarps);
    init_barriers(ds_full, kWarpgroupWarps);
    init_barriers(ds_empty, kWarpgroupWarps);
    BackwardF32Exchange<Config::kCluster>::init();
    ptx::mbarrier_init_fence();
  }
};

/// Barriers of one warpgroup each. 0 is __syncthreads().
enum BackwardF32Barrier : int { kValuesBarrier = 1, kGradientsBarrier = 2 };

/// Where a warp is: steps so far, and the barriers' phases that belong to this one.
template <class Config>
struct BackwardF32Position {
  uint32_t count = 0;

  __device__ __forceinline__ void advance() { ++count; }
  __device__ __forceinline__ uint32_t tile() const { return count % Config::kTiles; }
  __device__ __forceinline__ uint32_t slot(int panel) const { return tile() * Config::kPanels + panel; }
  __device__ __forceinline__ uint32_t parity() const { return count / Config::kTiles % 2; }
};

/// dV or dK of a CTA's columns.
template <int kFullPanels, bool kHasHalf>
struct ColumnSums {
  float full_panels[kFullPanels][8][4];

  /// Of columns [8 n, + 8).
  __device__ __forceinline__ const float (&eight(int n) const)[4] { return full_panels[n / 8][n % 8]; }
};

template <int kFullPanels>
struct ColumnSums<kFullPanels, true> {
  float full_panels[kFullPanels][8][4];
  float half[4][4];

  __device__ __forceinline__ const float (&eight(int n) const)[4] {
    return n / 8 < kFullPanels ? full_panels[n / 8][n % 8] : half[n % 4];
  }
};

/// One warp of the CTA.
template <class Config>
class BackwardF32Warp {
 public:
  using Storage = BackwardF32Storage<Config>;

  __device__ __forceinline__ BackwardF32Warp(const BackwardParams& p, const BackwardF32Workspace& workspace,
                                             Storage& storage, uint32_t s_tiles, int warp, int lane)
      : p_(p),
        workspace_(workspace),
        storage_(storage),
        work_tile_(storage.work_tile),
        s_tiles_(s_tiles),
        warp_(warp % kWarpgroupWarps),
        lane_(lane) {}

 protected:
  using Step = BackwardStep;
  using Sums = ColumnSums<Config::kFullPanels, Config::kHasHalf>;
  static constexpr int kPanels = Config::kPanels, kBlockM = Config::kBlockM;

  /// Of the CTA in its cluster.
  __device__ __forceinline__ static int rank() {
    return Config::kCluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
  }
  /// The same place in the other CTA.
  __device__ __forceinline__ uint32_t in_other(uint32_t s_slot) const {
    return ptx::cluster_address(s_slot, static_cast<uint32_t>(rank() ^ 1));
  }

  __device__ __forceinline__ void release(const uint64_t& barrier) const { arrive_as_warp(barrier, lane_); }

  /// The lower half of the descriptor of a piece.
  __device__ __forceinline__ uint32_t piece(int offset, int index) const {
    return PieceDescriptor::lower_half(without_rank<Config>(s_tiles_) + offset) + index * (kPieceBytes / 16);
  }
  __device__ __forceinline__ uint32_t key_piece(int panel) const { return piece(0, panel); }
  __device__ __forceinline__ uint32_t value_piece(int panel) const { return piece(Config::kValuesOffset, panel); }
  __device__ __forceinline__ uint32_t query_piece(int panel) const {
    return piece(Config::kQueriesOffset, at_.slot(panel));
  }
  __device__ __forceinline__ uint32_t grad_piece(int panel) const {
    return piece(Config::kGradsOffset, at_.slot(panel));
  }
  __device__ __forceinline__ uint32_t s_ds() const { return s_tiles_ + Config::kDsOffset + at_.tile() * kPieceBytes; }

  __device__ __forceinline__ void wait_for_query(int panel) const {
    wait_for(storage_.q_full[at_.slot(panel)], at_.parity());
  }
  __device__ __forceinline__ void wait_for_grad(int panel) const {
    wait_for(storage_.do_full[at_.slot(panel)], at_.parity());
  }

  __device__ __forceinline__ int64_t workspace_tile(const Step& step) const {
    return work_tile_.workspace_tile + step.head * workspace_.rows.tiles_per_head + step.tile;
  }

  /// The step whose tile takes the places of this one's.
  __device__ __forceinline__ Step step_after(Step step) const {
    for (int k = 0; k < Config::kTiles; ++k) work_tile_.advance(step);
    return step;
  }

  /// A piece of Q, with lse and D beside the first one. By one thread.
  __device__ __forceinline__ void load_query(const Step& step, int panel) const {
    const uint64_t& full = storage_.q_full[at_.slot(panel)];
    const int64_t tile = workspace_tile(step);
    ptx::mbarrier_arrive_expect(address(full), kPieceBytes + (panel == 0 ? 2 * Config::kTermBytes : 0));
    load_piece(Config::kQueriesOffset, workspace_.queries, tile, panel, full);
    if (panel != 0) return;
    load_terms(storage_.lse[at_.tile()], workspace_.rows.lse, tile, full);
    load_terms(storage_.minus_delta[at_.tile()], workspace_.rows.minus_delta, tile, full);
  }
  /// A piece of dO. By one thread.
  __device__ __forceinline__ void load_grad(const Step& step, int panel) const {
    const uint64_t& full = storage_.do_full[at_.slot(panel)];
    ptx::mbarrier_arrive_expect(address(full), kPieceBytes);
    load_piece(Config::kGradsOffset, workspace_.grads, workspace_tile(step), panel, full);
  }

  /// Of a panel, in the tensors.
  __device__ __forceinline__ int first_column(int panel) const {
    return rank() * Config::kColumns + panel * kPanelColumns;
  }

  __device__ __forceinline__ void store_dk(const Sums& sum, float scale) const {
    store(p_.dk, 0, sum, scale, p_.head_dim);
  }
  __device__ __forceinline__ void store_dv(const Sums& sum, float scale) const {
    store(p_.dv, Config::kBlockN * Config::kHeadDim, sum, scale, p_.head_dim_v);
  }

  const BackwardParams& p_;
  const BackwardF32Workspace& workspace_;
  Storage& storage_;
  const BackwardWorkTile<Config>& work_tile_;
  const uint32_t s_tiles_;
  const int warp_, lane_;
  BackwardF32Position<Config> at_;

 private:
  /// `sums_offset`: where it begins in a split's slot.
  __device__ __forceinline__ void store(const TensorView& view, int sums_offset, const Sums& sum, float scale,
                                        int64_t columns) const {
    if (!view.data) return;
    if (work_tile_.sums) return store_split(work_tile_.sums + sums_offset, sum, scale);
    const Sequence& sequence = work_tile_.sequence;
    const auto rows = key_rows<float, false>(p_, view, sequence);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = work_tile_.first_key + warp_ * 16 + 8 * r + lane_ / 4;
      if (row >= sequence.seqlen_k) continue;
      float* const g_row = rows.row(row);
#pragma unroll
      for (int n = 0; n < Config::kColumns / 8; ++n) {
        const int column = first_column(0) + 8 * n + lane_ % 4 * 2;
        const float(&pair)[4] = sum.eight(n);
        if (column < columns)
          *reinterpret_cast<float2*>(g_row + column) = make_float2(pair[2 * r] * scale, pair[2 * r + 1] * scale);
      }
    }
  }

  __device__ __forceinline__ void store_split(float* g_sums, const Sums& sum, float scale) const {
#pragma unroll
    for (int n = 0; n < Config::kColumns / 8; ++n)
      store_fragment(sum_fragment<Config::kHeadDim>(g_sums, warp_, rank() * (Config::kColumns / 8) + n), sum.eight(n),
                     scale, lane_);
  }
  __device__ __forceinline__ void load_piece(int offset, const char* g_pieces, int64_t tile, int panel,
                                             const uint64_t& full) const {
    ptx::bulk_load(s_tiles_ + offset + at_.slot(panel) * kPieceBytes,
                   g_pieces + ((tile * Config::kCluster + rank()) * kPanels + panel) * kPieceBytes, kPieceBytes,
                   address(full));
  }
  __device__ __forceinline__ void load_terms(const float* s_terms, const float* g_terms, int64_t tile,
                                             const uint64_t& full) const {
    ptx::bulk_load(ptx::shared_address(s_terms), g_terms + tile * kBlockM, Config::kTermBytes, address(full));
  }
};

}  // namespace flash_ext::sm90
