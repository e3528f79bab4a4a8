// A consumer warpgroup of the float32 forward: S, P and O of 64 queries, and their store.
#pragma once

#include "kernels/common/score/scores.cuh"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/reread.h"
#include "kernels/sm90/common/float_products.cuh"
#include "producer.cuh"

namespace flash_ext::sm90 {

__device__ __forceinline__ int thread_of_warpgroup() { return static_cast<int>(threadIdx.x) % kWarpgroupThreads; }

/// The state and the steps of a consumer warpgroup.
template <class Config>
class ForwardF32Consumer {
 public:
  using Storage = ForwardF32Storage<Config>;
  using WorkTile = ForwardF32WorkTile<Config>;
  static constexpr int kPanels = Config::kPanels;
  static constexpr int kKeySubtiles = Config::kKeySubtiles;
  using Products = FloatProductsOf<Config::kBlockN>;
  static constexpr int kSteps = Products::kSteps, kEights = Products::kEights;
  using Tile = typename Products::Tile;
  using Weights = typename Products::Operand;
  using Scores = float[1][kEights][4];
  using Unit = ScoreUnit<float>;

  __device__ __forceinline__ ForwardF32Consumer(const ForwardParams& p, const ScoreFactors& factors, Storage& storage,
                                                char* shared, int group)
      : p_(p),
        factors_(factors),
        storage_(storage),
        warpgroup_(group),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32 % kWarpgroupWarps),
        query_(SubtileDescriptor::lower_half(ptx::shared_address(shared) + group * Config::kQueryBytes)),
        ring_(SubtileDescriptor::lower_half(ptx::shared_address(shared) + Config::kRingOffset)) {}

  __device__ __forceinline__ void run(char* s_query) {
    ForwardF32Queue<Config> queue(storage_);
#pragma unroll 1
    while (const WorkTile* const work_tile = queue.front()) {
      load_query(*work_tile, s_query);
      zero();
      visit(*work_tile);
      store(*work_tile);
      if (work_tile->met_non_finite) add_hidden_non_finite(*work_tile);
      queue.pop(lane_);
    }
  }

 private:
  __device__ __forceinline__ int first_row(const WorkTile& work_tile) const {
    return work_tile.first_query + warpgroup_ * kWarpgroupRows;
  }

  __device__ __forceinline__ void wait_for_warpgroup() const {
    const int warpgroup = ptx::reread(static_cast<int>(threadIdx.x)) / kWarpgroupThreads;
    ptx::barrier_any<kWarpgroupThreads>(ForwardF32Barriers::of_warpgroup(warpgroup), false);
  }

  __device__ __forceinline__ void load_query(const WorkTile& work_tile, char* s_query) const {
    wait_for_warpgroup();  // all warps have finished with the previous Q
    load_subtiles<kPanels, false>(s_query, query_rows<float>(p_.q, work_tile.sequence), first_row(work_tile),
                                  work_tile.end_query, static_cast<int>(p_.head_dim),
                                  ptx::reread(thread_of_warpgroup()));
    ptx::fence_proxy_async_shared();
    wait_for_warpgroup();
  }

