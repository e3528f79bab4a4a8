// The end of a CTA's rows: out and lse, and the non-finite values that were taken out of V.
#pragma once

#include "kernels/common/sanitise.cuh"
#include "products.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct ForwardOut : ForwardProducts<Config> {
  using Base = ForwardProducts<Config>;
  using Base::Base;
  using Base::constants, Base::kBlockM, Base::kBlockN, Base::kD, Base::kHeadDim, Base::kM, Base::kThreads, Base::lane,
      Base::p, Base::rows, Base::s_q, Base::warp_row, Base::work_tile;
  using typename Base::Element, typename Base::Products, typename Base::Unit;

  /// Normalises the rows, and stores lse and out. Out goes through the warp's own rows of Q in shared memory, so that
  /// it leaves in 16-byte chunks.
  __device__ __forceinline__ void store() {
    const Sequence& sequence = work_tile.sequence;
    const int first_query = work_tile.first_query;
    __syncwarp();
    const float sink = sink_of(p, sequence.head);
    float keep_scale = 1.0f;
    if constexpr (Config::kDropout) keep_scale = work_tile.options.dropout.keep_scale;
    float* g_lse = static_cast<float*>(p.lse.data) + sequence.lse_offset(p.lse);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scale = Unit::kNatural ? constants.scale : 1.0f;
        const RowEnd end = finish_row<Unit>(rows.stabiliser[m][r], rows.row_sum(m, r), sink, scale);
        const int row = warp_row + 16 * m + 8 * r + lane / 4;
        if (lane % 4 == 0 && first_query + row < sequence.seqlen_q) g_lse[first_query + row] = end.lse;
        const float factor = end.scale * keep_scale;
#pragma unroll
        for (int d = 0; d < kD; ++d)
          Products::store_pair(s_q + Products::pair_at(row, d, lane), rows.out[m][d][2 * r] * factor,
                               rows.out[m][d][2 * r + 1] * factor);
      }
    __syncwarp();
    const auto g_rows = query_rows<Element>(p.out, sequence);
    store_rows<Element, kHeadDim>(s_q, g_rows, warp_row, Config::kWarpRows, first_query, sequence.seqlen_q,
                                  static_cast<int>(p.head_dim_v), lane);
    __syncthreads();  // out is written
    if (work_tile.met_non_finite) {
      add_non_finite<Element, kThreads>(p, sequence, g_rows, work_tile.values, first_query,
                                        min(first_query + kBlockM, sequence.seqlen_q), work_tile.tiles.begin * kBlockN,
                                        min(work_tile.tiles.end * kBlockN, sequence.seqlen_k));
    }
  }
};

}  // namespace flash_ext::sm80
