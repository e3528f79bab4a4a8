// The rows of a consumer warpgroup: 64 queries whose S, P and O it holds in registers, its positions in the rings of K
// and V, and the parts from which all traversals build their steps.
#pragma once

#include "arguments.cuh"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/tma.h"
#include "kernels/ptx/wgmma.h"
#include "kernels/sm90/common/score_operand.cuh"
#include "kernels/sm90/common/softmax.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// Whether a key tile updates the row stabilisers. kFirst: it sets them. kNone: every row of the warpgroup sees all of
/// the tile and has a stabiliser already.
enum class RowMaxUpdate { kFirst, kMore, kNone };

/// The state of a consumer warpgroup. One lane of each warp arrives at a barrier, because the wait for wgmma is per
/// warp.
template <class Config>
class ForwardRows {
 public:
  using Element = typename Config::Element;
  using Storage = ForwardStorage<Config>;
  using WorkTile = ForwardWorkTile<Config>;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kD = Config::kHeadDimV / 8;
  static constexpr int kN = kBlockN / 8;
  static constexpr int kSteps = kBlockN / 16;  // of P V
  using Scores = float[1][kN][4];
  using Weights = uint32_t[kSteps][4];  // P as an operand
  using QueryTile = TileDescriptor<kWarpgroupRows>;
  using KeyTile = TileDescriptor<kBlockN>;  // and of values

  __device__ __forceinline__ ForwardRows(const ForwardArguments<Config>& arguments, Storage& storage, uint32_t s_tiles,
                                         int group, int lane, float scale)
      : p_(arguments.call.p),
        terms_(arguments.score_terms()),
        storage_(storage),
        warpgroup_(group),
        lane_(lane),
        warp_(static_cast<int>(threadIdx.x) / 32 % kWarpgroupWarps),
        scale_(scale),
        keys_(KeyTile::lower_half(s_tiles + Config::kKeysOffset)),
        s_tiles_(s_tiles) {}

