// The rows of a warpgroup of the short forward: 64 queries, whose S, P and O it holds in registers.
#pragma once

#include "kernels/common/sanitise.cuh"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/bulk.h"
#include "kernels/ptx/wgmma.h"
#include "kernels/sm90/common/row_end.cuh"
#include "kernels/sm90/common/score_operand.cuh"
#include "kernels/sm90/common/softmax.cuh"
#include "kernels/sm90/common/store_rows.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

template <class Config>
class ForwardShortRows {
 public:
  using Element = typename Config::Element;
  using Storage = ForwardShortStorage<Config>;
  using Loads = ForwardShortLoads<Config>;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;

  __device__ __forceinline__ ForwardShortRows(const ForwardShortCall& call, Storage& storage, const Loads& loads,
                                              const Sequence& sequence, uint32_t s_tiles, int first_query, int group,
                                              int warp, int lane)
      : call_(call),
        storage_(storage),
        loads_(loads),
        sequence_(sequence),
        s_tiles_(s_tiles),
        first_query_(first_query + group * kWarpgroupRows),
        group_(group),
        warp_(warp),
        lane_(lane) {}

  /// Visits the key tiles of the CTA, which follow `loaded` earlier ones through the rings. `sanitises`: partial tiles
  /// of V are sanitised.
  __device__ __forceinline__ void visit(const TileSpan& tiles, int loaded, bool sanitises) {
    const int end_query = min(first_query_ + kWarpgroupRows, sequence_.seqlen_q);
    const TileSpan seen = sequence_.template key_tiles<kBlockN>(first_query_, end_query);
    for (int r = 0; r < 2; ++r) row_max_[r] = -INFINITY, row_sum_[r] = 0.0f;
    zero_accumulators(out_);
    wait_for(storage_.q_full, 0);
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile, ++loaded) {
      const int stage = loaded % Config::kStages;
      const uint32_t parity = loaded / Config::kStages & 1;
      const bool sees = tile >= seen.begin && tile < seen.end;
      const int next = tile + Config::kStages;  // the tile that the stage holds afterwards
      Weights p;
      wait_for(storage_.k_full[stage], parity);
      if (sees) {
        Scores s;
        multiply(s, stage);
        if (tile < seen.full_begin || tile >= seen.full_end)
          hide_outside_window(s, TileCoordinates<false>::of_lane(first_query_ + warp_ * 16, tile * kBlockN, lane_),
                              sequence_);
        softmax(s);
        pack_operand<Element>(p, s);
      }
      if (next < tiles.end && is_last_user(storage_.k_uses[stage])) loads_.refill_keys(stage, next);
      __syncwarp();
      wait_for(storage_.v_full[stage], parity);
      if (sanitises && (tile < tiles.full_begin || tile >= tiles.full_end)) sanitise(stage);
      if (sees) add_values(p, stage);
      if (next < tiles.end && is_last_user(storage_.v_uses[stage])) loads_.refill_values(stage, next);
      __syncwarp();
    }
  }

  /// Whether an element of out is Inf or NaN: perhaps because of a value that its row does not see.
  __device__ __forceinline__ bool met_non_finite() const {
    float trace = 0.0f;
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) trace = fmaf(0.0f, out_[d][e], trace);
    return trace != 0.0f;
  }

  /// Normalises the rows, and stores out and lse.
  __device__ __forceinline__ void store(const CUtensorMap& out_map) {
    if (first_query_ >= sequence_.seqlen_q) return;
    float scale[2];
    float* const g_lse = static_cast<float*>(call_.lse.data) + sequence_.lse_offset(call_.lse);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = sum_of_row(row_sum_[r]);
      const RowEnd end =
          call_.sink ? finish_row(row_max_[r], sum, call_.sink[sequence_.head]) : finish_row_approx(row_max_[r], sum);
      scale[r] = end.scale;
      const int row = first_query_ + warp_ * 16 + 8 * r + lane_ / 4;
      if (lane_ % 4 == 0 && row < sequence_.seqlen_q) g_lse[row] = end.lse;
    }
    const uint32_t s_out = s_tiles_ + group_ * Config::kQueryBytes;
    // Over Q of this warp's own rows, which nobody else reads.
    write_out_tile<Element>(s_out, out_, scale, warp_ * 16, lane_);
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync<kWarpgroupThreads>(1 + group_);  // out of all warps is there
    if (warp_ != 0 || lane_ != 0) return;
