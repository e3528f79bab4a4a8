// The warpgroups that compute scores and dV, and gradients of scores and dK, of the 64 keys of a block: for head dims
// above 128, where dK or dV alone fills the registers of one.
#pragma once

#include "../common/non_finite.cuh"
#include "../common/scores.cuh"
#include "../ptx/barrier.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/reread.h"
#include "../ptx/stmatrix_trans.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "../sm80/tile.cuh"
#include "backward_wide_work.cuh"
#include "forward_out.cuh"

namespace flash_ext::sm90 {

/// What one warp of them does. kGradients: dP, dS and dK; else S, P and dV.
template <class Config, bool kGradients>
class BackwardWideGroup {
 public:
  using Element = typename Config::Element;
  using State = BackwardWideState<Config>;
  using Work = BackwardWork<Config>;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM;
  static constexpr int kN = kBlockM / 8, kD = kHeadDim / 8;
  static constexpr int kSteps = kBlockM / 16;  // of products over queries
  static constexpr int kComputing = 2 * kGroupThreads;
  using Scores = float[1][kN][4];       // of keys (rows) and queries
  using Weights = uint32_t[kSteps][4];  // as an operand
  using Sum = float[kD][4];
  using At = RingCount<Config::kStages>;
  using Tile = TileDescriptor<kGroupRows>;
  static_assert(kBlockM == kGroupRows, "tiles of queries and of keys have as many rows");

  __device__ __forceinline__ BackwardWideGroup(const BackwardParams& p, State& state, uint32_t s_tiles, float scale,
                                               int rank, int lane)
      : p_(p),
        state_(state),
        work_(state.work()),
        rank_(rank),
        warp_(static_cast<int>(threadIdx.x) / 32 % kGroupWarps),
        lane_(lane),
        s_tiles_(s_tiles),
        scale_(scale),
        keys_(Tile::lower_half(without_rank(s_tiles) + (kGradients ? Config::kValuesOffset : 0))),
        queries_(Tile::lower_half(without_rank(s_tiles) + Config::kQueriesOffset)) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum_[d][e] = 0.0f;
    clean_keys();  // waits for them, too, lest the copy engine outlives a block
                   // that has no queries
#pragma unroll 1
    for (int head = 0; head < work_.heads; ++head) visit_head();
    if constexpr (kGradients) {
      store(p_.dk, static_cast<float>(p_.softmax_scale));
    } else {
      store(p_.dv, 1.0f);
    }
  }

 private:
  __device__ __forceinline__ static uint32_t address(const uint64_t& barrier) { return ptx::shared_address(&barrier); }
  __device__ __forceinline__ void release(const uint64_t& barrier) const {
    if (lane_ == 0) ptx::mbarrier_arrive(address(barrier));
  }
  __device__ __forceinline__ void release_query(At at) const { release(state_.q_empty[at.stage()]); }
  __device__ __forceinline__ void release_grad(At at) const { release(state_.do_empty[at.stage()]); }
  __device__ __forceinline__ void wait_for_query(At at) const {
    ptx::mbarrier_wait(address(state_.q_full[at.stage()]), at.parity());
  }
  __device__ __forceinline__ void wait_for_grad(At at) const {
    ptx::mbarrier_wait(address(state_.do_full[at.stage()]), at.parity());
  }
  __device__ __forceinline__ void wait_for_p(At at) const { ptx::mbarrier_wait(address(state_.p_full), at.count % 2); }
  __device__ __forceinline__ void wait_for_p_room(At at) const {
    ptx::mbarrier_wait(address(state_.ds_empty), at.count % 2 ^ 1);
  }
  __device__ __forceinline__ int thread() const { return warp_ * 32 + lane_; }

  __device__ __forceinline__ void visit_head() {
    const TileSpan& seen = work_.groups[rank_];
    const bool sees = seen.begin < seen.end;
    int tile = work_.tiles.begin;
#pragma unroll 1
    for (const int end = sees ? seen.begin : work_.tiles.end; tile < end; ++tile) pass(tile);
    if (!sees) return;
#pragma unroll 1
    for (; tile < seen.end; ++tile) step(tile);
#pragma unroll 1
    for (; tile < work_.tiles.end; ++tile) pass(tile);
  }

