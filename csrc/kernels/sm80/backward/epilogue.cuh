// The store of dK and dV, or of the sums of a split.
#pragma once

#include "kernels/common/backward/split_sums.cuh"
#include "softmax.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct BackwardSums : BackwardSoftmax<Config> {
  using Base = BackwardSoftmax<Config>;
  using Base::Base;
  using Base::first_row, Base::kBlockN, Base::kD, Base::kHeadDim, Base::kM, Base::kQueriesHoldKeys, Base::lane,
      Base::makes_p, Base::p, Base::rematerialise, Base::s_key, Base::s_query, Base::sum, Base::sync_role, Base::warp,
      Base::work_tile, Base::workspace;
  using typename Base::Element, typename Base::Rows;

  /// Stores dV through the tile of V, which is no longer needed. Stores dK, once all dS warps are done, through the
  /// stages of Q, or through the tile of K where these are too small. So both leave in 16-byte chunks.
  __device__ __forceinline__ void store_sums() {
    if (work_tile.sums) return store_split();
    const int lane = rematerialise(this->lane);
    const uint32_t s_tile = makes_p ? rematerialise(s_key) + Config::kKeyBytes : kQueriesHoldKeys ? s_query : s_key;
    const float keep_scale = Config::kHasOptions ? workspace.keep_scale : 1.0f;
    const float factor = makes_p ? keep_scale : keep_scale * static_cast<float>(p.softmax_scale);
    const int first_d = warp % Config::kRoleWarps / Config::kWarpsAlongKeys * (kD / 2);
    const uint32_t s_lane = s_tile + Rows::lane_c(lane) + rematerialise(first_row) * Rows::kRowBytes;
    if (!makes_p) sync_role();
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int d = 0; d < kD; d += 2) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum[m][d][e] *= factor;
          sum[m][d + 1][e] *= factor;
        }
        Rows::store_c(s_lane, 16 * m, first_d + d / 2, sum[m][d], sum[m][d + 1]);
      }
    sync_role();
    const TensorView& view = makes_p ? p.dv : p.dk;
    if (!view.data) return;
    constexpr int kRowsOfWarp = kBlockN / Config::kRoleWarps;
    store_rows<Element, kHeadDim>(s_tile, key_rows<Element, false>(p, view, work_tile.sequence),
                                  warp % Config::kRoleWarps * kRowsOfWarp, kRowsOfWarp, work_tile.first_key,
                                  work_tile.sequence.seqlen_k, static_cast<int>(makes_p ? p.head_dim_v : p.head_dim),
                                  lane);
  }

  /// Stores the sums of a split in its slot of scratch memory.
  __device__ __forceinline__ void store_split() const {
    const int thread = ptx::reread(static_cast<int>(threadIdx.x)), warp = thread / 32;
    const bool is_value = warp < Config::kRoleWarps;
    const float keep_scale = Config::kHasOptions ? workspace.keep_scale : 1.0f;
    const float factor = is_value ? keep_scale : keep_scale * static_cast<float>(p.softmax_scale);
    const int row = warp % Config::kWarpsAlongKeys * kM,
              column = warp % Config::kRoleWarps / Config::kWarpsAlongKeys * kD;
    float* const g_sums = work_tile.sums + (is_value ? kBlockN * kHeadDim : 0);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int d = 0; d < kD; ++d)
        store_fragment(sum_fragment<kHeadDim>(g_sums, row + m, column + d), sum[m][d], factor, thread % 32);
  }
};

}  // namespace flash_ext::sm80