#pragma unroll
    for (int panel = 0; panel < Config::kPanels; ++panel)
      ptx::tma_store(&out_map, s_out + panel * panel_bytes(kWarpgroupRows), panel * kPanelColumns, first_query_,
                     sequence_.head, sequence_.batch);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();  // shared memory is not given to another CTA before
  }

  /// Adds Inf and NaN, which sanitise() has removed, to the rows that see them.
  __device__ __forceinline__ void add_removed(const ForwardParams& p, const TileSpan& tiles) const {
    if (first_query_ >= sequence_.seqlen_q) return;
    if (warp_ == 0 && lane_ == 0) ptx::bulk_wait();  // out is in memory
    ptx::fence_proxy_async_global();
    ptx::barrier_sync<kWarpgroupThreads>(1 + group_);
    AttentionParams without_masks;  // this kernel has none
    without_masks.head_dim_v = p.head_dim_v;
    add_non_finite<Element, kWarpgroupThreads>(without_masks, sequence_, query_rows<Element>(p.out, sequence_),
                                               key_rows<const Element, false>(p, p.v, sequence_), first_query_,
                                               min(first_query_ + kWarpgroupRows, sequence_.seqlen_q),
                                               tiles.begin * kBlockN, min(tiles.end * kBlockN, sequence_.seqlen_k),
                                               32 * warp_ + lane_);
  }

 private:
  static constexpr int kD = kHeadDim / 8, kN = kBlockN / 8, kSteps = kBlockN / 16;
  using Scores = float[1][kN][4];
  using Weights = uint32_t[kSteps][4];  // P as an operand
  using QueryTile = TileDescriptor<kWarpgroupRows>;
  using KeyTile = TileDescriptor<kBlockN>;  // and of values

  /// S = Q K^T
  __device__ __forceinline__ void multiply(Scores& s, int stage) const {
    using Product = ptx::Wgmma<Element, kBlockN>;
    const uint32_t query = QueryTile::lower_half(s_tiles_ + group_ * Config::kQueryBytes);
    const uint32_t keys = KeyTile::lower_half(s_tiles_ + Config::kKeysOffset + stage * Config::kKeyBytes);
    ptx::wgmma_fence();
    Product::template multiply<false>(s[0], QueryTile::at(query, 0), KeyTile::at(keys, 0));
#pragma unroll
    for (int step = 1; step < kHeadDim / 16; ++step)
      Product::template multiply<true>(s[0], QueryTile::at(query, QueryTile::along_row(step)),
                                       KeyTile::at(keys, KeyTile::along_row(step)));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_operand(s[0]);
  }

  /// O += P V
  __device__ __forceinline__ void add_values(const Weights& p, int stage) {
    using Product = ptx::Wgmma<Element, kHeadDim>;
    const uint32_t values = KeyTile::lower_half(s_tiles_ + Config::kValuesOffset + stage * Config::kKeyBytes);
    ptx::fence_operand(out_);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      Product::template multiply_registers<true>(out_, p[step], KeyTile::at(values, KeyTile::down_rows(step)));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_operand(out_);
  }

  /// Updates the running max of each row, rescales, and turns scores into P. Scores and max are rounded alike, so the
  /// largest score of a row has the weight 1.
  __device__ __forceinline__ void softmax(Scores& s) {
    float factor[2], sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = -INFINITY;
#pragma unroll
      for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(s[0][n][2 * r], s[0][n][2 * r + 1]));
      const float updated = fmaxf(row_max_[r], __fmul_rn(max_of_row(largest), call_.scale));
      factor[r] = updated == -INFINITY ? 1.0f : ptx::exp2_approx(row_max_[r] - updated);
      row_max_[r] = updated;
    }
    exponentiate<false, true>(s, call_.scale, row_max_, sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum_[r] = row_sum_[r] * factor[r] + sum[r];
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) out_[d][e] *= factor[e / 2];
  }

  /// Counts this warp as one that has used a stage: the wait for wgmma is per warp. True for one lane of the last one.
  __device__ __forceinline__ bool is_last_user(uint32_t& uses) const {
    __syncwarp();
    return lane_ == 0 && count_use(uses, Config::kWarps);
  }

  /// Removes Inf and NaN from a tile of V, by all threads of the CTA.
  __device__ __forceinline__ void sanitise(int stage) const {
    constexpr int kChunks = Config::kKeyBytes / 16;
    const uint32_t s_values = s_tiles_ + Config::kValuesOffset + stage * Config::kKeyBytes;
    sanitise_chunks<Element, false, kChunks, Config::kThreads, 1>(
        static_cast<int>(threadIdx.x), [=](int k) -> uint4& { return shared_chunk(s_values + k * 16); });
    ptx::fence_proxy_async_shared();
    __syncthreads();
  }

  const ForwardShortCall& call_;
  Storage& storage_;
  const Loads& loads_;
  const Sequence& sequence_;
  const uint32_t s_tiles_;
  const int first_query_;
  const int group_, warp_, lane_;

  float out_[kD][4];
  float row_max_[2];  // base 2: the running max
  float row_sum_[2];  // this lane's share
};

}  // namespace flash_ext::sm90
