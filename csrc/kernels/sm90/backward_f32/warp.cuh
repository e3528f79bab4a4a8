// The state of a warp of the float32 backward: where tiles lie, its waits, loads and stores.
#pragma once

#include "kernels/common/backward/split_sums.cuh"
#include "kernels/ptx/bulk.h"
#include "kernels/ptx/cluster.h"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// The position of a warp: steps so far, and the barriers' phases that belong to this one.
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

  /// The sums of columns [8 n, + 8).
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

  /// The rank of the CTA in its cluster.
  __device__ __forceinline__ static int rank() {
    return Config::kCluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
  }
  /// The same address in the other CTA.
  __device__ __forceinline__ uint32_t in_other(uint32_t s_slot) const {
    return ptx::cluster_address(s_slot, static_cast<uint32_t>(rank() ^ 1));
  }

  __device__ __forceinline__ void release(const uint64_t& barrier) const { arrive_as_warp(barrier, lane_); }

  /// The lower half of the descriptor of a subtile.
  __device__ __forceinline__ uint32_t subtile(int offset, int index) const {
    return SubtileDescriptor::lower_half(without_rank<Config>(s_tiles_) + offset) + index * (kSubtileBytes / 16);
  }
  __device__ __forceinline__ uint32_t key_subtile(int panel) const { return subtile(0, panel); }
  __device__ __forceinline__ uint32_t value_subtile(int panel) const { return subtile(Config::kValuesOffset, panel); }
  __device__ __forceinline__ uint32_t query_subtile(int panel) const {
    return subtile(Config::kQueriesOffset, at_.slot(panel));
  }
  __device__ __forceinline__ uint32_t grad_subtile(int panel) const {
    return subtile(Config::kGradsOffset, at_.slot(panel));
  }
  __device__ __forceinline__ uint32_t s_ds() const { return s_tiles_ + Config::kDsOffset + at_.tile() * kSubtileBytes; }

  __device__ __forceinline__ void wait_for_query(int panel) const {
    wait_for(storage_.q_full[at_.slot(panel)], at_.parity());
  }
  __device__ __forceinline__ void wait_for_grad(int panel) const {
    wait_for(storage_.do_full[at_.slot(panel)], at_.parity());
  }

  __device__ __forceinline__ int64_t workspace_tile(const Step& step) const {
    return work_tile_.workspace_tile + step.head * workspace_.rows.tiles_per_head + step.tile;
  }

  /// Calls visit(step) for every step of the work tile.
  template <class Visit>
  __device__ __forceinline__ void for_each_step(Visit visit) {
#pragma unroll 1
    for (Step step = work_tile_.first_step(); step.head < work_tile_.heads; work_tile_.advance(step)) {
      visit(step);
      at_.advance();
    }
  }
  /// The step whose tile takes the slots of this step's tile.
  __device__ __forceinline__ Step step_after(Step step) const {
    for (int k = 0; k < Config::kTiles; ++k) work_tile_.advance(step);
    return step;
  }

  /// Loads a subtile of Q, and with the first one of a tile its lse and D. Called by one thread.
  __device__ __forceinline__ void load_query(const Step& step, int panel) const {
    const uint64_t& full = storage_.q_full[at_.slot(panel)];
    const int64_t tile = workspace_tile(step);
    ptx::mbarrier_arrive_expect(address(full), kSubtileBytes + (panel == 0 ? 2 * Config::kTermBytes : 0));
    load_subtile(Config::kQueriesOffset, workspace_.queries, tile, panel, full);
    if (panel != 0) return;
    load_terms(storage_.lse[at_.tile()], workspace_.rows.lse, tile, full);
    load_terms(storage_.minus_delta[at_.tile()], workspace_.rows.minus_delta, tile, full);
  }
  /// Loads a subtile of dO. Called by one thread.
  __device__ __forceinline__ void load_grad(const Step& step, int panel) const {
    const uint64_t& full = storage_.do_full[at_.slot(panel)];
    ptx::mbarrier_arrive_expect(address(full), kSubtileBytes);
    load_subtile(Config::kGradsOffset, workspace_.grads, workspace_tile(step), panel, full);
  }

  /// The first column of a panel, in the tensors.
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
  /// Stores dK or dV. `sums_offset`: where it begins in a split's slot, in floats.
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
  __device__ __forceinline__ void load_subtile(int offset, const char* g_subtiles, int64_t tile, int panel,
                                               const uint64_t& full) const {
    ptx::bulk_load(s_tiles_ + offset + at_.slot(panel) * kSubtileBytes,
                   g_subtiles + ((tile * Config::kCluster + rank()) * kPanels + panel) * kSubtileBytes, kSubtileBytes,
                   address(full));
  }
  __device__ __forceinline__ void load_terms(const float* s_terms, const float* g_terms, int64_t tile,
                                             const uint64_t& full) const {
    ptx::bulk_load(ptx::shared_address(s_terms), g_terms + tile * kBlockM, Config::kTermBytes, address(full));
  }
};

}  // namespace flash_ext::sm90
