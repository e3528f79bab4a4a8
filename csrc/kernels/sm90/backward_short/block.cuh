// What the parts of the kernel share: key_consumer.cuh, and query_consumer.cuh or query_sums.cuh. A block is the 64
// keys, or the 64 queries, of a warpgroup.
#pragma once

#include "kernels/sm90/common/backward/products.cuh"
#include "kernels/sm90/common/store_rows.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// A warp of a block's warpgroup. It owns 16 rows of the block.
template <class Config>
class BackwardShortBlock {
 public:
  __device__ __forceinline__ BackwardShortBlock(const BackwardParams& p, const BackwardShortStorage<Config>& storage,
                                                uint32_t s_tiles, float scale, int group, int warp, int lane,
                                                bool large)
      : p_(p),
        storage_(storage),
        tiles_(TileDescriptor<kWarpgroupRows>::lower_half(s_tiles)),
        s_ds_(s_tiles + Config::kDsOffset),
        scale_(scale),
        group_(group),
        first_row_(group * kWarpgroupRows + warp * 16),
        lane_(lane),
        large_(large) {}

 protected:
  using Element = typename Config::Element;

  __device__ __forceinline__ const Sequence& sequence() const { return storage_.sequence(); }
  /// The lower half of the descriptor of rows of a tile.
  __device__ __forceinline__ uint32_t rows_at(int offset, int first_row) const {
    return tiles_ + (offset + Config::row_offset(first_row)) / 16;
  }
  __device__ __forceinline__ uint32_t own_rows_at(int offset) const { return rows_at(offset, group_ * kWarpgroupRows); }

  /// Calls step(tile, hides) for each tile; `hides`: a pair of it may be hidden, or a weight may have to be bounded.
  template <class Step>
  __device__ __forceinline__ void visit(const TileSpan& seen, Step step) const {
#pragma unroll 1
    for (int tile = seen.begin; tile < seen.end; ++tile)
      step(tile, large_ || tile < seen.full_begin || tile >= seen.full_end);
  }

  template <class Scores>
  __device__ __forceinline__ void bound(Scores& p) const {
    if (large_) for_each_score(p, [](float& x, int, int, int) { x = LargeLse::bound(x); });
  }

  /// The number of one of this lane's two rows of accumulators.
  __device__ __forceinline__ int row(int r) const { return first_row_ + lane_ / 4 + 8 * r; }
  template <class Rows, class Sum>
  __device__ __forceinline__ void store(const Rows& rows, int num_rows, const Sum& sum, float scale) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Element* const g_row = row(r) < num_rows ? rows.row(row(r)) : nullptr;
      write_out_row(g_row, sum, r, scale, lane_, static_cast<int>(p_.head_dim));
    }
  }

  const BackwardParams& p_;
  const BackwardShortStorage<Config>& storage_;
  const uint32_t tiles_;  // lower half of the descriptor of all tiles
  const uint32_t s_ds_;   // where warpgroups exchange dS
  const float scale_;     // of scores, to base 2
  const int group_, first_row_, lane_;
  const bool large_;  // some row has a LargeLse
};

}  // namespace flash_ext::sm90
