// The traversal with score options: softcap, ALiBi, scales of any sign.
//
// It differs from the plain one (traverse_range.cuh) in what it does to scores and in the order of the key tiles. With
// ALiBi, scores rise towards the diagonal from either side. Tiles are therefore visited from the diagonal on, so that
// stabilisers need not rise later. Runs of tiles with a fixed row max have a loop of their own, which reads nothing but
// barriers from shared memory: nothing would hide the time of other loads before the products of a step.
#pragma once

#include "traverse_range.cuh"

namespace flash_ext::sm90 {

template <class Config>
class TraverseFromDiagonal : public TraverseRange<Config> {
  using Base = TraverseRange<Config>;
  using Rows = ForwardRows<Config>;
  using Base::stabiliser_, Base::terms_, Base::warpgroup_;
  using typename Base::Scores, typename Base::Weights;

 public:
  using Base::Base;
  using typename Base::WorkTile;

 protected:
  bool small_scores_;  // no large score of this work tile is known yet, and softcap is its only option

  /// Visits the key tiles from first_tile() down, and then from the last one down to the one after first_tile().
  __device__ __forceinline__ void visit(const WorkTile& work_tile) {
    const TileSpan& rows = work_tile.rows[warpgroup_];
    this->wait_for_query(work_tile);
    int tile = work_tile.first_tile(), last = work_tile.tiles.begin;
#pragma unroll 1
    while (true) {
      for (; tile >= max(rows.end, last); --tile) this->skip_tile();
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
      for (; tile >= last; --tile) this->skip_tile();
      if (last > work_tile.first_tile()) break;
      tile = work_tile.tiles.end - 1, last = work_tile.first_tile() + 1;
    }
  }

 private:
  /// Takes steps with a fixed row max, from `tile` down to `last`. Returns the tile to visit next.
  __device__ __forceinline__ int fixed_max_steps(const WorkTile& work_tile, int tile, int last, Weights& p) {
    const auto rules = this->rules(work_tile);
    const TileCoordinates<false> at = this->coordinates(work_tile, tile);
    AlibiLine line = {tile > work_tile.first_tile() ? -rules.slope : rules.slope,
                      at.column(0, 0) - at.row(0, 0) - rules.diagonal};
#pragma unroll 1
    for (; tile >= last; --tile, line.distance -= Config::kBlockN) {
      this->wait_for_keys();
      Rows::template step<true>(work_tile, tile, p, [&](Scores& s) {
        float sum[2];
        exponentiate_beside_diagonal<Config::kCapsByProducts>(s, rules, terms_.softcap, line, stabiliser_, sum);
        this->add_to_row_sums(sum);
      });
    }
    return tile;
  }

  /// Whether the stabilisers of the warpgroup are small, which predicts that scores of later tiles are.
  __device__ __forceinline__ bool stabilisers_are_small() const {
    const float largest = static_cast<float>(SoftcapSmallScores::kRange) * terms_.cap;
    return all_of_warpgroup(!(stabiliser_[0] > largest || stabiliser_[1] > largest));
  }

  __device__ __forceinline__ bool all_of_warpgroup(bool predicate) const {
    const bool all = !ptx::barrier_any<kWarpgroupThreads>(barrier_of_warpgroup(warpgroup_), !predicate);
    return __all_sync(~0u, all);  // tells the compiler that lanes do not diverge here
  }

  /// Takes such steps with softcap alone, as long as all scores of the warpgroup are small. A vote while P V runs finds
  /// out whether they are. A tile with a larger score is computed again, and fixed_max_steps() serves the rest of the
  /// work tile. Rows after the end of a sequence vote too; they are zeroed for that.
  __device__ __forceinline__ int steps_of_small_scores(const WorkTile& work_tile, int tile, int last, Weights& p) {
    const auto rules = this->rules(work_tile);
#pragma unroll 1
    for (; tile >= last; --tile) {
      Scores s;
      this->wait_for_keys();
      this->start_step(s, p);
      float sum[2];
      const bool serves = exponentiate_small_scores(s, terms_.small_scores, stabiliser_, sum);
      small_scores_ = all_of_warpgroup(serves);
      this->finish_pv();
      if (!small_scores_) {
        this->multiply_qk(s);
        exponentiate_by_rules<Cap::kTanh, false>(s, rules, terms_.softcap, {}, stabiliser_, sum);
        last = tile;
      }
      this->release_keys(work_tile, tile);
      this->add_to_row_sums(sum);
      this->pack(p, s);
    }
    return tile;
  }
};

}  // namespace flash_ext::sm90
