// dK and dV: a warpgroup has 64 keys and visits all queries that see them. Keys are the rows of its tiles. Where dS is
// exchanged, the warpgroup leaves it in shared memory.
#pragma once

#include "block.cuh"
#include "kernels/sm90/common/backward/pipelined_tile.cuh"

namespace flash_ext::sm90 {

/// A warp of a warpgroup that computes dK and dV.
template <class Config>
class BackwardShortKeys : BackwardShortBlock<Config> {
  using Base = BackwardShortBlock<Config>;
  using typename Base::Element;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kQueriesOfStep;
  using Tile = BackwardTile<Element, kBlockM>;
  using Products = BackwardProducts<Element, kHeadDim, kWarpgroupRows, kBlockM>;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    const int first = this->group_ * kWarpgroupRows, end = min(first + kWarpgroupRows, this->sequence().seqlen_k);
    if (first >= end) return;
    TileSpan seen = this->sequence().template query_tiles<kBlockM>(first, end);
    // Rows past the last key must not reach dQ. Those of dK and dV are not stored.
    if (Config::kExchangesDs && end < first + kWarpgroupRows) seen.full_begin = seen.full_end = seen.end;
    zero_accumulators(dk_);
    zero_accumulators(dv_);
    this->visit(seen, [&](int tile, bool hides) { step(tile, hides); });
    store(p_.dv, dv_, 1.0f);
    store(p_.dk, dk_, static_cast<float>(p_.softmax_scale));
  }

 private:
  using Base::lane_, Base::p_, Base::storage_;

  /// Computes a query tile. S and dP take the same registers.
  __device__ __forceinline__ void step(int tile, bool hides) {
    typename Tile::Scores s;
    typename Tile::Weights p;  // then dS
    const uint32_t queries = this->rows_at(Config::kQueriesOffset, tile * kBlockM);
    const uint32_t grads = this->rows_at(Config::kGradsOffset, tile * kBlockM);
    Products::multiply(s, this->own_rows_at(Config::kKeysOffset), queries);
    Tile::softmax_step(s, storage_.lse + tile * kBlockM, this->scale_, lane_);
    if (hides) {
      Tile::hide(s, this->sequence(), this->first_row_, tile * kBlockM, lane_);
      this->bound(s);
    }
    pack_operand<Element>(p, s);

    Products::start(s, this->own_rows_at(Config::kValuesOffset), grads);
    Products::start_sum(dv_, p, grads);
    Products::finish(s);
    ptx::fence_operand(dv_);
    Tile::compute_ds(p, s, p, storage_.minus_delta + tile * kBlockM, lane_, hides);
    if constexpr (Config::kExchangesDs) {
      const uint32_t s_panel = this->s_ds_ + tile * panel_bytes(Config::kRows) + this->group_ * panel_bytes(kBlockM);
      BackwardPipelinedTile<Element, kBlockM>::store(s_panel, this->first_row_ / 16 % kWarpgroupWarps, p, lane_);
    }
    Products::start_sum(dk_, p, queries);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dk_);
  }

  __device__ __forceinline__ void store(const TensorView& view, const typename Products::Sum& sum, float scale) const {
    if (view.data)
      Base::store(key_rows<Element, false>(p_, view, this->sequence()), this->sequence().seqlen_k, sum, scale);
  }

  typename Products::Sum dk_, dv_;
};

}  // namespace flash_ext::sm90
