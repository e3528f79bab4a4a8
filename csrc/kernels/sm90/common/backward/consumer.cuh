// What all consumer warps of the backward share: 64 keys, the query tiles that see them, the waits, and where dK and dV
// go.
#pragma once

#include "kernels/common/backward/split_sums.cuh"
#include "kernels/ptx/barrier.h"
#include "kernels/sm90/common/store_rows.cuh"
#include "products.cuh"
#include "sanitise.cuh"
#include "score_tile.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// A consumer warp: where its keys and tiles lie, how K is sanitised, and how dK and dV are stored.
template <class Config, class Storage>
class BackwardKeysWarp {
 protected:
  using Element = typename Config::Element;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM;
  static constexpr int kConsumerThreads = Config::kThreads - kWarpgroupThreads;
  static constexpr uint32_t kValues = Config::kKeyBytes / 16;  // after K, in a descriptor
  using Products = BackwardProducts<Element, kHeadDim, Config::kLoadedKeys, kBlockM>;
  using Sum = typename Products::Sum;

  /// `keys_offset`: where the rows of the warpgroup's keys begin in shared memory, of K or of V.
  __device__ __forceinline__ BackwardKeysWarp(const BackwardParams& p, Storage& storage, uint32_t s_tiles,
                                              int keys_offset, float scale, int group, int lane)
      : BackwardKeysWarp(p, storage, storage.work_tile, s_tiles, keys_offset, scale, group, lane) {}
  /// The same where the CTA has several key tiles: for `work_tile`.
  __device__ __forceinline__ BackwardKeysWarp(const BackwardParams& p, Storage& storage,
                                              const BackwardWorkTile<Config>& work_tile, uint32_t s_tiles,
                                              int keys_offset, float scale, int group, int lane)
      : p_(p),
        storage_(storage),
        work_tile_(work_tile),
        warpgroup_(group),
        warp_(static_cast<int>(threadIdx.x) / 32 % kWarpgroupWarps),
        lane_(lane),
        s_tiles_(s_tiles),
        scale_(scale),
        keys_(Products::KeyTile::lower_half(without_rank<Config>(s_tiles) + keys_offset)),
        queries_(Products::QueryTile::lower_half(without_rank<Config>(s_tiles) + Config::kQueriesOffset)) {}

  /// The thread's number in its warpgroup.
  __device__ __forceinline__ int thread() const { return warp_ * 32 + lane_; }
  __device__ __forceinline__ int first_key() const {
    return work_tile_.first_key + warpgroup_ * kWarpgroupRows + warp_ * 16;
  }

  /// Sanitises this warpgroup's K. A query that sees an Inf or NaN of K does not lose it: its lse is not finite, or its
  /// score is -inf.
  __device__ __forceinline__ void sanitise_keys() const { sanitise_keys(storage_.k_full, 0, s_tiles_); }
  __device__ __forceinline__ void sanitise_keys(const uint64_t& k_full, uint32_t parity, uint32_t s_keys) const {
    wait_for(k_full, parity);
#pragma unroll 1
    for (int panel = 0; panel < panels(kHeadDim); ++panel)
      sanitise_tile<Element, panel_bytes(kWarpgroupRows), kWarpgroupThreads>(
          s_keys + panel * panel_bytes(Config::kBlockN) + warpgroup_ * panel_bytes(kWarpgroupRows), thread());
    ptx::barrier_any<kWarpgroupThreads>(BackwardBarriers<Config>::keys_sanitised(warpgroup_), false);
  }

  __device__ __forceinline__ void store_dk(const Sum& sum, float scale) const {
    store(p_.dk, 0, p_.head_dim, sum, scale);
  }
  __device__ __forceinline__ void store_dv(const Sum& sum, float scale) const {
    store(p_.dv, Config::kBlockN * kHeadDim, p_.head_dim_v, sum, scale);
  }

 private:
  /// Stores dK or dV. `sums_offset`: where it begins in a split's slot, in floats.
  __device__ __forceinline__ void store(const TensorView& view, int sums_offset, int64_t columns, const Sum& sum,
                                        float scale) const {
    if (!view.data) return;
    if (work_tile_.sums) return store_split(work_tile_.sums + sums_offset, sum, scale);
    const Sequence& sequence = work_tile_.sequence;
    const auto rows = key_rows<Element, false>(p_, view, sequence);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_key() + 8 * r + lane_ / 4;
      Element* const g_row = row < sequence.seqlen_k ? rows.row(row) : nullptr;
      write_out_row(g_row, sum, r, scale, lane_, static_cast<int>(columns));
    }
  }

  __device__ __forceinline__ void store_split(float* g_sums, const Sum& sum, float scale) const {
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; ++d)
      store_fragment(sum_fragment<kHeadDim>(g_sums, warpgroup_ * kWarpgroupWarps + warp_, d), sum[d], scale, lane_);
  }

 protected:
  const BackwardParams& p_;
  Storage& storage_;
  const BackwardWorkTile<Config>& work_tile_;
  const int warpgroup_, warp_, lane_;  // warpgroup_: number of its key group, in the CTA or the cluster
  const uint32_t s_tiles_;
  const float scale_;              // of scores, to base 2
  const uint32_t keys_, queries_;  // lower halves of descriptors
};

