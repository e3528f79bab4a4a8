// dQ = dS K where dS has been left in shared memory: a warpgroup has 64 queries and visits all blocks of keys of which
// they see some. These are the blocks whose warpgroups have visited the queries: both look at the same band of pairs.
#pragma once

#include "block.cuh"
#include "kernels/ptx/wgmma.h"

namespace flash_ext::sm90 {

/// A warp of a warpgroup that computes dQ.
template <class Config>
class BackwardShortQuerySums : BackwardShortBlock<Config> {
  using Base = BackwardShortBlock<Config>;
  using typename Base::Element;
  using Tile = TileDescriptor<kWarpgroupRows>;
  using Panel = float[kPanelColumns / 8][4];

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    const int first = this->group_ * kWarpgroupRows, end = min(first + kWarpgroupRows, this->sequence().seqlen_q);
    if (first >= end || !p_.dq.data) return;
    const TileSpan seen = this->sequence().template key_tiles<kWarpgroupRows>(first, end);
    zero_accumulators(dq_);
    this->visit(seen, [&](int tile, bool) { step(tile); });
    this->store(query_rows<Element>(p_.dq, this->sequence()), this->sequence().seqlen_q, dq_,
                static_cast<float>(p_.softmax_scale));
  }

 private:
  using Base::p_;

  /// Adds a key tile. Both operands have keys as rows, over which the product sums.
  __device__ __forceinline__ void step(int tile) {
    using Product = ptx::Wgmma<Element, kPanelColumns>;
    const uint32_t ds = Tile::lower_half(this->s_ds_ + this->group_ * panel_bytes(Config::kRows)) +
                        tile * (panel_bytes(kWarpgroupRows) / 16);
    const uint32_t keys = this->rows_at(Config::kKeysOffset, tile * kWarpgroupRows);
    ptx::wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < Config::kPanels; ++panel)
#pragma unroll
      for (int k = 0; k < kWarpgroupRows / 16; ++k)
        Product::template multiply<true, ptx::Major::kMN, ptx::Major::kMN>(
            reinterpret_cast<Panel&>(dq_[panel * (kPanelColumns / 8)]), Tile::at(ds, Tile::down_rows(k)),
            Tile::at(keys, panel * panel_bytes(kWarpgroupRows) + Tile::down_rows(k)));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dq_);
  }

  float dq_[Config::kHeadDim / 8][4];
};

}  // namespace flash_ext::sm90
