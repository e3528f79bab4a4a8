// The forward with options of scores: softcap, ALiBi, scales of any sign. And which class serves a call.
//
// It differs from the plain class (kernel.cuh) in what a score goes through, and in the order of the tiles. ALiBi
// makes scores rise on the way to the diagonal, from either side: tiles are visited from there on, so that stabilisers
// need not rise behind it. Runs of tiles without a maximum have a loop of their own, which asks shared memory for
// nothing but the barriers: what a step waits for before its products, no other work hides.
#pragma once

#include "kernel.cuh"

namespace flash_ext::sm90 {

template <class Config>
class ForwardScoresConsumer : public ForwardConsumer<Config> {
  using Base = ForwardConsumer<Config>;
  using Base::p_;
  using Base::row_sum_;
  using Base::stabiliser_;
  using Base::warpgroup_;
  using typename Base::Scores;
  using typename Base::Weights;
  using typename Base::WorkTile;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    WorkTileQueue<ForwardStorage<Config>> queue(this->storage_);
    while (WorkTile* const work_tile = queue.front()) {
      this->clear();
      small_scores_ =
          Config::kSoftcapsSmallScores && this->terms_.small_scores.shift < 0.0f && work_tile->slope == 0.0f;
      visit(*work_tile);
      if (!work_tile->safe_path) this->look_for_failure(*work_tile);
      this->store(*work_tile);
      if (work_tile->met_non_finite) add_hidden_non_finite(*work_tile);
      queue.pop(this->lane_);
    }
  }

 private:
  /// From the first tile down, and then from the end down to it.
  __device__ __forceinline__ void visit(const WorkTile& work_tile) {
    const TileSpan& rows = work_tile.rows[warpgroup_];
    this->wait_for_query(work_tile);
    int tile = work_tile.first_tile(), last = work_tile.tiles.begin;
#pragma unroll 1
    while (true) {
      for (; tile >= max(rows.end, last); --tile) this->pass();
      const int stop = max(rows.begin, last);
      if (tile >= stop) {
        Weights p;
        this->template softmax_tile<RowMaxUpdate::kMore>(work_tile, tile, p);
        --tile;
        if (Config::kSoftcapsSmallScores && small_scores_ && tile >= stop) small_scores_ = stabilisers_are_small();
#pragma unroll 1
        while (tile >= stop) {
          const int fixed_max_stop = work_tile.fixed_max_from(warpgroup_, tile, stop);
          if (fixed_max_stop <= tile) {
            tile = Config::kSoftcapsSmallScores && small_scores_
                       ? steps_of_small_scores(work_tile, tile, fixed_max_stop, p)
                       : fixed_max_steps(work_tile, tile, fixed_max_stop, p);
          } else {
            this->template step<RowMaxUpdate::kMore>(work_tile, tile, p);
            --tile;
          }
        }
        this->add_values(p);
      }
      for (; tile >= last; --tile) this->pass();
      if (last > work_tile.first_tile()) break;
      tile = work_tile.tiles.end - 1, last = work_tile.first_tile() + 1;
    }
  }

  /// S is there, and P V of the tile before under way.
  __device__ __forceinline__ void start_fixed_max_step(Scores& s, Weights& p) {
    this->wait_for_keys();
    this->start_qk(s);
    this->wait_for_values();
    this->start_pv(p);
    ptx::wgmma_wait<1>();
    this->fence_operand(s);
  }

  /// Of the tiles from `tile` down to `last`, which raise no stabilisers. Returns the one behind.
  __device__ __forceinline__ int fixed_max_steps(const WorkTile& work_tile, int tile, int last, Weights& p) {
    const auto rules = this->rules(work_tile);
    const TileCoordinates<false> at = this->coordinates(work_tile, tile);
    AlibiLine line = {tile > work_tile.first_tile() ? -rules.slope : rules.slope,
                      at.column(0, 0) - at.row(0, 0) - rules.diagonal};
#pragma unroll 1
    for (; tile >= last; --tile, line.distance -= Config::kBlockN) {
      Scores s;
      start_fixed_max_step(s, p);
      this->release_keys(work_tile, tile);
      float sum[2];
      exponentiate_beside_diagonal<Config::kCapsByProducts>(s, rules, this->terms_.softcap, line, stabiliser_, sum);
      row_sum_[0] += sum[0];
      row_sum_[1] += sum[1];
      ptx::wgmma_wait<0>();
      this->fence_out();
      this->release_values();
      this->pack(p, s);
    }
    return tile;
  }

