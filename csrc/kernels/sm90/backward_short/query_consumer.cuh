// dQ up to head_dim 64: a warpgroup has 64 queries and visits all keys that they see. Queries are the rows of its
// tiles. Scores and dP are computed here a second time; the warpgroups that have the keys do not pass them on. That
// takes seven products instead of five, but no warpgroup waits for another, and dS needs no shared memory.
#pragma once

#include "block.cuh"

namespace flash_ext::sm90 {

/// A warp of a warpgroup that computes dQ.
template <class Config>
class BackwardShortQueries : BackwardShortBlock<Config> {
  using Base = BackwardShortBlock<Config>;
  using typename Base::Element;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockN = kWarpgroupRows;
  using Products = BackwardProducts<Element, kHeadDim, kWarpgroupRows, kBlockN>;
  using Scores = typename Products::Scores;
  using Weights = typename Products::Weights;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    const int first = this->group_ * kWarpgroupRows, end = min(first + kWarpgroupRows, this->sequence().seqlen_q);
    if (first >= end || !p_.dq.data) return;
    const TileSpan seen = this->sequence().template key_tiles<kBlockN>(first, end);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse_[r] = this->storage_.lse[this->row(r)];
      minus_delta_[r] = this->storage_.minus_delta[this->row(r)];
    }
    zero_accumulators(dq_);
    this->visit(seen, [&](int tile, bool hides) { step(tile, hides); });
    this->store(query_rows<Element>(p_.dq, this->sequence()), this->sequence().seqlen_q, dq_,
                static_cast<float>(p_.softmax_scale));
  }

 private:
  using Base::p_;

  __device__ __forceinline__ void step(int tile, bool hides) {
    Scores s, dp;
    Weights ds;
    const uint32_t keys = this->rows_at(Config::kKeysOffset, tile * kBlockN);
    Products::start(s, this->own_rows_at(Config::kQueriesOffset), keys);
    Products::start(dp, this->own_rows_at(Config::kGradsOffset), this->rows_at(Config::kValuesOffset, tile * kBlockN));
    ptx::wgmma_wait<1>();
    for_each_score(s, [&](float& x, int, int, int e) {
      ptx::fence_operand(x);
      x = BaseTwoUnit::weight(x, this->scale_, lse_[e / 2]);
    });
    if (hides) {
      hide(s, tile);
      this->bound(s);
    }
    Products::finish(dp);
    for_each_score(s, [&](float& x, int, int n, int e) {
      const float gradient = x * (dp[0][n][e] + minus_delta_[e / 2]);
      x = hides && x == 0.0f ? 0.0f : gradient;  // the rest may be NaN, from keys that the query does not see
    });
    pack_operand<Element>(ds, s);
    Products::start_sum(dq_, ds, keys);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dq_);
  }

  /// Zeroes weights that the window or the lengths hide, even NaN.
  __device__ __forceinline__ void hide(Scores& s, int tile) const {
    const int first_key = tile * kBlockN + 2 * (this->lane_ % 4);
    int begin[2], end[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      begin[r] = this->sequence().keys_begin(this->row(r)) - first_key;
      end[r] = this->sequence().keys_end(this->row(r)) - first_key;
    }
    for_each_score(s, [&](float& x, int, int n, int e) {
      const int column = 8 * n + e % 2;
      if (column < begin[e / 2] || column >= end[e / 2]) x = 0.0f;
    });
  }

  float lse_[2], minus_delta_[2];  // of this lane's rows
  typename Products::Sum dq_;
};

}  // namespace flash_ext::sm90
