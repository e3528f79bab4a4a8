// A CTA of the backward's main kernel: what its warps do with tiles, and when. See kernel.cuh.
#pragma once

#include <cfloat>

#include "kernels/common/backward/dq_store.cuh"
#include "kernels/common/backward/options.cuh"
#include "kernels/common/backward/split_sums.cuh"
#include "kernels/common/backward/visibility.cuh"
#include "kernels/common/backward/workspace.h"
#include "kernels/common/sanitise_tile.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/common/warp_products.cuh"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/reread.h"
#include "storage.cuh"

namespace flash_ext::sm80 {

/// An operand of products on tiles of one width, for those of another.
template <class To, class From>
__device__ __forceinline__ To as_operand(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <class Config>
struct BackwardBlock {
  using Element = typename Config::Element;
  using Unit = ScoreUnit<Element>;
  static constexpr int kHeadDim = Config::kHeadDim, kThreads = Config::kThreads;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kM = Config::kWarpKeys / 16, kN = Config::kWarpQueries / 8, kD = Config::kWarpColumns / 8;
  using Rows = Products<Element, kHeadDim>;   // K, V, Q, dO
  using Scores = Products<Element, kBlockM>;  // P^T, dS^T
  using Dq = typename Config::Dq;
  using WorkTile = BackwardWorkTile<Config>;
  static constexpr int kUnroll = Config::kUnroll;
  // Tiles of 8 columns of dQ that a warp makes at once.
  static constexpr int kDqTiles = Config::kFloat ? 2 : Config::kScoreOptions && Dq::kN > 4 ? 4 : Dq::kN;
  static constexpr int kUnrollDq = Config::kFloat ? 8 : 1;  // as ptxas gets by without spills
#if __CUDA_ARCH__ >= 900
  static constexpr bool kRematerialisesKeys = !Config::kScoreOptions, kRematerialisesValue = false;  // likewise
#else
  static constexpr bool kRematerialisesKeys = false, kRematerialisesValue = kHeadDim == 128 && !Config::kFloat;
#endif
  static constexpr int kRoleThreads = kThreads / 2;
  static constexpr bool kQueriesHoldKeys = 2 * kBlockM >= kBlockN;  // the stages of Q have room for dK
  static constexpr bool kWeightsInRegisters = Config::kSides == 1;
  using Kept = KeptTile<kBlockM>;
  static constexpr bool kBoundsWeights = !Unit::kNatural;  // where there is a LargeLse
  // Options work on packed weights, which leave registers for that.
  static constexpr bool kPacked = kWeightsInRegisters && !Config::kFloat;
  static constexpr int kWeightSteps = kWeightsInRegisters ? kBlockM / Rows::kDepth : 1;

  const BackwardParams& p;
  const BackwardWorkspace& workspace;
  const bool copies_bias;
  BackwardWorkTile<Config>& work_tile;
  const int warp, lane;
  const bool makes_p;
  const int first_row;     // of the warp's keys in the tile
  const int first_column;  // of the warp's queries in the tile
  const uint32_t s_key, s_value, s_query, s_grad_out, s_scores, s_lse, s_minus_delta, s_words, s_kept, s_bias;

  float sum[kM][kD][4] = {};                     // dV or dK
  typename Rows::A r_weights[kWeightSteps][kM];  // P^T or dS^T, from one half-step to the next

  __device__ __forceinline__ BackwardBlock(const BackwardParams& p, const BackwardWorkspace& workspace,
                                           bool copies_bias, BackwardWorkTile<Config>& work_tile, char* shared)
      : p(p),
        workspace(workspace),
        copies_bias(copies_bias),
        work_tile(work_tile),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        makes_p(warp < Config::kRoleWarps),
        first_row(warp % Config::kKeyGroups * Config::kWarpKeys),
        first_column(warp % Config::kRoleWarps / Config::kKeyGroups * Config::kWarpQueries),
        s_key(ptx::shared_address(shared)),
        s_value(s_key + Config::kKeyBytes),
        s_query(s_value + Config::kKeyBytes),
        s_grad_out(s_query + 2 * Config::kQueryBytes),
        s_scores(s_grad_out + Config::kQueryBytes),
        s_lse(s_scores + Config::kScoreTiles * Config::kScoreBytes),
        s_minus_delta(s_lse + 2 * Config::kTermBytes),
        s_words(s_minus_delta + Config::kTermBytes),
        s_kept(s_words + Config::kWordBytes),
        s_bias(s_key + Config::kSharedBytes) {}

  /// x: but what depends on it is not computed before the loop, for which options leave no registers.
  template <class T>
  __device__ __forceinline__ static T rematerialise(T x) {
    return Config::kScoreOptions ? ptx::reread(x) : x;
  }
  __device__ __forceinline__ static int role_thread() { return static_cast<int>(threadIdx.x) % kRoleThreads; }
  __device__ __forceinline__ uint32_t query_stage(int n) const { return s_query + n % 2 * Config::kQueryBytes; }
  __device__ __forceinline__ uint32_t lse_stage(int n) const { return s_lse + n % 2 * Config::kTermBytes; }
  /// dS^T of step n.
  __device__ __forceinline__ uint32_t gradient_tile(int n) const { return s_scores + n % 2 * Config::kScoreBytes; }
  /// P^T of step n.
  __device__ __forceinline__ uint32_t weight_tile(int n) const {
    return Config::kScoreTiles == 2 ? gradient_tile(n) : s_scores + 2 * Config::kScoreBytes;
  }

  __device__ __forceinline__ int64_t tile_index(const BackwardStep& step) const { return tile_index(work_tile, step); }
  __device__ __forceinline__ int64_t tile_index(const WorkTile& of, const BackwardStep& step) const {
    return of.workspace_tile + step.head * workspace.tiles_per_head + step.tile;
  }
  __device__ __forceinline__ bool is_partial(const BackwardStep& step) const {
    return step.tile < work_tile.tiles.full_begin || step.tile >= work_tile.tiles.full_end;
  }

  __device__ __forceinline__ void load_keys(const Sequence& sequence, int first_key) const {
    load_tile<Element, kHeadDim, kRoleThreads, kBlockN>(
        makes_p ? s_key : s_value, key_rows<const Element, false>(p, makes_p ? p.k : p.v, sequence), first_key,
        sequence.seqlen_k, static_cast<int>(makes_p ? p.head_dim : p.head_dim_v), role_thread());
  }
  __device__ __forceinline__ void load_rows(uint32_t s_tile, RowSource<const Element, false> rows, int64_t head_offset,
                                            const BackwardStep& step, int num_rows, int64_t columns) const {
    rows.base += head_offset;
    load_tile<Element, kHeadDim, kRoleThreads, kBlockM>(s_tile, rows, step.tile * kBlockM, num_rows,
                                                        static_cast<int>(columns), role_thread());
  }
  /// `of` is what `work_tile` is, or will be.
  __device__ __forceinline__ void load_queries(const WorkTile& of, const BackwardStep& step, int n) const {
    load_rows(query_stage(n), of.queries, step.head * p.q.head_stride, step, of.sequence.seqlen_q, p.head_dim);
    load_terms(lse_stage(n), workspace.lse + tile_index(of, step) * kBlockM);
  }
  /// Without options the first tile is known before anything else is.
  __device__ __forceinline__ void load_first_queries(const WorkTile& of) const {
    const BackwardStep step = of.first_step();
    if (!Config::kScoreOptions && makes_p && step.head < of.heads) load_queries(of, step, 0);
  }
  /// What the P warps need of a step; bias and words are free again once they have made its P.
  __device__ __forceinline__ void load_for_weights(const PreparedStep& prepared, int n) const {
    load_queries(work_tile, prepared.step, n);
    if constexpr (Config::kScoreOptions) {
      if (!work_tile.options.hides) return;
      Sequence sequence = work_tile.sequence;
      sequence.head += prepared.step.head;
      const int first_query = prepared.step.tile * kBlockM;
      if (work_tile.options.biased) {
        flash_ext::load_bias<kRoleThreads, kBlockM, kBlockN>(s_bias, p.bias, copies_bias, sequence, first_query,
                                                             work_tile.first_key);
      }
      if (prepared.flags & kStepMasked) {
        load_words<kRoleThreads, kBlockM, kBlockN>(s_words, p, workspace.visibility, sequence, prepared.step.tile,
                                                   work_tile.key_tile);
      }
    }
  }
  /// Words of kept weights, by the dS warps for all, while P of the step before is made.
  __device__ __forceinline__ void draw_kept(const PreparedStep& prepared, int n) const {
    if constexpr (Config::kScoreOptions) {
      const BackwardOptions& options = work_tile.options;
      if (!options.drops || prepared.flags & kStepPast) return;
#pragma unroll 1
      for (int word = role_thread(); word < Config::kKeptBytes / 4; word += kRoleThreads) {
        const int i = prepared.step.tile * kBlockM + Kept::query(word);
        const int j = work_tile.first_key / kDropoutKeys * kDropoutKeys + Kept::key(word);
        store_shared(s_kept + n % 2 * Config::kKeptBytes + 4 * word,
                     draw_kept_weights(p.dropout.rule, options.key, options.batch_head + prepared.step.head, i, j));
      }
    }
  }
  /// What is kept of a lane's weights in 64 queries: x has those of its queries 2 (lane % 4) of each 8, y those of the
  /// next ones. Shifted by 2 (sixteen of the queries) + (sixteen of the keys), bytes have signs as keep_pair() wants.
  __device__ __forceinline__ uint2 kept_weights(int n, int first_sixteen) const {
    static_assert(kM == 2);
    constexpr uint32_t kBothKeys = 0xC0C0C0C0u;
    const int lane = rematerialise(this->lane), shift = Kept::shift(work_tile.first_key + first_row, lane);
    const uint32_t s_lane = s_kept + n % 2 * Config::kKeptBytes + Kept::at(first_row / kDropoutKeys, lane) +
                            (first_column / 16 + first_sixteen) * Kept::kStepBytes;
    uint2 kept = {0, 0};
#pragma unroll 1
    for (int k = 0; k < (kN < 8 ? kN / 2 : 4); ++k) {
      const auto words = load_shared<uint2>(s_lane + k * Kept::kStepBytes);
      kept.x |= (words.x << shift & kBothKeys) >> 2 * k;
      kept.y |= (words.y << shift & kBothKeys) >> 2 * k;
    }
    return kept;
  }
  __device__ __forceinline__ void load_grad_out(const BackwardStep& step) const {
    load_rows(s_grad_out, work_tile.grad_out, step.head * p.grad_out.head_stride, step,
              p.grad_out.data ? work_tile.sequence.seqlen_q : 0, p.head_dim_v);
    load_terms(s_minus_delta, workspace.minus_delta + tile_index(step) * kBlockM);
  }
  __device__ __forceinline__ static void load_terms(uint32_t s_terms, const float* terms) {
    const int thread = role_thread();
    if (thread < kBlockM / 4) ptx::cp_async_16(s_terms + 16 * thread, terms + 4 * thread);
  }

  /// c += A B^T for the warp's rows of A and its queries of B. With the bits of the forward's Q K^T: lse was made of
  /// them.
  __device__ __forceinline__ void multiply_rows(float (&c)[kM][kN][4], uint32_t s_a, uint32_t s_b) const {
    const int lane = rematerialise(this->lane);
    const uint32_t s_lane_a = s_a + Rows::lane_a(lane) + rematerialise(first_row) * Rows::kRowBytes;
    const uint32_t s_lane_b = s_b + Rows::lane_b(lane) + first_column * Rows::kRowBytes;
#pragma unroll kUnroll
    for (int step = 0; step < kHeadDim / Rows::kDepth; ++step) {
      typename Rows::A a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) Rows::load_a(a[m], s_lane_a, 16 * m, step);
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        typename Rows::B b;
        Rows::load_b(b, s_lane_b, 8 * n, step);
#pragma unroll
        for (int m = 0; m < kM; ++m) Rows::multiply_transposed(c[m][n], c[m][n + 1], a[m], b);
      }
    }
  }

