// The warpgroups that compute scores and their gradients, dK and dV: 64 keys each.
#pragma once

#include "../common/non_finite.cuh"
#include "../common/scores.cuh"
#include "../ptx/barrier.h"
#include "../ptx/reread.h"
#include "../ptx/stmatrix_trans.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "../sm80/tile.cuh"
#include "backward_work.cuh"
#include "forward_out.cuh"

namespace flash_ext::sm90 {

/// What one warp of them does.
template <class Config>
class BackwardGroup {
 public:
  using Element = typename Config::Element;
  using State = BackwardState<Config>;
  using Work = BackwardWork<Config>;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kN = kBlockM / 8, kD = kHeadDim / 8;
  static constexpr int kSteps = kBlockM / 16;  // of products over queries
  static constexpr int kComputing = Config::kGroups * kGroupThreads;
  using Scores = float[1][kN][4];       // of keys (rows) and queries
  using Weights = uint32_t[kSteps][4];  // as an operand
  using Sum = float[kD][4];
  using KeyTile = TileDescriptor<kBlockN>;
  using QueryTile = TileDescriptor<kBlockM>;

  __device__ __forceinline__ BackwardGroup(const BackwardParams& p, State& state, uint32_t s_tiles, float scale,
                                           int group, int lane)
      : p_(p),
        state_(state),
        work_(state.work()),
        group_(group),
        warp_(static_cast<int>(threadIdx.x) / 32 % kGroupWarps),
        lane_(lane),
        s_tiles_(s_tiles),
        scale_(scale),
        keys_(KeyTile::lower_half(s_tiles + group * panel_bytes(kGroupRows))),
        queries_(QueryTile::lower_half(s_tiles + Config::kQueriesOffset)) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) dk_[d][e] = dv_[d][e] = 0.0f;
    if (work_.tiles.begin < work_.tiles.end) {
      clean_keys();
#pragma unroll 1
      for (int head = 0, tile = work_.tiles.begin;;) {
        visit(tile);
        if (++tile < work_.tiles.end) continue;
        tile = work_.tiles.begin;
        if (++head == work_.heads) break;
      }
    }
    store(p_.dv, dv_, 1.0f);
    store(p_.dk, dk_, static_cast<float>(p_.softmax_scale));
  }

 protected:
  __device__ __forceinline__ static uint32_t address(const uint64_t& barrier) { return ptx::shared_address(&barrier); }
  __device__ __forceinline__ void release(const uint64_t& barrier) const {
    if (lane_ == 0) ptx::mbarrier_arrive(address(barrier));
  }
  __device__ __forceinline__ void wait_for_query() const {
    ptx::mbarrier_wait(address(state_.q_full[at_.stage()]), at_.parity());
  }
  __device__ __forceinline__ void wait_for_grad() const {
    ptx::mbarrier_wait(address(state_.do_full[at_.stage()]), at_.parity());
  }
  __device__ __forceinline__ void wait_for_ds_room() const {
    ptx::mbarrier_wait(address(state_.ds_empty[at_.stage()]), at_.parity() ^ 1);
  }
  __device__ __forceinline__ int thread() const { return warp_ * 32 + lane_; }

  __device__ __forceinline__ void visit(int tile) {
    if (work_.is_cleaned(tile)) clean_rows();
    const TileSpan& seen = work_.groups[group_];
    if (tile >= seen.begin && tile < seen.end) {
      step(tile, tile < seen.full_begin || tile >= seen.full_end);
    } else {
      pass();
    }
    at_.advance();
  }

  /// A tile that other warpgroups see. Barriers are waited for all the same, lest one gets ahead by two phases.
  __device__ __forceinline__ void pass() const {
    wait_for_query();
    release(state_.q_empty[at_.stage()]);
    wait_for_grad();
    release(state_.do_empty[at_.stage()]);
    wait_for_ds_room();
#pragma unroll
    for (int k = 0; k < Config::kDsPanelBytes / 16 / kGroupThreads; ++k)
      sm80::store_shared(s_ds() + (k * kGroupThreads + thread()) * 16, uint4{0, 0, 0, 0});
    hand_ds_over();
  }

  /// Of this warpgroup's keys.
  __device__ __forceinline__ uint32_t s_ds() const {
    return s_tiles_ + Config::kDsOffset + at_.stage() * Config::kDsBytes + group_ * Config::kDsPanelBytes;
  }
  __device__ __forceinline__ void hand_ds_over() const {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    release(state_.ds_full[at_.stage()]);
  }

  /// A tile of which this warpgroup's keys see something; `hides`: but not all. Scores and their gradients take the
  /// same registers, one after the other.
  __device__ __forceinline__ void step(int tile, bool hides) {
    const uint32_t query = queries_ + at_.stage() * (Config::kQueryBytes / 16);
    constexpr uint32_t kGrads = Config::kStages * (Config::kQueryBytes / 16), kValues = Config::kKeyBytes / 16;
    Scores s;
    Weights p, ds;
    wait_for_query();
    multiply(s, keys_, query);
    weigh(s);
    if (hides) hide(s, tile);
    pack(p, s);

    ptx::mbarrier_wait(address(state_.v_full), 0);
    wait_for_grad();
    multiply(s, keys_ + kValues, query + kGrads);
    differentiate(ds, s, p, hides);
    wait_for_ds_room();
    store_ds(ds);
    hand_ds_over();

    start_sum(dv_, p, query + kGrads);
    start_sum(dk_, ds, query);
    ptx::wgmma_wait<1>();
    pin(dv_);
    release(state_.do_empty[at_.stage()]);
    ptx::wgmma_wait<0>();
    pin(dk_);
    release(state_.q_empty[at_.stage()]);
  }

  __device__ __forceinline__ static void pin(Sum& sum) {
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) ptx::pin(sum[d][e]);
  }

  /// s = keys queries^T
  __device__ __forceinline__ static void multiply(Scores& s, uint32_t keys, uint32_t queries) {
    using Product = ptx::Wgmma<Element, kBlockM>;
    ptx::wgmma_fence();
    Product::template multiply<false>(s[0], KeyTile::at(keys, 0), QueryTile::at(queries, 0));
#pragma unroll
    for (int step = 1; step < kHeadDim / 16; ++step)
      Product::template multiply<true>(s[0], KeyTile::at(keys, KeyTile::along_row(step)),
                                       QueryTile::at(queries, QueryTile::along_row(step)));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    for_each_score(s, [](float& x, int, int, int) { ptx::pin(x); });
  }

  /// sum += weights rows
  __device__ __forceinline__ static void start_sum(Sum& sum, const Weights& weights, uint32_t rows) {
    using Product = ptx::Wgmma<Element, kHeadDim>;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      Product::accumulate_transposed(sum, weights[step], QueryTile::at(rows, QueryTile::down_rows(step)));
    ptx::wgmma_commit();
  }

  /// f(x, term) for every score and its query's term of s_terms.
  template <class F>
  __device__ __forceinline__ void for_each_with_term(Scores& s, const float* s_terms, F f) const {
    const float* const s_lane = s_terms + 2 * (ptx::reread(lane_) % 4);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 term = *reinterpret_cast<const float2*>(s_lane + 8 * n);
#pragma unroll
      for (int e = 0; e < 4; ++e) f(s[0][n][e], e % 2 ? term.y : term.x, n, e);
    }
  }

  /// P in place of products.
  __device__ __forceinline__ void weigh(Scores& s) const {
    for_each_with_term(s, state_.lse[at_.stage()],
                       [&](float& x, float lse, int, int) { x = ptx::exp2_approx(fmaf(x, scale_, -lse)); });
  }

  /// Weights that the window or the lengths hide become 0, whatever they are: a query may have an lse of NaN because of
  /// another key.
  __device__ __forceinline__ void hide(Scores& s, int tile) const {
    const Sequence& sequence = work_.sequence;
    const auto at = TileCoordinates<true>::of_lane(work_.first_key + group_ * kGroupRows + warp_ * 16, tile * kBlockM,
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

  /// dS of dP. Where the weight is 0 the rest may be NaN, from keys that the query does not see.
  __device__ __forceinline__ void differentiate(Weights& ds, const Scores& dp, const Weights& p, bool hides) const {
    const float* const s_lane = state_.minus_delta[at_.stage()] + 2 * (ptx::reread(lane_) % 4);
    if (hides) {
      for_each_pair(ds, dp, p, s_lane, [](float x, float weight) { return weight == 0.0f ? 0.0f : weight * x; });
    } else {
      for_each_pair(ds, dp, p, s_lane, [](float x, float weight) { return weight * x; });
    }
  }
  template <class F>
  __device__ __forceinline__ static void for_each_pair(Weights& ds, const Scores& dp, const Weights& p,
                                                       const float* s_lane, F gradient) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 term = *reinterpret_cast<const float2*>(s_lane + 8 * n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 weight = ptx::unpack2<Element>(p[n / 2][n % 2 * 2 + r]);
        ds[n / 2][n % 2 * 2 + r] = ptx::pack2<Element>(gradient(dp[0][n][2 * r] + term.x, weight.x),
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

  /// Transposed: rows are queries. A lane names a row of one of four 8 x 8 matrices: two of queries by two of keys.
  __device__ __forceinline__ void store_ds(const Weights& ds) const {
    const int lane = ptx::reread(lane_), row = lane % 8 + lane / 16 * 8;
    const uint32_t piece = (2 * warp_ + lane / 8 % 2) ^ (lane % 8);
    const uint32_t s_row = s_ds() + row * kPanelRowBytes + piece * 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::stmatrix_x4_trans(s_row + step * 16 * kPanelRowBytes, ds[step]);
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

  /// K of this warpgroup. A hidden pair has dS = 0, and 0 * NaN is NaN; what a query does see, its lse knows, or it is
  /// a score of -inf still.
  __device__ __forceinline__ void clean_keys() const {
    ptx::mbarrier_wait(address(state_.k_full), 0);
#pragma unroll 1
    for (int panel = 0; panel < panels(kHeadDim); ++panel)
      take_out_non_finite<panel_bytes(kGroupRows) / 16 / kGroupThreads, kGroupThreads * 16>(
          s_tiles_ + panel * panel_bytes(kBlockN) + group_ * panel_bytes(kGroupRows) + thread() * 16);
    ptx::barrier_any<kGroupThreads>(2 + group_, false);
  }

  /// Q and dO of a tile that some key is hidden from, by all warpgroups together.
  __device__ __forceinline__ void clean_rows() const {
    constexpr int kPieces = Config::kQueryBytes / 16;
    wait_for_query();
    wait_for_grad();
    const uint32_t s_query = s_tiles_ + Config::kQueriesOffset + at_.stage() * Config::kQueryBytes;
    clean_tile<kPieces>(s_query);
    clean_tile<kPieces>(s_query + Config::kStages * Config::kQueryBytes);
    ptx::barrier_sync<1, kComputing>();
  }
  template <int kPieces>
  __device__ __forceinline__ void clean_tile(uint32_t s_tile) const {
    const int first = group_ * kGroupThreads + thread();
    constexpr int kWhole = kPieces / kComputing;
    take_out_non_finite<kWhole, kComputing * 16>(s_tile + first * 16);
    if (kPieces % kComputing != 0 && first < kPieces % kComputing)
      take_out_non_finite<1, 0>(s_tile + (kWhole * kComputing + first) * 16);
  }

  __device__ __forceinline__ void store(const TensorView& view, const Sum& sum, float scale) const {
    if (!view.data) return;
    const Sequence& sequence = work_.sequence;
    const auto rows = key_rows<Element, false>(p_, view, sequence);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = work_.first_key + group_ * kGroupRows + warp_ * 16 + 8 * r + lane_ / 4;
      Element* const g_row = row < sequence.seqlen_k ? rows.row(row) : nullptr;
      write_out_row(g_row, sum, r, scale, lane_, static_cast<int>(p_.head_dim));
    }
  }

  const BackwardParams& p_;
  State& state_;
  const Work& work_;
  const int group_, warp_, lane_;
  const uint32_t s_tiles_;
  const float scale_;              // of scores, to base 2
  const uint32_t keys_, queries_;  // lower halves of descriptors
  RingCount<Config::kStages> at_;  // of Q, dO and dS

  Sum dk_, dv_;
};

}  // namespace flash_ext::sm90
