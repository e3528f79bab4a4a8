// The consumer warps: they sum dS of a tile of dbias in registers, and store it.
#pragma once

#include "kernels/common/sanitise.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/cp_async.h"
#include "kernels/ptx/reread.h"
#include "kernels/ptx/shared_address.h"
#include "kernels/ptx/wgmma.h"
#include "kernels/sm90/common/store_rows.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// The state and the steps of a consumer warp.
template <class Config>
class BiasConsumer {
 public:
  using Element = typename Config::Element;
  using Storage = BiasStorage<Config>;
  using Bias = typename Config::Bias;
  static constexpr int kN = Config::kKeys / 8;
  static constexpr int kConsumerThreads = Config::kWarpgroups * kWarpgroupThreads;
  using Fragment = float[1][kN][4];
  using RowTile = TileDescriptor<Config::kRows>;
  using KeyTile = TileDescriptor<Config::kKeys>;

  __device__ __forceinline__ BiasConsumer(const BackwardParams& p, const BiasWorkTiles& work_tiles, Storage& storage,
                                          uint32_t s_slabs, uint32_t s_bias, int warp, int lane)
      : p_(p),
        work_tiles_(work_tiles),
        storage_(storage),
        lane_(lane),
        first_row_(warp * 16),
        s_bias_(s_bias + warp * bias_bytes()),
        rows_(RowTile::lower_half(s_slabs + warp / kWarpgroupWarps * panel_bytes(kWarpgroupRows))),
        keys_(KeyTile::lower_half(s_slabs + Config::kRowBytes)) {}

  __device__ __forceinline__ void run() {
    int work_tile = blockIdx.x;
    if (work_tiles_.buffers > 1) load_bias(work_tile, s_bias_);
#pragma unroll 1
    for (; work_tile < work_tiles_.count; work_tile += gridDim.x) {
      if (work_tiles_.buffers > 1) {
        load_bias(work_tile + gridDim.x, s_other_bias());
        ptx::cp_async_wait<1>();
      } else {
        load_bias(work_tile, s_bias_);
        ptx::cp_async_wait<0>();
      }
      __syncwarp();
      add_up();
      store(work_tile);
      if (work_tiles_.buffers > 1) s_bias_ = s_other_bias();
    }
  }

 private:
  __device__ __forceinline__ int bias_bytes() const {
    return p_.bias.dtype == DType::kFloat32 ? Bias::kBytes32 : Bias::kBytes16;
  }
  __device__ __forceinline__ Bias bias_tile() const { return {s_bias_, p_.bias, lane_}; }
  /// The buffer that is not in use.
  __device__ __forceinline__ uint32_t s_other_bias() const {
    const uint32_t s_first = ptx::shared_address(&storage_) + Storage::bytes() + first_row_ / 16 * bias_bytes();
    return 2 * s_first + Config::kWarps * bias_bytes() - s_bias_;
  }

  /// Loads the bias of a work tile, for all sequences: rows and keys that the first sequence lacks may exist in others.
  __device__ __forceinline__ void load_bias(int work_tile, uint32_t s_target) const {
    if (work_tile < work_tiles_.count) {
      __syncwarp();
      const DbiasTile tile = work_tiles_.tile(work_tile);
      Sequence sequence(p_, tile.batch, tile.head);
      sequence.seqlen_q = static_cast<int>(p_.seqlen_q);
      sequence.seqlen_k = static_cast<int>(p_.seqlen_k);
      Bias{s_target, p_.bias, lane_}.load(sequence, tile.query * Config::kRows + first_row_, tile.key * Config::kKeys);
    }
    ptx::cp_async_commit();
  }

  /// Whether the warp's part of the bias holds neither Inf nor NaN; -Inf hides pairs.
  __device__ __forceinline__ bool bias_is_finite() const {
    uint32_t found = 0;
    if (p_.bias.dtype == DType::kFloat32) {
      found = non_finite<float>(Bias::kBytes32);
    } else if (p_.bias.dtype == DType::kFloat16) {
      found = non_finite<__half>(Bias::kBytes16);
    } else {
      found = non_finite<__nv_bfloat16>(Bias::kBytes16);
    }
    return !__any_sync(~0u, found != 0);
  }
  template <class T>
  __device__ __forceinline__ uint32_t non_finite(int bytes) const {
    const int end = p_.bias.row_stride == 0 ? bytes / 16 : bytes;  // one row stands for all
    uint32_t found = 0;
#pragma unroll 4
    for (int at = lane_ * 16; at < end; at += 32 * 16)
      found |= NonFinite<T>::in_chunk(load_shared<uint4>(s_bias_ + at));
    return found;
  }