  /// sum += W B for weights W of the warp's keys: its own, or, where several warps share keys, those in s_weights. Its
  /// own are used up: each step takes the first and moves up the others, as registers cannot be indexed in a loop.
  __device__ __forceinline__ void accumulate(uint32_t s_weights, uint32_t s_b) {
    const int first_d = warp % Config::kRoleWarps / Config::kKeyGroups * (Config::kWarpColumns / 16);
    const int lane = rematerialise(this->lane);
    const uint32_t s_lane_b = s_b + Rows::lane_b_transposed(lane);
    const uint32_t s_lane_a = s_weights + Scores::lane_a_of_c(lane) + rematerialise(first_row) * Scores::kRowBytes;
#pragma unroll kUnroll
    for (int step = 0; step < kBlockM / Rows::kDepth; ++step) {
      typename Rows::A a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if constexpr (kWeightsInRegisters) {
          a[m] = r_weights[0][m];
#pragma unroll
          for (int k = 0; k + 1 < kWeightSteps; ++k) r_weights[k][m] = r_weights[k + 1][m];
        } else {
          typename Scores::A weights;
          Scores::load_a_of_c(weights, s_lane_a, 16 * m, step);
          a[m] = as_operand<typename Rows::A>(weights);
        }
      }
#pragma unroll
      for (int d = 0; d < kD; d += 2) {
        typename Rows::B b;
        Rows::load_b_transposed(b, s_lane_b, first_d + d / 2, step);
#pragma unroll
        for (int m = 0; m < kM; ++m) Rows::multiply(sum[m][d], sum[m][d + 1], a[m], b);
      }
    }
  }

  /// The warp's part of dQ of a step, from dS^T number n; piece by piece where registers do not hold it at once.
  __device__ __forceinline__ void add_dq(const BackwardStep& step, int n) const {
    if (!p.dq.data) return;
    float* const g_tile = workspace.dq + tile_index(step) * (kBlockM * kHeadDim);
#pragma unroll kUnrollDq
    for (int first = 0; first < Dq::kN; first += kDqTiles) {
      float c[Dq::kM][kDqTiles][4] = {};
      multiply_dq(c, gradient_tile(n), first);
      if (workspace.turns && first == 0) wait_for_turn(step);
      Dq::add(g_tile + Dq::fragment(0, 0, first), c, warp, lane);
    }
    if (workspace.turns) end_turn(step);
  }
  __device__ __forceinline__ void multiply_dq(float (&c)[Dq::kM][kDqTiles][4], uint32_t s_gradients, int first) const {
    const int lane = rematerialise(this->lane);
    const uint32_t s_lane_a = s_gradients + Scores::lane_a_transposed(lane);
    const uint32_t s_lane_b = s_key + Rows::lane_b_transposed(lane);
    const int first_m = Dq::first_row(warp) / 16, first_d = Dq::first_column(warp) / 16 + first / 2;
#pragma unroll kUnroll
    for (int k = 0; k < kBlockN / Rows::kDepth; ++k) {
      typename Scores::A a[Dq::kM];
#pragma unroll
      for (int m = 0; m < Dq::kM; ++m) Scores::load_a_transposed(a[m], s_lane_a, first_m + m, k);
#pragma unroll
      for (int d = 0; d < kDqTiles; d += 2) {
        typename Rows::B b;
        Rows::load_b_transposed(b, s_lane_b, first_d + d / 2, k);
#pragma unroll
        for (int m = 0; m < Dq::kM; ++m) Rows::multiply(c[m][d], c[m][d + 1], as_operand<typename Rows::A>(a[m]), b);
      }
    }
  }

  __device__ __forceinline__ int32_t* turn_of(const BackwardStep& step) const {
    return workspace.turns + tile_index(step) * kDqWarps + warp;
  }
  __device__ __forceinline__ void wait_for_turn(const BackwardStep& step) const {
    const int turn = work_tile.turn(step.tile);
    if (lane == 0) {
      // `<`: lengths that make no sense may count past it, and must not hang.
      while (ptx::load_acquire(turn_of(step)) < turn) __nanosleep(20);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void end_turn(const BackwardStep& step) const {
    __threadfence();
    __syncwarp();
    if (lane == 0) ptx::add_release(turn_of(step), 1);
  }

  __device__ __forceinline__ TileCoordinates<true> coordinates(const BackwardStep& step, int lane) const {
    return TileCoordinates<true>::of_lane(work_tile.first_key + first_row, step.tile * kBlockM + first_column, lane);
  }
  /// What a lane adds to s_minus_delta or a stage of lse for its queries of a column of accumulators.
  __device__ __forceinline__ uint32_t term_at(int column) const {
    return 4 * (first_column + 2 * (lane % 4) + 8 * column);
  }
  /// What a lane adds to weight_tile() or gradient_tile() for its accumulators.
  __device__ __forceinline__ uint32_t lane_of_scores() const {
    return Scores::lane_c(lane) + rematerialise(first_row) * Scores::kRowBytes;
  }
  __device__ __forceinline__ int first_pair() const { return Config::kSides == 1 ? 0 : first_column / 16; }

  /// P^T in place of S^T.
  __device__ __forceinline__ void exponentiate(float (&s)[kM][kN][4], const BackwardStep& step, int n) const {
    const float scale = work_tile.scale;
    for_each_with_term(s, lse_stage(n), [&](float& x, float lse) { x = Unit::weight(x, scale, lse); });
    if (!is_partial(step)) return;
    hide(s, coordinates(step, lane), 0.0f);
    if (kBoundsWeights && work_tile.large) for_each_score(s, [](float& x, int, int, int) { x = LargeLse::bound(x); });
  }

  /// Replaces the weights outside of the window, or their exponents, whatever they are: a query may have an lse of NaN
  /// because of another key. Queries past the end have none, by their lse.
  __device__ __forceinline__ void hide(float (&weights)[kM][kN][4], const TileCoordinates<true>& at,
                                       float hidden) const {
    const Sequence& sequence = work_tile.sequence;
    const int end = at.first_column + sequence.offset + sequence.right + 1 - at.first_row;
    const int end_of_all = sequence.seqlen_k - at.first_row;
    for_each_score(weights, [&](float& x, int m, int n, int e) {
      if (16 * m + 8 * (e / 2) >= min(end + 8 * n + e % 2, end_of_all)) x = hidden;
    });
    if (sequence.left >= sequence.seqlen_q + sequence.seqlen_k) return;
    const int begin = at.first_column + sequence.offset - sequence.left - at.first_row;
    for_each_score(weights, [&](float& x, int m, int n, int e) {
      if (16 * m + 8 * (e / 2) < begin + 8 * n + e % 2) x = hidden;
    });
  }

  template <class F>
  __device__ __forceinline__ void for_each_with_term(float (&s)[kM][kN][4], uint32_t s_terms, F f) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 term = load_shared<float2>(s_terms + term_at(n));
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) f(s[m][n][e], e % 2 ? term.y : term.x);
    }
  }

  /// The accumulators as elements: to a tile, and as what accumulate() takes.
  __device__ __forceinline__ void store_weights(uint32_t s_tile, const float (&s)[kM][kN][4]) {
    const uint32_t s_lane = s_tile + lane_of_scores();
#pragma unroll
    for (int n = 0; n < kN; n += 2)
#pragma unroll
      for (int m = 0; m < kM; ++m) Scores::store_c(s_lane, 16 * m, first_pair() + n / 2, s[m][n], s[m][n + 1]);
    keep_weights(s);
  }
  __device__ __forceinline__ void keep_weights(const float (&s)[kM][kN][4]) {
    if constexpr (kWeightsInRegisters) {
#pragma unroll
      for (int step = 0; step < kWeightSteps; ++step)
#pragma unroll
        for (int m = 0; m < kM; ++m) Rows::a_from_accumulators(r_weights[step][m], s[m], step);
    }
  }

  /// The same under all options. What is stored for dS^T, where that will be, is P^T times the derivative of the
  /// softcap, of dropped weights too.
  __device__ __forceinline__ void exponentiate_general(float (&s)[kM][kN][4], const PreparedStep& now, int n) {
    const BackwardOptions& options = work_tile.options;
    const int lane = rematerialise(this->lane);
    const TileCoordinates<true> at = coordinates(now.step, lane);
    scale_and_cap(s, n);
    if (now.slope != 0.0f) {
      const int distance = at.first_column + work_tile.sequence.offset - at.first_row;
      AlibiOfLane<true>{now.slope, static_cast<float>(distance)}.add(s);
    }
    if (options.biased) add_bias<Unit, kBlockN>(s, p.bias.dtype, s_bias, first_column, first_row, lane);
    if constexpr (Unit::kNatural) for_each_with_term(s, lse_stage(n), [](float& x, float lse) { x -= lse; });
    if (now.flags & kStepPartial) {
      hide(s, at, -INFINITY);
      if (kBoundsWeights && work_tile.large)
        for_each_score(s, [](float& x, int, int, int) { x = ptx::min_or_nan(x, 0.0f); });
    }
    if (now.flags & kStepMasked)
      hide_by_words(s, s_words + 4 * (first_row / 32 * kBlockM + first_column + 2 * (lane % 4)), lane);
    for_each_score(s, [](float& x, int, int, int) { x = Unit::exp(x); });

    if constexpr (kPacked) keep_weights(s);
    if (options.drops) {
      options.cap > 0.0f ? store_for_gradient<true, true>(s, n) : store_for_gradient<false, true>(s, n);
    } else {
      options.cap > 0.0f ? store_for_gradient<true, false>(s, n) : store_for_gradient<false, false>(s, n);
    }
    if constexpr (!kWeightsInRegisters) {
      store_weights(weight_tile(n), s);
    } else if constexpr (!kPacked) {
      keep_weights(s);
    }
  }

  /// Scores out of products, but for what is added; to base 2 less lse, which costs nothing there. Natural ones have to
  /// be rounded as those of the forward were. The derivative of the softcap waits where it will be needed.
  __device__ __forceinline__ void scale_and_cap(float (&s)[kM][kN][4], int n) const {
    const BackwardOptions& options = work_tile.options;
    const float scale = options.scale, cap = options.cap;
    // A sum that overflowed must not make a NaN of what is hidden: what a query does see of it, its lse knows.
    const auto scaled = [&](float x) { return fminf(Unit::multiply(x, scale), FLT_MAX); };
    if (cap > 0.0f) {
      const uint32_t s_lane = gradient_tile(n) + lane_of_scores();
      for_each_score(s, [&](float& x, int, int, int) { x = softcap_tanh<Element>(scaled(x)); });
#pragma unroll
      for (int column = 0; column < kN; column += 2)
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          float slope[2][4];
#pragma unroll
          for (int k = 0; k < 8; ++k) slope[k / 4][k % 4] = softcap_slope<float>(s[m][column + k / 4][k % 4]);
          Scores::store_c(s_lane, 16 * m, first_pair() + column / 2, slope[0], slope[1]);
        }
      __syncwarp();
      if constexpr (Unit::kNatural) {
        for_each_score(s, [&](float& x, int, int, int) { x = Unit::multiply(x, cap); });
      } else {
        for_each_with_term(s, lse_stage(n), [&](float& x, float lse) { x = fmaf(x, cap, -lse); });
      }
    } else if constexpr (Unit::kNatural) {
      for_each_score(s, [&](float& x, int, int, int) { x = scaled(x); });
    } else if (options.biased) {
      for_each_with_term(s, lse_stage(n), [&](float& x, float lse) { x = scaled(x) - lse; });
    } else {
      for_each_with_term(s, lse_stage(n), [&](float& x, float lse) { x = fmaf(x, scale, -lse); });
    }
  }

  /// Weights that are dropped become 0, but for dS^T.
  template <bool kCaps, bool kDrops>
  __device__ __forceinline__ void store_for_gradient(float (&s)[kM][kN][4], int n) {
    const uint32_t s_lane = gradient_tile(n) + lane_of_scores();
    const uint32_t s_slopes =
        gradient_tile(n) + Scores::lane_a_of_c(lane) + rematerialise(first_row) * Scores::kRowBytes;
    uint2 kept = {};
#pragma unroll
    for (int column = 0; column < kN; column += 2) {
      if (kDrops && column % 8 == 0) kept = kept_weights(n, column / 2);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const int pair = first_pair() + column / 2, shift = column % 8 + m;
        if constexpr (kPacked) {
          uint32_t(&weights)[4] = r_weights[column / 2][m].r;
          uint32_t stored[4] = {weights[0], weights[1], weights[2], weights[3]};
          typename Scores::A slopes;
          if constexpr (kCaps) Scores::load_a_of_c(slopes, s_slopes, 16 * m, pair);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if constexpr (kCaps) stored[k] = multiply_pairs<Element>(stored[k], slopes.r[k]);
            if constexpr (kDrops) weights[k] = keep_pair(weights[k], kept.x << shift, kept.y << shift, k);
          }
          Scores::store_a_as_c(s_lane, 16 * m, pair, stored);
        } else {
          float stored[2][4];
          if constexpr (kCaps) Scores::load_c(s_lane, 16 * m, pair, stored[0], stored[1]);
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            float& weight = s[m][column + k / 4][k % 4];
            stored[k / 4][k % 4] = kCaps ? stored[k / 4][k % 4] * weight : weight;
            if (kDrops && !((k % 2 ? kept.y : kept.x) >> (k / 2 * 8 + 7 - shift) & 1u)) weight = 0.0f;
          }
          Scores::store_c(s_lane, 16 * m, pair, stored[0], stored[1]);
        }
      }
    }
  }

  /// dS^T in place of dP^T - D.
  template <class F>
  __device__ __forceinline__ void compute_ds(float (&s)[kM][kN][4], int n, F gradient) const {
    const uint32_t s_lane = (Config::kScoreOptions ? gradient_tile(n) : weight_tile(n)) + lane_of_scores();
#pragma unroll
    for (int column = 0; column < kN; column += 2)
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float weights[2][4];
        Scores::load_c(s_lane, 16 * m, first_pair() + column / 2, weights[0], weights[1]);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int e = 0; e < 4; ++e) gradient(s[m][column + h][e], weights[h][e], m, column + h, e);
      }
  }

  /// Where P is 0 the rest may be NaN, from keys that the query does not see; in a full tile it sees them all. The
  /// gradient of a dropped weight is 0.
  __device__ __forceinline__ void compute_ds(float (&s)[kM][kN][4], const PreparedStep& now, int n) const {
    if constexpr (Config::kScoreOptions) {
      if (work_tile.options.drops) {
        uint2 kept;
        return compute_ds(s, n, [&](float& x, float weight, int m, int column, int e) {
          const float2 minus_delta = load_shared<float2>(s_minus_delta + term_at(column));
          if (column % 8 == 0 && m == 0 && e == 0) kept = kept_weights(n, column / 2);
          const int bit = column % 2 * 16 + e / 2 * 8 + 7 - (column % 8 / 2 * 2 + m);
          const bool is_kept = (e % 2 ? kept.y : kept.x) >> bit & 1u;
          const float ds = weight * (is_kept ? x : e % 2 ? minus_delta.y : minus_delta.x);
          x = weight == 0.0f ? 0.0f : ds;
        });
      }
    }
    if (has(now, kStepPartial | kStepMayHide)) {
      compute_ds(s, n, [](float& x, float weight, int, int, int) { x = weight == 0.0f ? 0.0f : weight * x; });
    } else {
      compute_ds(s, n, [](float& x, float weight, int, int, int) { x *= weight; });
    }
  }

  /// The tile after `step`, among those that some key sees; past the last, head is past the group.
  __device__ __forceinline__ BackwardStep next(BackwardStep step) const {
    if (++step.tile == work_tile.tiles.end) step.tile = work_tile.tiles.begin;
    if (step.tile == work_tile.first_tile) ++step.head;
    return step;
  }

  __device__ __forceinline__ BackwardStep previous(BackwardStep step) const {
    if (step.tile == work_tile.first_tile) --step.head;
    if (step.tile == work_tile.tiles.begin) step.tile = work_tile.tiles.end;
    --step.tile;
    return step;
  }

  __device__ __forceinline__ bool is_past(const BackwardStep& step) const { return step.head >= work_tile.heads; }

  /// Whether one of the flags is set; without options they are not looked up, but computed.
  __device__ __forceinline__ bool has(const PreparedStep& now, int flags) const {
    if constexpr (Config::kScoreOptions) {
      return (now.flags & flags) != 0;
    } else {
      return (flags & kStepPast && is_past(now.step)) || (flags & kStepPartial && is_partial(now.step));
    }
  }

  __device__ __forceinline__ PreparedStep prepare(const BackwardStep& step) const {
    PreparedStep prepared{step, 0, 0.0f};
    if constexpr (Config::kScoreOptions) {
      const BackwardOptions& options = work_tile.options;
      if (is_past(step)) return {step, kStepPast, 0.0f};
      if (options.slopes) prepared.slope = options.slopes[step.head] * Unit::kPerNatural;
      if (is_partial(step)) prepared.flags |= kStepPartial;
      if (options.biased) prepared.flags |= kStepMayHide;
      if (options.masks) {
        const VisibilityTiles& tiles = workspace.visibility;
        const int state = tiles.states_of(work_tile.sequence.batch, work_tile.sequence.head + step.head,
                                          work_tile.key_tile)[tiles.query_tiles > 1 ? step.tile : 0];
        if (state == kTileHidden) prepared.flags |= kStepHidden;
        if (state == kTileMasked) prepared.flags |= kStepMasked | kStepMayHide;
      }
      if (options.hides && workspace.unclean[tile_index(step)]) prepared.flags |= kStepNonFinite;
    }
    return prepared;
  }
  /// The step, or the first after it of which the masks leave something, as number n.
  __device__ __forceinline__ void put_step(const BackwardStep& step, int n) const {
    PreparedStep prepared = prepare(step);
    while (prepared.flags & kStepHidden) prepared = prepare(next(prepared.step));
    if (lane == 0) work_tile.ring[n % 8] = prepared;
    __syncwarp();
  }
  __device__ __forceinline__ bool prepares() const { return Config::kScoreOptions && warp == Config::kRoleWarps; }

  /// Tiles that are skipped are not waited for.
  __device__ __forceinline__ void pass_turns(BackwardStep step, const BackwardStep& end) const {
    for (; step.head != end.head || step.tile != end.tile; step = next(step)) {
      wait_for_turn(step);
      end_turn(step);
    }
  }
  __device__ __forceinline__ void pass_turns_before(int n) const {
    if constexpr (Config::kScoreOptions) {
      if (workspace.turns && work_tile.options.masks)
        pass_turns(n == 0 ? work_tile.first_step() : next(work_tile.ring[(n - 1) % 8].step),
                   work_tile.ring[n % 8].step);
    }
  }

  /// S^T and P^T, or dP^T and dS^T.
  __device__ __forceinline__ void compute_p(const PreparedStep& now, int n) {
    float s[kM][kN][4] = {};
    if (!makes_p) for_each_with_term(s, s_minus_delta, [](float& x, float term) { x = term; });
    const uint32_t s_keys = kRematerialisesKeys    ? ptx::reread(s_key) + (makes_p ? 0 : Config::kKeyBytes)
                            : makes_p              ? s_key
                            : kRematerialisesValue ? rematerialise(s_value)
                                                   : s_value;
    multiply_rows(s, s_keys, makes_p ? query_stage(n) : s_grad_out);
    if (!makes_p) {
      compute_ds(s, now, n);
      store_weights(gradient_tile(n), s);
    } else if constexpr (Config::kScoreOptions) {
      exponentiate_general(s, now, n);
    } else {
      exponentiate(s, now.step, n);
      store_weights(weight_tile(n), s);
    }
  }

  /// The second products: of tile n for the P warps, of the one before for the dS warps; and dQ of the one before.
  __device__ __forceinline__ void consume_p(const PreparedStep& now, const BackwardStep& before, int n) {
    const bool wanted = makes_p ? p.dv.data && !has(now, kStepPast) : p.dk.data && n > 0;
    if (wanted) {
      accumulate(makes_p ? weight_tile(n) : gradient_tile(n - 1), makes_p ? s_grad_out : query_stage(n - 1));
    }
    if (n > 0) {
      pass_turns_before(n - 1);
      add_dq(before, n - 1);
    }
    if (has(now, kStepPast)) pass_turns_before(n);
  }

  __device__ __forceinline__ void run() {
    if constexpr (Config::kScoreOptions) {
      if (prepares()) {
        put_step(work_tile.first_step(), 0);
        put_step(next(work_tile.ring[0].step), 1);
      }
      __syncthreads();
      if (!makes_p) draw_kept(work_tile.ring[0], 0);
      if (makes_p && !has(work_tile.ring[0], kStepPast)) load_for_weights(work_tile.ring[0], 0);
    }
    ptx::cp_async_commit();
    PreparedStep walked = prepare(work_tile.first_step());
    int half = 0;
#pragma unroll 1
    for (;; ++half) {
      const int n = half / 2;
      const bool odd = half % 2 != 0;
      const PreparedStep& now = Config::kScoreOptions ? work_tile.ring[n % 8] : walked;
      const bool past = has(now, kStepPast);
      // Who loads a tile uses it first, in the next half-step; those who wait for nothing have loaded nothing.
      const bool makes_weights = makes_p != odd && !past;
      if (makes_p || half != 0) ptx::cp_async_wait<0>();
      if (makes_weights) {
        if (half == 0) remove_non_finite<Element, kHeadDim, kRoleThreads, kBlockN, true>(s_key, role_thread());
        // A hidden pair has weight 0, and 0 * NaN is NaN. What a query does see, its lse or its D knows.
        if (has(now, kStepPartial | kStepNonFinite)) {
          remove_non_finite<Element, kHeadDim, kRoleThreads, kBlockM>(odd ? s_grad_out : query_stage(n), role_thread());
        }
      }
      __syncthreads();
      if (makes_weights) {
        compute_p(now, n);
      } else {
        if (makes_p) {
          const PreparedStep then = Config::kScoreOptions ? work_tile.ring[(n + 1) % 8] : prepare(next(now.step));
          if (odd && !has(then, kStepPast)) load_for_weights(then, n + 1);
        } else {
          if (!past) load_grad_out(now.step);
        }
        ptx::cp_async_commit();
        if (Config::kScoreOptions && !makes_p && !past) {
          if (prepares()) put_step(next(work_tile.ring[(n + 1) % 8].step), n + 2);
          draw_kept(work_tile.ring[(n + 1) % 8], n + 1);
        }
        consume_p(now, Config::kScoreOptions ? work_tile.ring[(n + 7) % 8].step : previous(now.step), n);
      }
      if (past) break;
      if (!Config::kScoreOptions && odd) walked = prepare(next(walked.step));
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // V may still have been under way, or K is still read
    store_sums();
  }

  /// dV goes through the tile of V, which is done with, and dK through those of Q once the dS warps are: so they leave
  /// in 16-byte pieces.
  __device__ __forceinline__ void store_sums() {
    if (work_tile.sums) return store_split();
    const int lane = rematerialise(this->lane);
    const uint32_t s_tile = makes_p ? rematerialise(s_key) + Config::kKeyBytes : kQueriesHoldKeys ? s_query : s_key;
    const float unit = Config::kScoreOptions ? workspace.unit : 1.0f;
    const float factor = makes_p ? unit : unit * static_cast<float>(p.softmax_scale);
    const int first_d = warp % Config::kRoleWarps / Config::kKeyGroups * (kD / 2);
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

  /// Of a split.
  __device__ __forceinline__ void store_split() const {
    const int thread = ptx::reread(static_cast<int>(threadIdx.x)), warp = thread / 32;
    const bool is_value = warp < Config::kRoleWarps;
    const float unit = Config::kScoreOptions ? workspace.unit : 1.0f;
    const float factor = is_value ? unit : unit * static_cast<float>(p.softmax_scale);
    const int row = warp % Config::kKeyGroups * kM, column = warp % Config::kRoleWarps / Config::kKeyGroups * kD;
    float* const g_sums = work_tile.sums + (is_value ? kBlockN * kHeadDim : 0);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int d = 0; d < kD; ++d)
        store_fragment(sum_fragment<kHeadDim>(g_sums, row + m, column + d), sum[m][d], factor, thread % 32);
  }

  __device__ __forceinline__ void sync_role() const {
    if (makes_p) {
      ptx::barrier_sync<1, kRoleThreads>();
    } else {
      ptx::barrier_sync<2, kRoleThreads>();
    }
  }
};

}  // namespace flash_ext::sm80
