// The plain traversal of key tiles: from the last one that a work tile sees down to the first.
#pragma once

#include "epilogue.cuh"

namespace flash_ext::sm90 {

template <class Config>
class TraverseRange : public ForwardEpilogue<Config> {
  using Base = ForwardEpilogue<Config>;

 protected:
  using Base::warpgroup_;
  using typename Base::Scores, typename Base::Weights;

 public:
  using Base::Base;
  using typename Base::WorkTile;

 protected:
  __device__ __forceinline__ void visit(const WorkTile& work_tile) {
    const TileSpan& rows = work_tile.rows[warpgroup_];
    int tile = work_tile.tiles.end - 1;
    this->wait_for_query(work_tile);
    for (; tile >= rows.end; --tile) this->skip_tile();
    if (!Config::kOverlaps && !work_tile.safe_path) {
      visit_without_overlap(work_tile, tile);
    } else if (work_tile.safe_path) {
#pragma unroll 1
      for (; tile >= rows.begin; --tile) {
        Weights p;
        softmax_tile<RowMaxUpdate::kMore, true>(work_tile, tile, p);
        this->add_values(p);
      }
    } else if (tile >= rows.begin) {
      Weights p;
      softmax_tile<RowMaxUpdate::kFirst>(work_tile, tile, p);
#pragma unroll 1
      for (--tile; tile >= rows.begin; --tile) {
        if (tile < work_tile.fixed_max_end[warpgroup_] && tile >= work_tile.fixed_max_begin[warpgroup_]) {
          step<RowMaxUpdate::kNone>(work_tile, tile, p);
        } else {
          step<RowMaxUpdate::kMore>(work_tile, tile, p);
        }
      }
      this->add_values(p);
    }
    for (; tile >= work_tile.tiles.begin; --tile) this->skip_tile();
  }

  /// Computes S and P of a tile. kRounds: on the safe path, which serves scores of any size.
  template <RowMaxUpdate kRowMaxUpdate, bool kRounds = false>
  __device__ __forceinline__ void softmax_tile(const WorkTile& work_tile, int tile, Weights& p) {
    this->wait_for_keys();
    Base::softmax_tile(work_tile, tile, p,
                       [&](Scores& s) { this->template softmax_step<kRowMaxUpdate, kRounds>(s, work_tile, tile); });
  }

  /// Adds P V of the tile before and computes S and P of this one.
  template <RowMaxUpdate kRowMaxUpdate>
  __device__ __forceinline__ void step(const WorkTile& work_tile, int tile, Weights& p) {
    this->wait_for_keys();
    Base::template step<kRowMaxUpdate == RowMaxUpdate::kNone>(
        work_tile, tile, p, [&](Scores& s) { this->template softmax_step<kRowMaxUpdate>(s, work_tile, tile); });
  }

 private:
  /// Computes S and P V one after the other; other warpgroups fill the waits.
  __device__ __forceinline__ void visit_without_overlap(const WorkTile& work_tile, int& tile) {
    const TileSpan& rows = work_tile.rows[warpgroup_];
#pragma unroll 1
    for (; tile >= rows.begin; --tile) {
      Weights p;
      const bool has_stabilisers = tile < rows.end - 1 && tile < work_tile.fixed_max_end[warpgroup_];
      if (has_stabilisers && tile >= work_tile.fixed_max_begin[warpgroup_]) {
        softmax_tile<RowMaxUpdate::kNone>(work_tile, tile, p);
      } else {
        softmax_tile<RowMaxUpdate::kMore>(work_tile, tile, p);
      }
      this->add_values(p);
    }
  }
};

}  // namespace flash_ext::sm90
