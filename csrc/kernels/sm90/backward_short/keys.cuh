// dK and dV: what a warpgroup makes of 64 keys and all queries that see them, keys as rows of its tiles.
#pragma once

#include "kernels/sm90/backward/products.cuh"
#include "kernels/sm90/common/store_rows.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// One warp of them.
template <class Config>
class BackwardShortKeys {
  using Element = typename Config::Element;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = 32;
  using Tile = BackwardTile<Element, kBlockM>;
  using Products = BackwardProducts<Element, kHeadDim, kWarpgroupRows, kBlockM>;
  using Storage = BackwardShortStorage<Config>;

 public:
  __device__ __forceinline__ BackwardShortKeys(const BackwardParams& p, const Storage& storage, uint32_t s_tiles,
                                               float scale, int group, int warp, int lane, bool large)
      : p_(p),
        storage_(storage),
        tiles_(Products::KeyTile::lower_half(s_tiles)),
        scale_(scale),
        group_(group),
        first_key_(group * kWarpgroupRows + warp * 16),
        lane_(lane),
        large_(large) {}

  __device__ __forceinline__ void run() {
    const int first = group_ * kWarpgroupRows, end = min(first + kWarpgroupRows, sequence().seqlen_k);
    if (first >= end) return;
    const TileSpan seen = sequence().template query_tiles<kBlockM>(first, end);
    Products::clear(dk_);
    Products::clear(dv_);
#pragma unroll 1
    for (int tile = seen.begin; tile < seen.end; ++tile)
      step(tile, large_ || tile < seen.full_begin || tile >= seen.full_end);
    store(p_.dv, dv_, 1.0f);
    store(p_.dk, dk_, static_cast<float>(p_.softmax_scale));
  }

 private:
  __device__ __forceinline__ const Sequence& sequence() const { return storage_.sequence(); }
  /// Lower halves of descriptors: of this warpgroup's keys, and of a tile of queries.
  __device__ __forceinline__ uint32_t keys_at(int offset) const {
    return tiles_ + (offset + group_ * panel_bytes(kWarpgroupRows)) / 16;
  }
  __device__ __forceinline__ uint32_t queries_at(int offset, int tile) const {
    return tiles_ + (offset + tile * panel_bytes(kBlockM)) / 16;
  }

  /// `hides`: some pair of the tile, or a weight may have to be bounded. Scores and their gradients take the same
  /// registers.
  __device__ __forceinline__ void step(int tile, bool hides) {
    typename Tile::Scores s;
    typename Tile::Weights p;  // then dS
    const uint32_t queries = queries_at(Config::kQueriesOffset, tile), grads = queries_at(Config::kGradsOffset, tile);
    Products::multiply(s, keys_at(Config::kKeysOffset), queries);
    Tile::softmax_step(s, storage_.lse + tile * kBlockM, scale_, lane_);
    if (hides) {
      Tile::hide(s, sequence(), first_key_, tile * kBlockM, lane_);
      if (large_) for_each_score(s, [](float& x, int, int, int) { x = LargeLse::bound(x); });
    }
    pack_operand<Element>(p, s);

    Products::start(s, keys_at(Config::kValuesOffset), grads);
    Products::start_sum(dv_, p, grads);
    Products::finish(s);
    Products::fence_operand(dv_);
    Tile::compute_ds(p, s, p, storage_.minus_delta + tile * kBlockM, lane_, hides);
    Products::start_sum(dk_, p, queries);
    ptx::wgmma_wait<0>();
    Products::fence_operand(dk_);
  }

  __device__ __forceinline__ void store(const TensorView& view, const typename Products::Sum& sum, float scale) const {
    if (!view.data) return;
    const auto rows = key_rows<Element, false>(p_, view, sequence());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_key_ + 8 * r + lane_ / 4;
      Element* const g_row = row < sequence().seqlen_k ? rows.row(row) : nullptr;
      write_out_row(g_row, sum, r, scale, lane_, static_cast<int>(p_.head_dim));
    }
  }

  const BackwardParams& p_;
  const Storage& storage_;
  const uint32_t tiles_;  // lower half of the descriptor of all tiles
  const float scale_;     // of scores, to base 2
  const int group_, first_key_, lane_;
  const bool large_;  // some row has a LargeLse
  typename Products::Sum dk_, dv_;
};

}  // namespace flash_ext::sm90