  /// Those of the warpgroup: what the tiles so far say of the others.
  __device__ __forceinline__ bool stabilisers_are_small() const {
    const float largest = static_cast<float>(SoftcapSmallScores::kRange) * this->terms_.cap;
    return all_of_warpgroup(!(stabiliser_[0] > largest || stabiliser_[1] > largest));
  }

  __device__ __forceinline__ bool all_of_warpgroup(bool predicate) const {
    const bool all = !ptx::barrier_any<kWarpgroupThreads>(1 + warpgroup_, !predicate);
    return __all_sync(~0u, all);  // tells the compiler that warps do not part here
  }

  /// The same with softcap alone, as long as all scores of the warpgroup stay near 0; what they are is not asked before
  /// the exponentials, but beside them. A tile with others is computed again, and the rest of the work tile is
  /// fixed_max_steps()'. Rows behind the end of a sequence are asked too, as no predicate tells them: they are 0.
  __device__ __forceinline__ int steps_of_small_scores(const WorkTile& work_tile, int tile, int last, Weights& p) {
    const auto rules = this->rules(work_tile);
#pragma unroll 1
    for (; tile >= last; --tile) {
      Scores s;
      start_fixed_max_step(s, p);
      float sum[2];
      const bool serves = exponentiate_small_scores(s, this->terms_.small_scores, stabiliser_, sum);
      small_scores_ = all_of_warpgroup(serves);
      ptx::wgmma_wait<0>();
      this->fence_out();
      this->release_values();
      if (!small_scores_) {
        this->start_qk(s);
        ptx::wgmma_wait<0>();
        this->fence_operand(s);
        exponentiate_by_rules<Cap::kTanh, false>(s, rules, this->terms_.softcap, {}, stabiliser_, sum);
        last = tile;
      }
      this->release_keys(work_tile, tile);
      row_sum_[0] += sum[0];
      row_sum_[1] += sum[1];
      this->pack(p, s);
    }
    return tile;
  }

  /// There are no masks, and what follows from them would take registers in the loops.
  __device__ __forceinline__ void add_hidden_non_finite(const WorkTile& work_tile) const {
    AttentionParams without_masks;
    without_masks.head_dim_v = p_.head_dim_v;
    Base::add_hidden_non_finite(work_tile, without_masks);
  }

  bool small_scores_;  // all scores of this work tile so far, as far as is known; and softcap alone goes before them
};

/// The plain variant in the shape that the plan chose.
template <class Element, int kHeadDim, int kHeadDimV, ForwardTiles kTiles = ForwardTiles::kManyKeys>
bool launch_plain_forward(const ForwardParams& p, int64_t block_n, const KeySplits& splits, void* workspace,
                          cudaStream_t stream) {
  if constexpr (has_tiles({kHeadDim, kHeadDimV}, kTiles)) {
    using Config = ForwardConfig<Element, kHeadDim, kHeadDimV, ForwardVariant::kPlain, kTiles>;
    if (p.block_m != Config::kBlockM || block_n != Config::kBlockN) return false;
    launch_forward<Config>(p, splits, workspace, stream);
    return true;
  }
  return false;
}

template <class Element, int kHeadDim, int kHeadDimV = kHeadDim>
void run_forward(const ForwardParams& p, int64_t block_n, const KeySplits& splits, void* workspace,
                 cudaStream_t stream) {
  using Scores = ForwardConfig<Element, kHeadDim, kHeadDimV, ForwardVariant::kScoreOptions>;
  if (has_score_options(p.softcap, p.alibi_slopes != nullptr, p.softmax_scale))
    return launch_forward<Scores>(p, splits, workspace, stream);
  const auto launch = [&](auto tiles) {
    return launch_plain_forward<Element, kHeadDim, kHeadDimV, tiles.value>(p, block_n, splits, workspace, stream);
  };
  using std::integral_constant;
  if (launch(integral_constant<ForwardTiles, ForwardTiles::kFewQueries>())) return;
  if (launch(integral_constant<ForwardTiles, ForwardTiles::kFewKeys>())) return;
  if (!launch(integral_constant<ForwardTiles, ForwardTiles::kManyKeys>()))
    throw std::logic_error("flash_ext: sm90/forward has no tiles of the shape that was planned");
}

}  // namespace flash_ext::sm90