  __device__ __forceinline__ void visit(const WorkTile& work_tile) {
    const TileSpan tiles = work_tile.tiles, rows = work_tile.rows[warpgroup_];
    int tile = tiles.end - 1;
    for (; tile >= rows.end; --tile) skip_tile();
#pragma unroll 1
    for (; tile >= rows.begin; --tile) step(work_tile, tile, tile < rows.full_begin || tile >= rows.full_end);
    for (; tile >= tiles.begin; --tile) skip_tile();
  }

  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      stabiliser_[r] = -INFINITY;
      row_sum_[r] = 0.0f;
    }
    for_each_score(out_, [](float& x, int, int, int) { x = 0.0f; });
  }

  /// Waits until the next subtile has arrived, and returns the lower half of its descriptor.
  __device__ __forceinline__ uint32_t wait_for_subtile() {
    ptx::mbarrier_wait(ptx::shared_address(&storage_.full[next_.stage()]), next_.parity());
    const uint32_t subtile = ring_ + next_.stage() * (Config::kStageBytes / 16);
    next_.advance();
    return subtile;
  }

  __device__ __forceinline__ void release_subtile() {
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&storage_.empty[done_.stage()]));
    done_.advance();
  }

  /// Skips a tile that only other warpgroups see. It still waits for the barriers, so that no warpgroup gets a phase
  /// ahead.
  __device__ __forceinline__ void skip_tile() {
#pragma unroll 1
    for (int subtile = 0; subtile < 2 * kKeySubtiles; ++subtile) {
      wait_for_subtile();
      release_subtile();
    }
  }

  __device__ __forceinline__ void step(const WorkTile& work_tile, int tile, bool partial) {
    Scores s;
    if constexpr (Config::kSmallSubtiles) {
      multiply_few_keys(s[0]);
    } else {
      multiply_keys(s[0]);
    }
    if constexpr (Config::kScoreOptions) {
      const ScoreRules<float> rules(p_, work_tile.sequence, factors_);
      rules.scale_and_cap(s);
      rules.add_alibi(s, coordinates(work_tile, tile));
    }
    if (partial) hide_outside_window(s, coordinates(work_tile, tile), work_tile.sequence);
    float factor[2];
    update_row_max(s, factor);
    float sum[2];
    exponentiate(s, sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum_[r] = fmaf(row_sum_[r], factor[r], sum[r]);
    Weights p;
    Products::pack(p, s[0]);
    add_values(p, factor);
  }

  __device__ __forceinline__ TileCoordinates<false> coordinates(const WorkTile& work_tile, int tile) const {
    return TileCoordinates<false>::of_lane(first_row(work_tile) + warp_ * 16, tile * Config::kBlockN, lane_);
  }

  /// S = Q K^T
  __device__ __forceinline__ void multiply_keys(Tile& s) {
    Tile rest;
    Products::start<true>(s, rest, query_, wait_for_subtile());
    if constexpr (kPanels == 2) {
      Products::start<false>(s, rest, query_ + kSubtileBytes / 16, wait_for_subtile());
      ptx::wgmma_wait<1>();
      release_subtile();
    }
    ptx::wgmma_wait<0>();
    ptx::fence_operand(s);
    ptx::fence_operand(rest);
    release_subtile();
    Products::add(s, rest);
  }

  /// S = Q K^T of a tile of 32 keys, whose parts are multiplied two at a time.
  __device__ __forceinline__ void multiply_few_keys(Tile& s) {
    typename Products::PairedSums sums;
#pragma unroll
    for (int subtile = 0; subtile < kKeySubtiles; ++subtile) {
      const uint32_t offset = subtile * Config::kBlockN / kPanelColumns * kSubtileBytes;
      const uint32_t query = query_ + (offset + SubtileDescriptor::along_row(subtile * kSteps % 4)) / 16;
      subtile == 0 ? Products::template start<true>(sums, query, wait_for_subtile())
                   : Products::template start<false>(sums, query, wait_for_subtile());
      if (subtile == 0) continue;
      ptx::wgmma_wait<1>();
      release_subtile();
    }
    ptx::wgmma_wait<0>();
    sums.fence_operand();
    release_subtile();
    sums.add_up(s);
  }

  /// Sets the stabiliser of each row to the maximum so far. The caller rescales out and row sums by `factor`.
  __device__ __forceinline__ void update_row_max(const Scores& s, float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = -INFINITY;
#pragma unroll
      for (int n = 0; n < kEights; ++n) largest = fmaxf(largest, fmaxf(s[0][n][2 * r], s[0][n][2 * r + 1]));
      largest = max_of_row(largest);
      const float updated = fmaxf(stabiliser_[r], largest);
      factor[r] = updated == -INFINITY ? 1.0f : weight(stabiliser_[r], updated);
      stabiliser_[r] = updated;
    }
  }

  /// Returns the factor from products to scores: 1 where score options have applied it already.
  __device__ __forceinline__ float scale() const { return Config::kScoreOptions ? 1.0f : factors_.scale; }

  /// Returns the exponential of the difference of two scores. Products are subtracted first and scaled then, so that
  /// the scores are not rounded.
  __device__ __forceinline__ float weight(float product, float stabiliser) const {
    return Unit::exp(product - stabiliser, scale());
  }

  /// Turns products into P, and sums this thread's share of the rows.
  __device__ __forceinline__ void exponentiate(Scores& s, float (&sum)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float stabiliser = stabiliser_[r] == -INFINITY ? 0.0f : stabiliser_[r];
      sum[r] = 0.0f;
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[0][n][2 * r + c];
          x = weight(x, stabiliser);
          sum[r] += x;
        }
    }
  }

  /// O = O factor + P V
  __device__ __forceinline__ void add_values(const Weights& p, const float (&factor)[2]) {
    constexpr int kSums = kKeySubtiles == 1 ? 1 : 2;  // in flight at a time
    Tile sum[kSums];
    Products::start(sum[0], p, wait_for_subtile());
#pragma unroll
    for (int subtile = 1; subtile < kKeySubtiles; ++subtile) {
      Products::start(sum[subtile % kSums], p, wait_for_subtile());
      ptx::wgmma_wait<1>();
      finish_softmax(sum[(subtile - 1) % kSums], subtile - 1, factor);
    }
    ptx::wgmma_wait<0>();
    finish_softmax(sum[(kKeySubtiles - 1) % kSums], kKeySubtiles - 1, factor);
  }

  __device__ __forceinline__ void finish_softmax(Tile& sum, int subtile, const float (&factor)[2]) {
    ptx::fence_operand(sum);
    release_subtile();
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& out = out_[(subtile * kEights + n) / 8][(subtile * kEights + n) % 8][e];
        out = fmaf(out, factor[e / 2], sum[n][e]);
      }
  }

  /// Normalises the rows and writes them.
  __device__ __forceinline__ void store(const WorkTile& work_tile) const {
    const Sequence& sequence = work_tile.sequence;
    const float sink = sink_of(p_, sequence.head);
    const auto rows = query_rows<float>(p_.out, sequence);
    float* const g_lse = static_cast<float*>(p_.lse.data) + sequence.lse_offset(p_.lse);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowEnd end = finish_row<Unit>(stabiliser_[r], sum_of_row(row_sum_[r]), sink, scale());
      const int row = first_row(work_tile) + warp_ * 16 + 8 * r + lane_ / 4;
      if (row >= work_tile.end_query) continue;
      if (lane_ % 4 == 0) g_lse[row] = end.lse;
      float* const g_row = rows.row(row);
#pragma unroll
      for (int n = 0; n < 8 * kPanels; ++n) {
        const int column = 8 * n + lane_ % 4 * 2;
        const float(&pair)[4] = out_[n / 8][n % 8];
        if (column < p_.head_dim_v)
          *reinterpret_cast<float2*>(g_row + column) =
              make_float2(pair[2 * r] * end.scale, pair[2 * r + 1] * end.scale);
      }
    }
  }

  /// Adds non-finite values of V to the rows that see them. Sanitising removed them because other rows do not.
  __device__ __forceinline__ void add_hidden_non_finite(const WorkTile& work_tile) const {
    const Sequence& sequence = work_tile.sequence;
    const TileSpan tiles = work_tile.rows[warpgroup_];
    wait_for_warpgroup();  // out is written
    add_non_finite<float, kWarpgroupThreads>(
        p_, sequence, query_rows<float>(p_.out, sequence), key_rows<float, false>(p_, p_.v, sequence),
        first_row(work_tile), min(first_row(work_tile) + kWarpgroupRows, work_tile.end_query),
        tiles.begin * Config::kBlockN, min(tiles.end * Config::kBlockN, sequence.seqlen_k),
        ptx::reread(thread_of_warpgroup()));
  }

  const ForwardParams& p_;
  const ScoreFactors& factors_;
  Storage& storage_;
  const int warpgroup_, lane_, warp_;
  const uint32_t query_, ring_;
  RingPosition<Config::kStages> next_, done_;

  float out_[kPanels][8][4];
  float stabiliser_[2];  // before scale(); -inf while the row has seen no key
  float row_sum_[2];
};

}  // namespace flash_ext::sm90