  /// Sums dS of all score tiles of a work tile.
  __device__ __forceinline__ void add_up() {
    for_each_score(sum_, [](float& x, int, int, int) { x = 0.0f; });
    const bool plain = bias_is_finite() && p_.softcap == 0.0 && !p_.alibi_slopes;
#pragma unroll 1
    while (true) {
      wait_for(storage_.step_full[step_at_.stage()], step_at_.parity());
      const BiasStep& step = storage_.steps[step_at_.stage()];
      const bool ends = step.ends_work_tiles;
      if (!ends) add(step, plain && step.all_visible);
      arrive_as_warp(storage_.step_empty[step_at_.stage()], lane_);
      step_at_.advance();
      if (ends) return;
    }
  }

  __device__ __forceinline__ void add(const BiasStep& step, bool plain) {
    Fragment s, dp;
    const RingCount<Config::kStages> first = slab_at_;
    multiply(s);
    if constexpr (!Config::kOverlap) {
      ptx::wgmma_wait<0>();
      release(first);
    }
    const RingCount<Config::kStages> second = slab_at_;
    multiply(dp);
    if constexpr (Config::kOverlap) {
      ptx::wgmma_wait<1>();
      release(first);
    }
    ptx::fence_operand(s[0]);
    if (plain) {
      compute_plain_p(s);
    } else {
      compute_p(s, step);
    }
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dp[0]);
    release(second);
    const float* const s_delta = storage_.delta[step_at_.stage()] + first_row_ + lane_ / 4;
    const float delta[2] = {s_delta[0], s_delta[8]};
    if (plain) {
      for_each_score(s, [&](float& x, int m, int n, int e) {
        sum_[m][n][e] = fmaf(x, dp[m][n][e] - delta[e / 2], sum_[m][n][e]);
      });
    } else {
      // Where the weight is 0, dP and delta may be NaN, from keys or rows that this query does not see.
      for_each_score(s, [&](float& x, int m, int n, int e) {
        if (x != 0.0f) sum_[m][n][e] = fmaf(x, dp[m][n][e] - delta[e / 2], sum_[m][n][e]);
      });
    }
  }

  /// Starts c = A B^T of the next slabs, as one group of products.
  __device__ __forceinline__ void multiply(Fragment& c) {
    using Product = ptx::Wgmma<Element, Config::kKeys>;
#pragma unroll
    for (int slab = 0; slab < Config::kSlabs; ++slab) {
      wait_for(storage_.slab_full[slab_at_.stage()], slab_at_.parity());
      const uint32_t offset = slab_at_.stage() * (Config::kStageBytes / 16);
      const uint32_t row = rows_ + offset, key = keys_ + offset;
      if (slab == 0) {
        ptx::wgmma_fence();
        Product::template multiply<false>(c[0], RowTile::at(row, 0), KeyTile::at(key, 0));
      }
#pragma unroll
      for (int step = slab == 0 ? 1 : 0; step < kPanelColumns / 16; ++step)
        Product::template multiply<true>(c[0], RowTile::at(row, RowTile::along_row(step)),
                                         KeyTile::at(key, KeyTile::along_row(step)));
      slab_at_.advance();
    }
    ptx::wgmma_commit();
  }

  /// Releases the slabs of a product.
  __device__ __forceinline__ void release(RingCount<Config::kStages> at) const {
#pragma unroll
    for (int slab = 0; slab < Config::kSlabs; ++slab) {
      arrive_as_warp(storage_.slab_empty[at.stage()], lane_);
      at.advance();
    }
  }

  __device__ __forceinline__ void load_lse(float (&lse)[2]) const {
    const float* const s_lse = storage_.lse[step_at_.stage()] + first_row_ + lane_ / 4;
    lse[0] = s_lse[0];
    lse[1] = s_lse[8];
  }

  /// Turns Q K^T into P where scores get no other term than a bias without -inf.
  __device__ __forceinline__ void compute_plain_p(Fragment& s) const {
    const float scale = score_scale(p_, kLog2E);
    float lse[2];
    load_lse(lse);
    // A row that sees nothing has weight 0.
    const float shift[2] = {lse[0] == -INFINITY ? -INFINITY : -kLog2E * lse[0],
                            lse[1] == -INFINITY ? -INFINITY : -kLog2E * lse[1]};
    for_each_score(s, [&](float& x, int, int, int e) { x = fmaf(x, scale, shift[e / 2]); });
    bias_tile().add(s, kLog2E);
    for_each_score(s, [](float& x, int, int, int) { x = LargeLse::bound(ptx::exp2_approx(x)); });
  }

  __device__ __forceinline__ void compute_p(Fragment& s, const BiasStep& step) const {
    const Sequence sequence(p_, step.batch, step.head);
    const auto at = TileCoordinates<false>::of_lane(step.first_query + first_row_, step.first_key, ptx::reread(lane_));
    const ScoreRules<Element> rules(p_, sequence);
    rules.scale_and_cap(s);
    rules.add_alibi(s, at);
    bias_tile().add(s, kLog2E);
    if (!step.all_visible) hide_outside_window(s, at, sequence);
    float lse[2];
    load_lse(lse);
    for_each_score(s, [&](float& x, int, int, int e) { x = visible_weight<BaseTwoUnit>(x, lse[e / 2]); });
    bias_tile().hide(s);
  }

  /// Stores the tile to dbias, or to the share of a chunk.
  __device__ __forceinline__ void store(int work_tile) {
    const DbiasTile tile = work_tiles_.tile(work_tile);
    const int64_t keys = p_.seqlen_k, rows = p_.dbias.row_stride == 0 ? 1 : p_.seqlen_q;
    ScoreView target = p_.dbias;
    if (work_tiles_.shares) {
      const BiasTiles& tiles = work_tiles_.tiles;
      const int64_t share = work_tiles_.chunk(work_tile);
      target = {work_tiles_.shares + share * tiles.batches * tiles.heads * rows * keys,
                DType::kFloat32,
                tiles.heads * rows * keys,
                rows * keys,
                p_.dbias.row_stride == 0 ? 0 : keys,
                1};
    }
    const int first_key = tile.key * Config::kKeys;
    const int64_t offset = tile.batch * target.batch_stride + tile.head * target.head_stride + first_key;
    const int num_keys = static_cast<int>(min(keys - first_key, int64_t{Config::kKeys}));
    if (target.row_stride == 0) {
      store_columns(static_cast<float*>(target.data) + offset, num_keys);
      return;
    }
    const int first_row = tile.query * Config::kRows + first_row_;
    const int num_rows = static_cast<int>(min(rows - first_row, int64_t{16}));
    switch (target.dtype) {
      case DType::kFloat16:
        return store_rows(static_cast<__half*>(target.data) + offset + first_row * target.row_stride, target.row_stride,
                          num_rows, num_keys);
      case DType::kBFloat16:
        return store_rows(static_cast<__nv_bfloat16*>(target.data) + offset + first_row * target.row_stride,
                          target.row_stride, num_rows, num_keys);
      default:
        return store_rows(static_cast<float*>(target.data) + offset + first_row * target.row_stride, target.row_stride,
                          num_rows, num_keys);
    }
  }

  /// Stores the sums over all rows of the CTA. All consumer warps call it.
  __device__ __forceinline__ void store_columns(float* g_columns, int num_keys) {
    const int warp = first_row_ / 16;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = sum_[0][n][c] + sum_[0][n][2 + c];
#pragma unroll
        for (int lanes = 16; lanes >= 4; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
        if (lane_ < 4) storage_.columns[warp][8 * n + 2 * lane_ + c] = x;
      }
    ptx::barrier_sync<kColumnSums, kConsumerThreads>();
    const int column = warp * 32 + lane_;
    if (column < num_keys) {
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < Config::kWarps; ++k) sum += storage_.columns[k][column];
      g_columns[column] = sum;
    }
    ptx::barrier_sync<kColumnSums, kConsumerThreads>();  // the sums have been read
  }

  template <class T>
  __device__ __forceinline__ void store_rows(T* g_rows, int64_t row_stride, int num_rows, int num_keys) const {
    const auto start = reinterpret_cast<uint64_t>(g_rows), stride = static_cast<uint64_t>(row_stride) * sizeof(T);
    const bool aligned = (start | stride) % 16 == 0;
    if (num_rows < 16 || num_keys < Config::kKeys || !aligned) {
      store_elements(g_rows, row_stride, num_rows, num_keys);
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      T* const g_row = g_rows + (lane_ / 4 + 8 * r) * row_stride;
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int n = 0; n < kN; ++n)
          *reinterpret_cast<float2*>(g_row + 8 * n + 2 * (lane_ % 4)) =
              make_float2(sum_[0][n][2 * r], sum_[0][n][2 * r + 1]);
      } else {
        write_out_row(g_row, sum_[0], r, 1.0f, lane_, Config::kKeys);
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void store_elements(T* g_rows, int64_t row_stride, int num_rows, int num_keys) const {
    const int lane = ptx::reread(lane_), first_key = 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      T* const g_lane = g_rows + (lane / 4 + 8 * r) * row_stride + first_key;
      const int keys = lane / 4 + 8 * r < num_rows ? num_keys - first_key : 0;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * n + c < keys) g_lane[8 * n + c] = static_cast<T>(sum_[0][n][2 * r + c]);
    }
  }

  const BackwardParams& p_;
  const BiasWorkTiles& work_tiles_;
  Storage& storage_;
  const int lane_, first_row_;  // first_row_: of the warp in the CTA's rows
  uint32_t s_bias_;             // the warp's part of the bias buffer in use
  const uint32_t rows_, keys_;  // lower halves of descriptors
  RingCount<Config::kStages> slab_at_;
  RingCount<Config::kSlots> step_at_;

  Fragment sum_;
};

}  // namespace flash_ext::sm90