 protected:
  __device__ __forceinline__ void release(const uint64_t& barrier) const {
    if (lane_ == 0) ptx::mbarrier_arrive(address(barrier));
  }

  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      stabiliser_[r] = -INFINITY;
      row_sum_[r] = 0.0f;
    }
    largest_.zero();
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) out_[d][e] = 0.0f;
  }

  __device__ __forceinline__ void wait_for_query(const WorkTile& work_tile) {
    if (!work_tile.has_rows(warpgroup_)) return;
    ptx::mbarrier_wait(address(storage_.q_full[query_tile()]), q_at_.parity());
    query_ = QueryTile::lower_half(s_tiles_ + query_tile() * Config::kQueryBytes);
    if constexpr (Config::kScoreOptions || Config::kVisible) {
      const int rows = work_tile.end_query - (work_tile.first_query + warpgroup_ * kWarpgroupRows);
      if (terms_.cap > 0.0f && rows < kWarpgroupRows) zero_query_rows(rows);
    }
  }

  /// Zeroes rows of Q from `first` on, which lie after the end of the sequence. All rows vote on how scores are capped,
  /// and these must not change the vote.
  __device__ __forceinline__ void zero_query_rows(int first) const {
    constexpr int kChunks = kPanelRowBytes / 16;
    auto* const s_query = static_cast<uint4*>(__cvta_shared_to_generic(s_tiles_ + query_tile() * Config::kQueryBytes));
#pragma unroll 1
    for (int panel = 0; panel < panels(kHeadDim); ++panel)
#pragma unroll 1
      for (int at = first * kChunks + warp_ * 32 + lane_; at < kWarpgroupRows * kChunks; at += kWarpgroupThreads)
        s_query[panel * kWarpgroupRows * kChunks + at] = uint4{0, 0, 0, 0};
    ptx::fence_proxy_async_shared();
    ptx::barrier_any<kWarpgroupThreads>(barrier_of_warpgroup(warpgroup_), false);
  }

  /// The index of this warpgroup's Q among all slots and warpgroups.
  __device__ __forceinline__ int query_tile() const { return q_at_.stage() * Config::kWarpgroups + warpgroup_; }

  __device__ __forceinline__ void wait_for_keys() const {
    ptx::mbarrier_wait(address(storage_.k_full[k_at_.stage()]), k_at_.parity());
  }

  /// Releases K of a tile whose S is complete and will not be computed again. With kOutInRings the last tile releases
  /// Q too, which has one slot.
  __device__ __forceinline__ void release_keys(const WorkTile& work_tile, int tile) {
    release(storage_.k_empty[k_at_.stage()]);
    k_at_.advance();
    if (Config::kOutInRings && tile == work_tile.last_tile(warpgroup_)) release(storage_.q_empty[warpgroup_]);
  }

  __device__ __forceinline__ void wait_for_values() const {
    ptx::mbarrier_wait(address(storage_.v_full[v_at_.stage()]), v_at_.parity());
  }

  __device__ __forceinline__ void release_values() {
    release(storage_.v_empty[v_at_.stage()]);
    v_at_.advance();
  }

  /// Computes S of the tile whose K has arrived.
  __device__ __forceinline__ void multiply_qk(Scores& s) const {
    start_qk(s);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(s[0]);
  }

  /// Computes S and P of the tile whose K has arrived. softmax(s) turns S into P.
  template <class Softmax>
  __device__ __forceinline__ void softmax_tile(const WorkTile& work_tile, int tile, Weights& p, Softmax softmax) {
    Scores s;
    multiply_qk(s);
    release_keys(work_tile, tile);
    softmax(s);
    pack(p, s);
  }

  /// Adds P V of a tile to O.
  __device__ __forceinline__ void add_values(const Weights& p) {
    wait_for_values();
    start_pv(p);
    finish_pv();
  }

  __device__ __forceinline__ void finish_pv() {
    ptx::wgmma_wait<0>();
    fence_out();
    release_values();
  }

  /// On return S of the tile whose K has arrived is complete, and P V of the tile before is in flight.
  __device__ __forceinline__ void start_step(Scores& s, const Weights& p) {
    start_qk(s);
    wait_for_values();
    start_pv(p);
    ptx::wgmma_wait<1>();
    ptx::fence_operand(s[0]);
  }

  /// Adds P V of the tile before and computes S and P of the tile whose K has arrived. kFixedMax: softmax(s) keeps the
  /// row max, so it runs while P V does. Otherwise it rescales out and must run after P V.
  template <bool kFixedMax, class Softmax>
  __device__ __forceinline__ void step(const WorkTile& work_tile, int tile, Weights& p, Softmax softmax) {
    Scores s;
    start_step(s, p);
    release_keys(work_tile, tile);
    if constexpr (kFixedMax) softmax(s);
    finish_pv();
    if constexpr (!kFixedMax) softmax(s);
    pack(p, s);
  }

  /// Turns S into P and adds its row sums.
  template <RowMaxUpdate kRowMaxUpdate, bool kRounds = false>
  __device__ __forceinline__ void softmax_step(Scores& s, const WorkTile& work_tile, int tile) {
    constexpr bool kFixedMax = kRowMaxUpdate == RowMaxUpdate::kNone;
    float sum[2];
    apply_options(s, work_tile, tile);
    if constexpr (!kFixedMax) {
      hide(s, work_tile, tile);
      update_row_max<kRowMaxUpdate == RowMaxUpdate::kFirst>(s);
    }
    exponentiate<kFixedMax, kRounds>(s, scale_, stabiliser_, sum, largest_);
    add_to_row_sums(sum);
  }

  __device__ __forceinline__ void add_to_row_sums(const float (&sum)[2]) {
    row_sum_[0] += sum[0];
    row_sum_[1] += sum[1];
  }

  /// Skips a tile that only other warpgroups see. It still waits for its barriers: otherwise this warpgroup could be a
  /// whole turn of the ring ahead, where parities repeat.
  __device__ __forceinline__ void skip_tile() {
    wait_for_keys();
    release(storage_.k_empty[k_at_.stage()]);
    k_at_.advance();
    wait_for_values();
    release_values();
  }

  /// Whether window and lengths hide no pair of a tile.
  __device__ __forceinline__ bool is_full(const WorkTile& work_tile, int tile) const {
    const TileSpan& rows = work_tile.rows[warpgroup_];
    return tile >= rows.full_begin && tile < rows.full_end;
  }

  __device__ __forceinline__ void hide(Scores& s, const WorkTile& work_tile, int tile) const {
    if (!is_full(work_tile, tile)) hide_outside_window(s, coordinates(work_tile, tile), work_tile.sequence);
  }

  /// Turns products into base-2 scores. hide(), where pairs may be hidden, comes after it.
  __device__ __forceinline__ void apply_options(Scores& s, const WorkTile& work_tile, int tile) const {
    if constexpr (Config::kScoreOptions) {
      const ScoreRules<Element> rules = this->rules(work_tile);
      scale_and_cap<Config::kCapsByProducts>(s, rules, terms_.softcap, is_full(work_tile, tile));
      rules.add_alibi(s, coordinates(work_tile, tile));
    }
  }

  __device__ __forceinline__ ScoreRules<Element> rules(const WorkTile& work_tile) const {
    ScoreRules<Element> rules(p_, work_tile.sequence);
    rules.scale = terms_.scale, rules.cap = terms_.cap;  // computed by the host: else doubles are divided here
    if constexpr (Config::kScoreOptions) rules.slope = work_tile.slope;
    return rules;
  }

  __device__ __forceinline__ TileCoordinates<false> coordinates(const WorkTile& work_tile, int tile) const {
    const int row = work_tile.first_query + warpgroup_ * kWarpgroupRows + warp_ * 16;
    return TileCoordinates<false>::of_lane(row, tile * kBlockN, lane_);
  }

  /// S = Q K^T
  __device__ __forceinline__ void start_qk(Scores& s) const {
    using Product = ptx::Wgmma<Element, kBlockN>;
    const uint32_t key = keys_ + k_at_.stage() * (Config::kKeyBytes / 16);
    ptx::wgmma_fence();
    Product::template multiply<false>(s[0], QueryTile::at(query_, 0), KeyTile::at(key, 0));
#pragma unroll
    for (int step = 1; step < kHeadDim / 16; ++step)
      Product::template multiply<true>(s[0], QueryTile::at(query_, QueryTile::along_row(step)),
                                       KeyTile::at(key, KeyTile::along_row(step)));
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ static void pack(Weights& p, const Scores& s) { pack_operand<Element>(p, s); }

  /// O += P V
  __device__ __forceinline__ void start_pv(const Weights& p) {
    using Product = ptx::Wgmma<Element, Config::kHeadDimV>;
    const uint32_t value =
        keys_ + (v_at_.stage() * (Config::kValueBytes / 16) + Config::kKeyStages * (Config::kKeyBytes / 16));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      Product::template multiply_registers<true>(out_, p[step], KeyTile::at(value, KeyTile::down_rows(step)));
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void fence_out() { ptx::fence_operand(out_); }

  /// Sets the stabiliser of each row to the maximum so far. kFirst: rows have none yet, and out is 0.
  template <bool kFirst = false>
  __device__ __forceinline__ void update_row_max(const Scores& s) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = -INFINITY;
#pragma unroll
      for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(s[0][n][2 * r], s[0][n][2 * r + 1]));
      largest = max_of_row(largest);
      if constexpr (kFirst) {
        stabiliser_[r] = largest * scale_;
        continue;
      }
      const float updated = fmaxf(stabiliser_[r], largest * scale_);
      const float factor = updated == -INFINITY ? 1.0f : ptx::exp2_approx(stabiliser_[r] - updated);
      stabiliser_[r] = updated;
      row_sum_[r] *= factor;
      largest_.rescale(r, factor);
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        out_[d][2 * r] *= factor;
        out_[d][2 * r + 1] *= factor;
      }
    }
  }

  const ForwardParams& p_;
  const ScoreTerms& terms_;
  Storage& storage_;
  const int warpgroup_, lane_, warp_;
  const float scale_;   // from products to base-2 scores; 1 with kScoreOptions, where apply_options() scales
  uint32_t query_ = 0;  // lower half of the descriptor of this work tile's Q
  const uint32_t keys_, s_tiles_;
  RingPosition<Config::kQuerySlots> q_at_;
  RingPosition<Config::kKeyStages> k_at_;
  RingPosition<Config::kValueStages> v_at_;

  float out_[kD][4];
  float stabiliser_[2];  // base 2; -inf while the row has seen no key
  float row_sum_[2];
  std::conditional_t<Config::kKeepsMaxLogit, LargestWeights, NoLargestWeights> largest_;
};

}  // namespace flash_ext::sm90