/// Adds the waits for Q and dO and the operations on a tile of scores to BackwardKeysWarp.
template <class Config, class Storage>
class BackwardKeysConsumer : protected BackwardKeysWarp<Config, Storage> {
 protected:
  using Base = BackwardKeysWarp<Config, Storage>;
  using Base::Base;
  using Base::kBlockM, Base::kConsumerThreads, Base::lane_, Base::queries_, Base::s_tiles_, Base::scale_,
      Base::storage_, Base::warpgroup_, Base::work_tile_;
  using typename Base::Element, typename Base::Products, typename Base::Sum;
  using Tile = BackwardTile<Element, kBlockM>;
  using Scores = typename Tile::Scores;
  using Weights = typename Tile::Weights;

  __device__ __forceinline__ void release(const uint64_t& barrier) const { arrive_as_warp(barrier, lane_); }
  __device__ __forceinline__ void release_query() const { release(storage_.q_empty[at_.stage()]); }
  __device__ __forceinline__ void release_grad() const { release(storage_.do_empty[at_.stage()]); }
  __device__ __forceinline__ void wait_for_query() const { wait_for(storage_.q_full[at_.stage()], at_.parity()); }
  __device__ __forceinline__ void wait_for_grad() const { wait_for(storage_.do_full[at_.stage()], at_.parity()); }

  /// sees(): whether some query of the tile sees some of the warpgroup's keys. hides(): whether some of these pairs may
  /// be hidden.
  __device__ __forceinline__ bool sees(int tile) const {
    const TileSpan& seen = work_tile_.groups[warpgroup_];
    return tile >= seen.begin && tile < seen.end;
  }
  __device__ __forceinline__ bool hides(int tile) const {
    const TileSpan& seen = work_tile_.groups[warpgroup_];
    return tile < seen.full_begin || tile >= seen.full_end;
  }

  /// Lower halves of descriptors of this step's tiles.
  __device__ __forceinline__ uint32_t query_tile() const { return queries_ + at_.stage() * (Config::kQueryBytes / 16); }
  __device__ __forceinline__ uint32_t grad_tile() const {
    return query_tile() + Config::kStages * (Config::kQueryBytes / 16);
  }

  __device__ __forceinline__ void softmax_step(Scores& s) const {
    Tile::softmax_step(s, storage_.lse[at_.stage()], scale_, lane_);
  }
  /// Zeroes hidden pairs in `numbers`: scores, or packed weights.
  template <class Numbers>
  __device__ __forceinline__ void hide(Numbers& numbers, int tile) const {
    Tile::hide(numbers, work_tile_.sequence, this->first_key(), tile * kBlockM, lane_);
  }
  /// Zeroes hidden weights of a partial tile, and bounds the others if some row has a LargeLse.
  __device__ __forceinline__ void hide_weights(Scores& p, int tile) const {
    hide(p, tile);
    if (work_tile_.large) for_each_score(p, [](float& x, int, int, int) { x = LargeLse::bound(x); });
  }
  __device__ __forceinline__ void compute_ds(Weights& ds, const Scores& dp, const Weights& p, bool hides) const {
    Tile::compute_ds(ds, dp, p, storage_.minus_delta[at_.stage()], lane_, hides);
  }

  /// Zeroes dS in shared memory, where no query of the tile sees the warpgroup's keys.
  __device__ __forceinline__ void zero_ds(uint32_t s_panel) const {
#pragma unroll
    for (int k = 0; k < panel_bytes(kBlockM) / 16 / kWarpgroupThreads; ++k)
      store_shared(s_panel + (k * kWarpgroupThreads + this->thread()) * 16, uint4{0, 0, 0, 0});
  }

  /// Sanitises Q and dO of a partial tile, by all consumer threads together; this is the `thread`th of them. The caller
  /// then waits for all of them.
  __device__ __forceinline__ void sanitise_rows(int thread) const {
    wait_for_query();
    wait_for_grad();
    const uint32_t s_query = s_tiles_ + Config::kQueriesOffset + at_.stage() * Config::kQueryBytes;
    sanitise_tile<Element, Config::kQueryBytes, kConsumerThreads>(s_query, thread);
    sanitise_tile<Element, Config::kQueryBytes, kConsumerThreads>(s_query + Config::kStages * Config::kQueryBytes,
                                                                  thread);
  }

  RingCount<Config::kStages> at_;  // of Q and dO
};

}  // namespace flash_ext::sm90