  /// A tile that only the other block's keys see. Barriers are waited for all the same, lest one gets ahead by two
  /// phases.
  __device__ __forceinline__ void pass(int tile) {
    clean(tile, at_);
    if constexpr (kGradients) {
      wait_for_grad(at_);
      release_grad(at_);
      wait_for_p(at_);
#pragma unroll
      for (int k = 0; k < Config::kDsBytes / 16 / kGroupThreads; ++k)
        sm80::store_shared(s_tiles_ + Config::kDsOffset + (k * kGroupThreads + thread()) * 16, uint4{0, 0, 0, 0});
      hand_ds_over();
      wait_for_query(at_);
      release_query(at_);
    } else {
      wait_for_query(at_);
      release_query(at_);
      wait_for_p_room(at_);
      hand_p_over();
      wait_for_grad(at_);
      release_grad(at_);
    }
    at_.advance();
  }

  __device__ __forceinline__ void hand_p_over() const {
    __syncwarp();
    release(state_.p_full);
  }
  __device__ __forceinline__ void hand_ds_over() const {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    release(state_.ds_full);
  }

  /// P and dV, or dS and dK, of a tile of which this block's keys see something.
  __device__ __forceinline__ void step(int tile) {
    Scores s;
    Weights weights;
    clean(tile, at_);
    start_product(s, at_);
    ptx::wgmma_wait<0>();
    finish_product(s, tile, at_);
    make_weights(weights, s, tile, at_);
    if constexpr (kGradients) {
      wait_for_query(at_);
      start_sum(weights, queries(at_));
    } else {
      wait_for_grad(at_);
      start_sum(weights, grads(at_));
    }
    ptx::wgmma_wait<0>();
    pin_sum();
    if constexpr (kGradients) {
      release_query(at_);
    } else {
      release_grad(at_);
    }
    at_.advance();
  }

  /// Whether something is hidden from this block's keys.
  __device__ __forceinline__ bool hides(int tile) const {
    const TileSpan& seen = work_.groups[rank_];
    return tile < seen.full_begin || tile >= seen.full_end;
  }

  /// Lower halves of descriptors.
  __device__ __forceinline__ uint32_t queries(At at) const {
    return queries_ + at.stage() * (Config::kQueryBytes / 16);
  }
  __device__ __forceinline__ uint32_t grads(At at) const {
    return queries(at) + Config::kStages * (Config::kQueryBytes / 16);
  }

  /// S or dP.
  __device__ __forceinline__ void start_product(Scores& s, At at) const {
    if constexpr (kGradients) {
      wait_for_grad(at);
      multiply(s, grads(at));
    } else {
      wait_for_query(at);
      multiply(s, queries(at));
    }
  }
  __device__ __forceinline__ void finish_product(Scores& s, int tile, At at) const {
    for_each_score(s, [](float& x, int, int, int) { ptx::pin(x); });
    if constexpr (!kGradients) {
      weigh(s, at);
      release_query(at);
      if (hides(tile)) hide(s, tile);
    }
  }

