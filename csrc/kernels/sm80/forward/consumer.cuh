// A CTA of the forward: its steps over the tiles of keys. See kernel.cuh.
#pragma once

#include "epilogue.cuh"
#include "kernels/common/sanitise.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct ForwardConsumer : ForwardOut<Config> {
  using Base = ForwardOut<Config>;
  using Base::Base;
  using Base::begin, Base::begin_step, Base::constants, Base::copying_thread, Base::forget_lane, Base::kBlockN,
      Base::kHeadDim, Base::kThreads, Base::multiply_pv, Base::multiply_qk, Base::options, Base::phase,
      Base::release_key, Base::rows, Base::rows_left, Base::s_v, Base::seen, Base::stage, Base::store, Base::work_tile;
  using typename Base::Element, typename Base::KeptWeights, typename Base::Scores, typename Base::Visibility;

  __device__ __forceinline__ void finish_step(Scores& s, const KeptWeights& kept, int tile, int next) {
    if (Config::kOneBias || (Config::kReads && constants.stages_bias)) {
      __syncwarp();  // all lanes have read their part of this tile's bias
      options().load_bias(work_tile, next);
      ptx::cp_async_commit();
    }
    if constexpr (Config::kOneDropout) {
      multiply_pv(s, kept);
    } else {
      options().drop(s, tile);
      multiply_pv(s);
    }
    phase ^= 1;
  }

  template <bool kRounds>
  __device__ __forceinline__ void exponentiate(Scores& s, const AlibiOfRows& terms) {
    const auto hide = [&](Scores& weights) { return options().hide_by_bias(weights); };
    rows.template exponentiate<kRounds>(s, constants.scale, terms, hide);
  }

  /// Sanitises V of this step, which has arrived. All warps call it or none, from either kind of step.
  __device__ __forceinline__ void sanitise_value() const {
    const int thread = Config::kMasks ? copying_thread() : static_cast<int>(threadIdx.x);
    if (sanitise_loaded_tile<Element, kHeadDim, kThreads, kBlockN>(stage(s_v, 0), thread))
      work_tile.met_non_finite = true;
    ptx::barrier_sync<kAllWarps, kThreads>();
  }

  /// Computes a tile that no window cuts, and for whose scores the stabilisers serve.
  __device__ __forceinline__ void full_step(int tile, int next, const Visibility& visible) {
    Scores s;
    KeptWeights kept;
    multiply_qk(s, kept, tile);
    release_key(next);
    const AlibiOfRows terms = options().apply(s, tile, visible);
    if (Config::kMasks && work_tile.sanitised) sanitise_value();
    exponentiate<false>(s, terms);
    finish_step(s, kept, tile, next);
  }

  /// Computes any tile, and updates the row stabilisers. True if the next step has to update them too, as some row has
  /// none.
  __device__ __forceinline__ bool partial_step(int tile, int next, const Visibility& visible, bool first) {
    if (Config::kBiases && work_tile.safe_path) options().saturate_bias();
    Scores s;
    KeptWeights kept;
    multiply_qk(s, kept, tile);
    release_key(next);
    const AlibiOfRows terms = options().apply(s, tile, visible);
    const bool outside_window = tile < work_tile.tiles.full_begin || tile >= work_tile.tiles.full_end;
    if (outside_window) hide_outside_window(s, options().coordinates(tile), work_tile.sequence);
    const auto lift = [&](int m, int r) { return options().alibi_to_come(tile, m, r); };
    rows.update_row_max(s, constants.scale, terms, lift, first);
    const bool exact = rows.some_without_stabiliser(rows_left());
    exponentiate<true>(s, terms);
    if (!Config::kMasks && Config::kStages > 1 && first) {
      ptx::cp_async_wait<1>();  // for V
      __syncthreads();
    }
    if (work_tile.sanitised && (Config::kMasks || outside_window)) sanitise_value();
    finish_step(s, kept, tile, next);
    return exact;
  }

  /// Visits all tiles, from the start. Warps may take different kinds of steps at a tile: both kinds have the same
  /// barriers.
  __device__ __forceinline__ void visit() {
    int tile = options().find_first(seen);
    if (Config::kMasks || work_tile.sanitised) begin(work_tile, tile);
    rows.zero();
    bool exact = true;
#pragma unroll 1
    while (tile >= work_tile.tiles.begin) {
      const TileSpan tiles = work_tile.tiles;
      const bool first = tile == tiles.end - 1;
      const bool full = !Config::kRunningMaximum && !exact && tile >= tiles.full_begin && tile < tiles.full_end;
      forget_lane();
      Visibility visible;
      if constexpr (Config::kLoadsMaskEarly) options().load_mask_bits(visible, tile);
      const int next = begin_step(tile, first, tiles.begin);
      if constexpr (!Config::kLoadsMaskEarly) options().load_mask_bits(visible, tile);
      if (full) {
        full_step(tile, next, visible);
      } else {
        exact = partial_step(tile, next, visible, first) || work_tile.safe_path;
      }
      tile = next;
    }
  }

  /// Whether a row is lost, or Inf or NaN came into out where something is hidden: a hidden weight is 0, and 0 * Inf is
  /// NaN.
  __device__ __forceinline__ bool needs_recompute() const {
    const TileSpan& tiles = work_tile.tiles;
    const bool hides = options().masked() || tiles.full_begin > tiles.begin || tiles.full_end < tiles.end;
    const bool lost = __syncthreads_or(rows.lost(rows_left(), options().stages_bias()));
    if (!lost && !__syncthreads_or(!work_tile.sanitised && hides && !rows.out_is_finite())) return false;
    const int thread = static_cast<int>(threadIdx.x);
    if ((Config::kFullPrecision ? ptx::reread(thread) : thread) == 0)
      work_tile.sanitised = true, work_tile.safe_path = lost;
    __syncthreads();
    return true;
  }

  __device__ __forceinline__ void run() {
    bool repeat;
#pragma unroll 1
    do {
      visit();
      repeat = !work_tile.safe_path && needs_recompute();
      phase = 0;
    } while (repeat);
    store();
  }
};

}  // namespace flash_ext::sm80
