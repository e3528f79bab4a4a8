// dQ: what a warpgroup makes of 64 queries and all keys that they see, queries as rows of its tiles. Scores are
// computed here a second time, and not passed on by the warpgroups that have the keys: two products more of seven, but
// no warpgroup waits for another, and dS needs no shared memory.
#pragma once

#include "kernels/sm90/backward/products.cuh"
#include "kernels/sm90/common/store_rows.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// One warp of them.
template <class Config>
class BackwardShortQueries {
  using Element = typename Config::Element;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockN = kWarpgroupRows;
  using Products = BackwardProducts<Element, kHeadDim, kWarpgroupRows, kBlockN>;
  using Scores = typename Products::Scores;
  using Weights = typename Products::Weights;
  using Storage = BackwardShortStorage<Config>;

 public:
  __device__ __forceinline__ BackwardShortQueries(const BackwardParams& p, const Storage& storage, uint32_t s_tiles,
                                                  float scale, int group, int warp, int lane, bool large)
      : p_(p),
        storage_(storage),
        tiles_(Products::KeyTile::lower_half(s_tiles)),
        scale_(scale),
        group_(group),
        first_query_(group * kWarpgroupRows + warp * 16 + lane / 4),
        lane_(lane),
        large_(large) {}

  __device__ __forceinline__ void run() {
    const int first = group_ * kWarpgroupRows, end = min(first + kWarpgroupRows, sequence().seqlen_q);
    if (first >= end || !p_.dq.data) return;
    const TileSpan seen = sequence().template key_tiles<kBlockN>(first, end);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = first_query_ + 8 * r;
      lse_[r] = storage_.lse[i];
      minus_delta_[r] = storage_.minus_delta[i];
    }
    Products::clear(dq_);
#pragma unroll 1
    for (int tile = seen.begin; tile < seen.end; ++tile)
      step(tile, large_ || tile < seen.full_begin || tile >= seen.full_end);
    store();
  }

 private:
  __device__ __forceinline__ const Sequence& sequence() const { return storage_.sequence(); }
  /// The lower half of the descriptor of 64 rows.
  __device__ __forceinline__ uint32_t rows_at(int offset, int index) const {
    return tiles_ + (offset + index * panel_bytes(kWarpgroupRows)) / 16;
  }

  /// `hides`: some pair of the tile, or a weight may have to be bounded.
  __device__ __forceinline__ void step(int tile, bool hides) {
    Scores s, dp;
    Weights ds;
    const uint32_t keys = rows_at(Config::kKeysOffset, tile);
    Products::start(s, rows_at(Config::kQueriesOffset, group_), keys);
    Products::start(dp, rows_at(Config::kGradsOffset, group_), rows_at(Config::kValuesOffset, tile));
    ptx::wgmma_wait<1>();
    for_each_score(s, [&](float& x, int, int, int e) {
      ptx::fence_operand(x);
      x = BaseTwoUnit::weight(x, scale_, lse_[e / 2]);
    });
    if (hides) hide(s, tile);
    Products::finish(dp);
    for_each_score(s, [&](float& x, int, int n, int e) {
      const float gradient = x * (dp[0][n][e] + minus_delta_[e / 2]);
      x = hides && x == 0.0f ? 0.0f : gradient;  // the rest may be NaN, from keys that the query does not see
    });
    pack_operand<Element>(ds, s);
    Products::start_sum(dq_, ds, keys);
    ptx::wgmma_wait<0>();
    Products::fence_operand(dq_);
  }

  /// Weights that the window or the lengths hide become 0, whatever they are; others are bounded.
  __device__ __forceinline__ void hide(Scores& s, int tile) const {
    const int first_key = tile * kBlockN + 2 * (lane_ % 4);
    int begin[2], end[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = first_query_ + 8 * r;
      begin[r] = sequence().keys_begin(i) - first_key;
      end[r] = sequence().keys_end(i) - first_key;
    }
    for_each_score(s, [&](float& x, int, int n, int e) {
      const int column = 8 * n + e % 2;
      if (column < begin[e / 2] || column >= end[e / 2]) x = 0.0f;
    });
    if (large_) for_each_score(s, [](float& x, int, int, int) { x = LargeLse::bound(x); });
  }

  __device__ __forceinline__ void store() const {
    const auto rows = query_rows<Element>(p_.dq, sequence());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = first_query_ + 8 * r;
      Element* const g_row = i < sequence().seqlen_q ? rows.row(i) : nullptr;
      write_out_row(g_row, dq_, r, static_cast<float>(p_.softmax_scale), lane_, static_cast<int>(p_.head_dim));
    }
  }

  const BackwardParams& p_;
  const Storage& storage_;
  const uint32_t tiles_;  // lower half of the descriptor of all tiles
  const float scale_;     // of scores, to base 2
  const int group_, first_query_, lane_;
  const bool large_;               // some row has a LargeLse
  float lse_[2], minus_delta_[2];  // of this lane's rows
  typename Products::Sum dq_;
};

}  // namespace flash_ext::sm90