  /// In registers and in shared memory.
  __device__ __forceinline__ void make_weights(Weights& weights, const Scores& s, int tile, At at) const {
    const uint32_t s_panel = s_fragment();
    if constexpr (kGradients) {
      wait_for_p(at);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) ptx::ldmatrix_x4_trans(weights[k], s_panel + k * 16 * kPanelRowBytes);
      differentiate(weights, s, hides(tile), at);
      release_grad(at);
    } else {
      pack(weights, s);
      wait_for_p_room(at);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) ptx::stmatrix_x4_trans(s_panel + k * 16 * kPanelRowBytes, weights[k]);
    if constexpr (kGradients) {
      hand_ds_over();
    } else {
      hand_p_over();
    }
  }

  /// Where this lane's row of this warp's part of P and dS begins, which are transposed: rows are queries. A lane names
  /// a row of one of four 8 x 8 matrices: two of queries by two of keys.
  __device__ __forceinline__ uint32_t s_fragment() const {
    const int lane = ptx::reread(lane_), row = lane % 8 + lane / 16 * 8;
    const uint32_t piece = (2 * warp_ + lane / 8 % 2) ^ (lane % 8);
    return s_tiles_ + Config::kDsOffset + row * kPanelRowBytes + piece * 16;
  }

  /// s = keys rows^T, of K and Q or of V and dO.
  __device__ __forceinline__ void multiply(Scores& s, uint32_t rows) const {
    using Product = ptx::Wgmma<Element, kBlockM>;
    ptx::wgmma_fence();
    Product::template multiply<false>(s[0], Tile::at(keys_, 0), Tile::at(rows, 0));
#pragma unroll
    for (int step = 1; step < kHeadDim / 16; ++step)
      Product::template multiply<true>(s[0], Tile::at(keys_, Tile::along_row(step)),
                                       Tile::at(rows, Tile::along_row(step)));
    ptx::wgmma_commit();
  }

  /// sum += weights rows
  __device__ __forceinline__ void start_sum(const Weights& weights, uint32_t rows) {
    using Product = ptx::Wgmma<Element, kHeadDim>;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      Product::accumulate_transposed(sum_, weights[step], Tile::at(rows, Tile::down_rows(step)));
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void pin_sum() {
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) ptx::pin(sum_[d][e]);
  }

  /// P in place of products.
  __device__ __forceinline__ void weigh(Scores& s, At at) const {
    const float* const s_lane = state_.lse[at.stage()] + 2 * (ptx::reread(lane_) % 4);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(s_lane + 8 * n);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][n][e] = ptx::exp2_approx(fmaf(s[0][n][e], scale_, e % 2 ? -lse.y : -lse.x));
    }
  }

  /// Weights that the window or the lengths hide become 0, whatever they are: a query may have an lse of NaN because of
  /// another key.
  __device__ __forceinline__ void hide(Scores& s, int tile) const {
    const Sequence& sequence = work_.sequence;
    const auto at = TileCoordinates<true>::of_lane(work_.first_key + rank_ * kGroupRows + warp_ * 16, tile * kBlockM,
                                                   ptx::reread(lane_));
    const int first_begin = at.first_column + sequence.offset - sequence.left - at.first_row;
    const int first_end = at.first_column + sequence.offset + sequence.right + 1 - at.first_row;
    const int end_of_all = sequence.seqlen_k - at.first_row;
    const int queries = sequence.seqlen_q - at.first_column;
    for_each_score(s, [&](float& x, int, int n, int e) {
      const int column = 8 * n + e % 2, row = 8 * (e / 2);
      const bool visible = row >= first_begin + column && row < min(first_end + column, end_of_all) && column < queries;
      if (!visible) x = 0.0f;
    });
  }

  /// dS of dP, in place of P. Where the weight is 0 the rest may be NaN, from keys that the query does not see.
  __device__ __forceinline__ void differentiate(Weights& weights, const Scores& dp, bool hides, At at) const {
    if (hides) {
      for_each_pair(weights, dp, at, [](float x, float weight) { return weight == 0.0f ? 0.0f : weight * x; });
    } else {
      for_each_pair(weights, dp, at, [](float x, float weight) { return weight * x; });
    }
  }
  template <class F>
  __device__ __forceinline__ void for_each_pair(Weights& weights, const Scores& dp, At at, F gradient) const {
    const float* const s_lane = state_.minus_delta[at.stage()] + 2 * (ptx::reread(lane_) % 4);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 term = *reinterpret_cast<const float2*>(s_lane + 8 * n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t& w = weights[n / 2][n % 2 * 2 + r];
        const float2 weight = ptx::unpack2<Element>(w);
        w = ptx::pack2<Element>(gradient(dp[0][n][2 * r] + term.x, weight.x),
                                gradient(dp[0][n][2 * r + 1] + term.y, weight.y));
      }
    }
  }

  __device__ __forceinline__ static void pack(Weights& p, const Scores& s) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        p[step][e] = ptx::pack2<Element>(s[0][2 * step + e / 2][e % 2 * 2], s[0][2 * step + e / 2][e % 2 * 2 + 1]);
  }

  /// Frees pieces of 16 bytes of Inf and NaN: those from `first` on, every `step`th.
  template <int kCount, int kStep>
  __device__ __forceinline__ static void take_out_non_finite(uint32_t s_first) {
    using Test = NonFinite<Element>;
    uint32_t found = 0;
#pragma unroll 4
    for (int k = 0; k < kCount; ++k) {
      const uint4 piece = sm80::load_shared<uint4>(s_first + k * kStep);
      found |= Test::in_word(piece.x) | Test::in_word(piece.y) | Test::in_word(piece.z) | Test::in_word(piece.w);
    }
    if (!found) return;
#pragma unroll 1
    for (int k = 0; k < kCount; ++k) {
      const uint4 piece = sm80::load_shared<uint4>(s_first + k * kStep);
      sm80::store_shared(s_first + k * kStep, uint4{Test::bounded(piece.x), Test::bounded(piece.y),
                                                    Test::bounded(piece.z), Test::bounded(piece.w)});
    }
    ptx::fence_proxy_async_shared();
  }

  /// K, and what dQ needs of the other block's. A hidden pair has dS = 0, and 0 * NaN is NaN; what a query does see,
  /// its lse knows.
  __device__ __forceinline__ void clean_keys() const {
    if constexpr (kGradients) {
      ptx::mbarrier_wait(address(state_.other_k_full), 0);
      constexpr int kOtherPieces = Config::kOtherPanels * panel_bytes(kGroupRows) / 16;
      take_out_non_finite<kOtherPieces / kGroupThreads, kGroupThreads * 16>(s_tiles_ + Config::kOtherKeysOffset +
                                                                            thread() * 16);
      ptx::mbarrier_wait(address(state_.v_full), 0);
    } else {
      ptx::mbarrier_wait(address(state_.k_full), 0);
      take_out_non_finite<Config::kKeyBytes / 16 / kGroupThreads, kGroupThreads * 16>(s_tiles_ + thread() * 16);
      ptx::barrier_any<kGroupThreads>(2, false);
    }
  }

  /// Q and dO of a tile that some key is hidden from, by both warpgroups together.
  __device__ __forceinline__ void clean(int tile, At at) const {
    if (!work_.is_cleaned(tile)) return;
    constexpr int kPieces = Config::kQueryBytes / 16;
    wait_for_query(at);
    wait_for_grad(at);
    const uint32_t s_first = s_tiles_ + Config::kQueriesOffset + at.stage() * Config::kQueryBytes +
                             (kGradients ? kGroupThreads + thread() : thread()) * 16;
    take_out_non_finite<kPieces / kComputing, kComputing * 16>(s_first);
    take_out_non_finite<kPieces / kComputing, kComputing * 16>(s_first + Config::kStages * Config::kQueryBytes);
    ptx::barrier_sync<1, kComputing>();
  }

  __device__ __forceinline__ void store(const TensorView& view, float scale) const {
    if (!view.data) return;
    const Sequence& sequence = work_.sequence;
    const auto rows = key_rows<Element, false>(p_, view, sequence);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = work_.first_key + rank_ * kGroupRows + warp_ * 16 + 8 * r + lane_ / 4;
      Element* const g_row = row < sequence.seqlen_k ? rows.row(row) : nullptr;
      write_out_row(g_row, sum_, r, scale, lane_, static_cast<int>(p_.head_dim));
    }
  }

  const BackwardParams& p_;
  State& state_;
  const Work& work_;
  const int rank_, warp_, lane_;
  const uint32_t s_tiles_;
  const float scale_;              // of scores, to base 2
  const uint32_t keys_, queries_;  // lower halves of descriptors; K or V
  At at_;                          // of Q and dO

  Sum sum_;  // dK or dV
};

}  // namespace flash_ext::sm90
