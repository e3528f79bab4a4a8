// Attention backward on mma.sync (FlashAttention-2, Dao 2023, algorithm 2), recomputing the probabilities from lse:
//
//   S^T = K Q^T,   P^T = 2^(S^T - lse),   dP^T = V dO^T,   dS^T = P^T (dP^T - D)         D: backward_rows.cuh
//   dV += P^T dO,  dK += dS^T Q,          dQ += dS K
//
// A block owns kBlockN keys of one key head, and walks all tiles of queries that see them, of all heads of the group.
// Half of its warps, the P warps, make S^T, P^T and dV; the others, the dS warps, make dP^T, dS^T and dK. A warp owns
// kWarpKeys keys of S^T or dP^T, so what it computes is, without leaving its registers, the A operand of its second
// product. P^T goes to the dS warps through a tile in shared memory, in which they leave dS^T in its place (a warp
// reads and writes the same elements); from there all warps make dQ, each a part of the tile of queries.
//
// Half-steps, with a barrier before each; m counts tiles of queries:
//             P warps                                        dS warps
//   2 m       S^T(m) = K Q(m)^T, P^T(m), stored              dK += dS^T(m - 1) Q(m - 1), dQ(m - 1)
//   2 m + 1   dV += P^T(m) dO(m), dQ(m - 1)                  dP^T(m) = V dO(m)^T, dS^T(m), stored
// so the exponentials and dS of one half of the warps always meet products of the other, and both run through the same
// code, half a step apart. Q(m + 1) is loaded during 2 m + 1, dO(m) during 2 m: two stages of Q, one of dO.
//
// What only P knows travels with it: the derivative of the softcap is multiplied into the P^T that the dS warps get,
// and its sign tells a dropped weight.
//
// dQ is summed over the blocks by atomic additions to float tiles (backward_dq.cuh). Deterministic: additions to a tile
// take turns, from its last keys to its first, which is the order in which blocks draw their keys.
#pragma once

#include <new>

#include "../common/scores.cuh"
#include "../common/sequence.cuh"
#include "../common/tile_range.h"
#include "../common/visibility.cuh"
#include "../launch.h"
#include "../ptx/barrier.h"
#include "backward_dq.cuh"
#include "backward_rows.cuh"
#include "backward_work.cuh"
#include "backward_workspace.h"
#include "config.h"
#include "non_finite.cuh"
#include "products.cuh"

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
  static constexpr int kHeadDim = Config::kHeadDim, kThreads = Config::kThreads;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kM = Config::kWarpKeys / 16, kN = Config::kWarpQueries / 8, kD = Config::kWarpColumns / 8;
  using Rows = Products<Element, kHeadDim>;   // K, V, Q, dO
  using Scores = Products<Element, kBlockM>;  // P^T, dS^T
  using Dq = typename Config::Dq;
  using Work = BackwardWork<Config>;
  static constexpr int kUnroll = Config::kUnroll;
  // Tiles of 8 columns of dQ that a warp makes at once.
  static constexpr int kDqTiles = Config::kFloat ? 2 : Config::kGeneral && Dq::kN > 4 ? 4 : Dq::kN;
  static constexpr int kUnrollDq = Config::kFloat ? 8 : 1;  // as ptxas gets by without spills
  static constexpr int kRoleThreads = kThreads / 2;
  static constexpr bool kQueriesHoldKeys = 2 * kBlockM >= kBlockN;  // the stages of Q have room for dK
  static constexpr bool kWeightsInRegisters = Config::kSides == 1;
  static constexpr int kWeightSteps = kWeightsInRegisters ? kBlockM / Rows::kDepth : 1;

  const BackwardParams& p;
  const BackwardWorkspace& workspace;
  BackwardWork<Config>& work;
  const int warp, lane;
  const bool makes_p;
  const int first_row;     // of the warp's keys in the tile
  const int first_column;  // of the warp's queries in the tile
  const uint32_t s_key, s_value, s_query, s_grad_out, s_scores, s_lse, s_minus_delta;
  uint32_t* const s_words;

  float sum[kM][kD][4] = {};                     // dV or dK
  typename Rows::A r_weights[kWeightSteps][kM];  // P^T or dS^T, from one half-step to the next

  __device__ __forceinline__ BackwardBlock(const BackwardParams& p, const BackwardWorkspace& workspace,
                                           BackwardWork<Config>& work, char* shared)
      : p(p),
        workspace(workspace),
        work(work),
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
        s_words(reinterpret_cast<uint32_t*>(shared + Config::kTilesBytes + 3 * Config::kTermBytes)) {}

  __device__ __forceinline__ static int role_thread() { return static_cast<int>(threadIdx.x) % kRoleThreads; }
  __device__ __forceinline__ uint32_t query_stage(int n) const { return s_query + n % 2 * Config::kQueryBytes; }
  __device__ __forceinline__ uint32_t lse_stage(int n) const { return s_lse + n % 2 * Config::kTermBytes; }
  /// dS^T of step n.
  __device__ __forceinline__ uint32_t gradient_tile(int n) const { return s_scores + n % 2 * Config::kScoreBytes; }
  /// P^T of step n.
  __device__ __forceinline__ uint32_t weight_tile(int n) const {
    return Config::kScoreTiles == 2 ? gradient_tile(n) : s_scores + 2 * Config::kScoreBytes;
  }

  __device__ __forceinline__ int64_t tile_index(const BackwardStep& step) const { return tile_index(work, step); }
  __device__ __forceinline__ int64_t tile_index(const Work& of, const BackwardStep& step) const {
    return of.workspace_tile + step.head * workspace.tiles_per_head + step.tile;
  }
  __device__ __forceinline__ bool is_partial(const BackwardStep& step) const {
    return step.tile < work.tiles.full_begin || step.tile >= work.tiles.full_end;
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
  /// `of` is what `work` is, or will be.
  __device__ __forceinline__ void load_queries(const Work& of, const BackwardStep& step, int n) const {
    load_rows(query_stage(n), of.queries, step.head * p.q.head_stride, step, of.sequence.seqlen_q, p.head_dim);
    load_terms(lse_stage(n), workspace.lse + tile_index(of, step) * kBlockM);
  }
  /// Without masks the first tile is known before anything else is.
  __device__ __forceinline__ void load_first_queries(const Work& of) const {
    const BackwardStep step = of.first_step();
    if (makes_p && !has_masks() && step.head < of.heads) load_queries(of, step, 0);
  }
  __device__ __forceinline__ void load_grad_out(const BackwardStep& step) const {
    load_rows(s_grad_out, work.grad_out, step.head * p.grad_out.head_stride, step,
              p.grad_out.data ? work.sequence.seqlen_q : 0, p.head_dim_v);
    load_terms(s_minus_delta, workspace.minus_delta + tile_index(step) * kBlockM);
  }
  __device__ __forceinline__ static void load_terms(uint32_t s_terms, const float* terms) {
    const int thread = role_thread();
    if (thread < kBlockM / 4) ptx::cp_async_16(s_terms + 16 * thread, terms + 4 * thread);
  }

  /// c += A B^T for the warp's rows of A and its queries of B.
  __device__ __forceinline__ void multiply_rows(float (&c)[kM][kN][4], uint32_t s_a, uint32_t s_b) const {
    const uint32_t s_lane_a = s_a + Rows::lane_a(lane) + first_row * Rows::kRowBytes;
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
        for (int m = 0; m < kM; ++m) Rows::multiply(c[m][n], c[m][n + 1], a[m], b);
      }
    }
  }

  /// sum += W B for weights W of the warp's keys: its own, or, where several warps share keys, those in s_weights. Its
  /// own are used up: each step takes the first and moves up the others, as registers cannot be indexed in a loop.
  __device__ __forceinline__ void accumulate(uint32_t s_weights, uint32_t s_b) {
    const int first_d = warp % Config::kRoleWarps / Config::kKeyGroups * (Config::kWarpColumns / 16);
    const uint32_t s_lane_b = s_b + Rows::lane_b_transposed(lane);
    const uint32_t s_lane_a = s_weights + Scores::lane_a_of_c(lane) + first_row * Scores::kRowBytes;
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
    const int turn = work.turn(step.tile);
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

  __device__ __forceinline__ TileCoordinates<true> coordinates(const BackwardStep& step) const {
    return TileCoordinates<true>::of_lane(work.first_key + first_row, step.tile * kBlockM + first_column, lane);
  }
  /// What a lane adds to s_minus_delta or a stage of lse for its queries of a column of accumulators.
  __device__ __forceinline__ uint32_t term_at(int column) const {
    return 4 * (first_column + 2 * (lane % 4) + 8 * column);
  }
  /// What a lane adds to weight_tile() or gradient_tile() for its accumulators.
  __device__ __forceinline__ uint32_t lane_of_scores() const {
    return Scores::lane_c(lane) + first_row * Scores::kRowBytes;
  }
  __device__ __forceinline__ int first_pair() const { return Config::kSides == 1 ? 0 : first_column / 16; }

  /// P^T in place of S^T.
  __device__ __forceinline__ void exponentiate(float (&s)[kM][kN][4], const BackwardStep& step, int n) const {
    const float scale = work.scale;
    for_each_with_term(s, lse_stage(n), [&](float& x, float lse) { x = ptx::exp2_approx(fmaf(x, scale, -lse)); });
    if (is_partial(step)) hide(s, step);
  }

  /// Zeroes the weights outside of the window, whatever they are: a query may have an lse of NaN because of another
  /// key. Queries past the end have none, by their lse.
  __device__ __forceinline__ void hide(float (&weights)[kM][kN][4], const BackwardStep& step) const {
    const TileCoordinates<true> at = coordinates(step);
    const Sequence& sequence = work.sequence;
    const int end = at.first_column + sequence.offset + sequence.right + 1 - at.first_row;
    const int end_of_all = sequence.seqlen_k - at.first_row;
    for_each_score(weights, [&](float& x, int m, int n, int e) {
      if (16 * m + 8 * (e / 2) >= min(end + 8 * n + e % 2, end_of_all)) x = 0.0f;
    });
    if (sequence.left >= sequence.seqlen_q + sequence.seqlen_k) return;
    const int begin = at.first_column + sequence.offset - sequence.left - at.first_row;
    for_each_score(weights, [&](float& x, int m, int n, int e) {
      if (16 * m + 8 * (e / 2) < begin + 8 * n + e % 2) x = 0.0f;
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

  /// The same under all options, sixteen queries at a time. What is stored for dS^T, where that will be, is P^T times
  /// the derivative of the softcap, negative where the weight is dropped.
  __device__ __forceinline__ void exponentiate_general(float (&s)[kM][kN][4], const BackwardStep& step, int n,
                                                       bool masked) const {
    Sequence sequence = work.sequence;
    sequence.head += step.head;
    const ScoreRules<Element> rules(p, sequence);
    const Dropout dropout(p, sequence);
    const bool partial = is_partial(step);
#pragma unroll
    for (int first = 0; first < kN; first += 2) {
      TileCoordinates<true> at = coordinates(step);
      at.first_column += 8 * first;
      float x[kM][2][4];
      float slope[kM][2][4];
      for_each_score(x, [&](float& y, int m, int h, int e) {
        y = s[m][first + h][e] * rules.scale;
        if (rules.cap > 0.0f) y = rules.tanh(y);
        slope[m][h][e] = rules.cap > 0.0f ? 1.0f - y * y : 1.0f;
        if (rules.cap > 0.0f) y *= rules.cap;
      });
      rules.add_terms(x, at);
      if (partial) hide_outside_window(x, at, sequence);
      if (masked) hide_by_words(x, n, first);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 lse = load_shared<float2>(lse_stage(n) + term_at(first + h));
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& y = x[m][h][e];
            y = y == -INFINITY ? 0.0f : ptx::exp2_approx(y - (e % 2 ? lse.y : lse.x));
            slope[m][h][e] = y == 0.0f ? 0.0f : slope[m][h][e] * y;  // of a hidden score it may be NaN
          }
      }
      if (dropout.active) drop(x, slope, dropout, at);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        Scores::store_c(gradient_tile(n) + lane_of_scores(), 16 * m, first_pair() + first / 2, slope[m][0],
                        slope[m][1]);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[m][first + h][e] = x[m][h][e];
      }
    }
  }

  /// A lane's keys are those of one word: j, j + 8, j + 16, j + 24.
  __device__ __forceinline__ void hide_by_words(float (&x)[kM][2][4], int n, int first) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int query = first_column + 8 * (first + h) + 2 * (lane % 4) + c;
        const uint32_t word = s_words[query * Config::kKeyGroups + first_row / 32] >> (lane / 4);
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            if (!(word >> (16 * m + 8 * r) & 1u)) x[m][h][2 * r + c] = -INFINITY;
      }
  }

  /// One call decides the queries i, i + 8 and the keys j, j + 8, j + 16, j + 24.
  __device__ __forceinline__ static void drop(float (&weight)[kM][2][4], float (&stored)[kM][2][4],
                                              const Dropout& dropout, const TileCoordinates<true>& at) {
    static_assert(kM == 2, "a warp has 32 keys");
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const PhiloxWords words = dropout_words(dropout.key, dropout.batch_head, at.column(0, c), at.row(0, 0));
#pragma unroll
      for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if ((words.word[w] >> (16 * h) & 0xFFFFu) >= dropout.threshold) continue;
          weight[w / 2][h][w % 2 * 2 + c] = 0.0f;
          stored[w / 2][h][w % 2 * 2 + c] *= -1.0f;
        }
    }
  }

  /// dS^T in place of dP^T - D (or of dP^T, in the general case).
  template <class F>
  __device__ __forceinline__ void differentiate(float (&s)[kM][kN][4], int n, F gradient) const {
    const uint32_t s_lane = (Config::kGeneral ? gradient_tile(n) : weight_tile(n)) + lane_of_scores();
#pragma unroll
    for (int column = 0; column < kN; column += 2)
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float weights[2][4];
        Scores::load_c(s_lane, 16 * m, first_pair() + column / 2, weights[0], weights[1]);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int e = 0; e < 4; ++e) gradient(s[m][column + h][e], weights[h][e], column + h, e);
      }
  }

  /// Where P is 0 the rest may be NaN, from keys that the query does not see; in a full tile it sees them all.
  __device__ __forceinline__ void differentiate(float (&s)[kM][kN][4], const BackwardStep& step, int n) const {
    if constexpr (Config::kGeneral) {
      const float keep_scale = static_cast<float>(dropout_keep_scale(p.dropout.p));
      differentiate(s, n, [&](float& x, float weight, int column, int e) {
        const float minus_delta = load_shared<float>(s_minus_delta + term_at(column) + e % 2 * 4);
        const float ds = fabsf(weight) * ((signbit(weight) ? 0.0f : x * keep_scale) + minus_delta);
        x = weight == 0.0f ? 0.0f : ds;
      });
    } else if (is_partial(step)) {
      differentiate(s, n, [](float& x, float weight, int, int) { x = weight == 0.0f ? 0.0f : weight * x; });
    } else {
      differentiate(s, n, [](float& x, float weight, int, int) { x *= weight; });
    }
  }

  /// The tile after `step`, among those that some key sees; past the last, head is past the group.
  __device__ __forceinline__ BackwardStep next(BackwardStep step) const {
    if (++step.tile == work.tiles.end) step.tile = work.tiles.begin;
    if (step.tile == work.first_tile) ++step.head;
    return step;
  }

  __device__ __forceinline__ BackwardStep previous(BackwardStep step) const {
    if (step.tile == work.first_tile) --step.head;
    if (step.tile == work.tiles.begin) step.tile = work.tiles.end;
    --step.tile;
    return step;
  }

  __device__ __forceinline__ bool is_past(const BackwardStep& step) const { return step.head >= work.heads; }

  struct Prepared {
    BackwardStep step;
    bool masked;
  };

  __device__ __forceinline__ bool has_masks() const { return Config::kGeneral && (p.mask.data || p.blocks.offsets); }

  /// `step`, or the first after it in which the masks leave something; its words of visibility are made.
  __device__ __forceinline__ Prepared prepare(BackwardStep step) const {
    if constexpr (Config::kGeneral) {
      if (has_masks()) {
        for (; !is_past(step); step = next(step)) {
          Sequence sequence = work.sequence;
          sequence.head += step.head;
          const TileVisibility visible = build_visibility<kThreads, kBlockM, kBlockN>(
              s_words, MaskRows(p.mask, sequence), BlockMaskRows(p.blocks, sequence), step.tile * kBlockM,
              work.first_key, sequence.seqlen_q, sequence.seqlen_k);
          if (visible.any) return {step, !visible.all};
          if (workspace.turns) {
            wait_for_turn(step);
            end_turn(step);
          }
        }
      }
    }
    return {step, false};
  }

  /// S^T and P^T, or dP^T and dS^T.
  __device__ __forceinline__ void make_weights(const Prepared& now, int n) {
    float s[kM][kN][4] = {};
    if (!Config::kGeneral && !makes_p) for_each_with_term(s, s_minus_delta, [](float& x, float term) { x = term; });
    multiply_rows(s, makes_p ? s_key : s_value, makes_p ? query_stage(n) : s_grad_out);
    if (!makes_p) {
      differentiate(s, now.step, n);
      store_weights(gradient_tile(n), s);
    } else if constexpr (Config::kGeneral) {
      exponentiate_general(s, now.step, n, now.masked);
      if constexpr (kWeightsInRegisters) {
        keep_weights(s);
      } else {
        store_weights(weight_tile(n), s);
      }
    } else {
      exponentiate(s, now.step, n);
      store_weights(weight_tile(n), s);
    }
  }

  /// The second products: of tile n for the P warps, of the one before for the dS warps; and dQ of the one before.
  __device__ __forceinline__ void use_weights(const Prepared& now, const BackwardStep& before, int n) {
    const bool wanted = makes_p ? p.dv.data && !is_past(now.step) : p.dk.data && n > 0;
    if (wanted) {
      accumulate(makes_p ? weight_tile(n) : gradient_tile(n - 1), makes_p ? s_grad_out : query_stage(n - 1));
    }
    if (n > 0) add_dq(before, n - 1);
  }

  __device__ __forceinline__ void run() {
    Prepared now = prepare(work.first_step()), then = now;
    BackwardStep before = now.step;
    if (has_masks() && makes_p && !is_past(now.step)) load_queries(work, now.step, 0);
    ptx::cp_async_commit();
    int half = 0;
#pragma unroll 1
    for (;; ++half) {
      const int n = half / 2;
      const bool odd = half % 2 != 0, past = is_past(now.step);
      // Who loads a tile uses it first, in the next half-step; those who wait for nothing have loaded nothing.
      const bool makes_weights = makes_p != odd && !past;
      if (makes_p || half != 0) ptx::cp_async_wait<0>();
      if (makes_weights) {
        if (half == 0) take_out_non_finite<Element, kHeadDim, kRoleThreads, kBlockN>(s_key, role_thread());
        // A hidden pair has weight 0, and 0 * NaN is NaN. What a query does see, its lse or its D knows.
        if (Config::kGeneral || is_partial(now.step)) {
          take_out_non_finite<Element, kHeadDim, kRoleThreads, kBlockM>(odd ? s_grad_out : query_stage(n),
                                                                        role_thread());
        }
      }
      __syncthreads();
      if (has_masks() && odd) then = prepare(next(now.step));
      if (makes_weights) {
        make_weights(now, n);
      } else {
        if (makes_p) {
          const BackwardStep following = has_masks() ? then.step : next(now.step);
          if (odd && !is_past(following)) load_queries(work, following, n + 1);
        } else {
          if (!past) load_grad_out(now.step);
        }
        ptx::cp_async_commit();
        use_weights(now, has_masks() ? before : previous(now.step), n);
      }
      if (past) break;
      if (odd) {
        before = now.step;
        now = has_masks() ? then : Prepared{next(now.step), false};
      }
    }
    ptx::cp_async_wait<0>();
    // V may still have been under way, or K is still read.
    if (half == 0 || !kQueriesHoldKeys) __syncthreads();
    store_sums();
  }

  /// dV goes through the tile of V, which is done with, and dK through those of Q once the dS warps are: so they leave
  /// in 16-byte pieces.
  __device__ __forceinline__ void store_sums() {
    const uint32_t s_tile = makes_p ? s_value : kQueriesHoldKeys ? s_query : s_key;
    const float keep_scale = Config::kGeneral ? static_cast<float>(dropout_keep_scale(p.dropout.p)) : 1.0f;
    const float factor = makes_p ? keep_scale : static_cast<float>(p.softmax_scale);
    const int first_d = warp % Config::kRoleWarps / Config::kKeyGroups * (kD / 2);
    const uint32_t s_lane = s_tile + Rows::lane_c(lane) + first_row * Rows::kRowBytes;
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
    store_rows<Element, kHeadDim>(s_tile, key_rows<Element, false>(p, view, work.sequence),
                                  warp % Config::kRoleWarps * kRowsOfWarp, kRowsOfWarp, work.first_key,
                                  work.sequence.seqlen_k, static_cast<int>(makes_p ? p.head_dim_v : p.head_dim), lane);
  }

  __device__ __forceinline__ void sync_role() const {
    if (makes_p) {
      ptx::barrier_sync<1, kRoleThreads>();
    } else {
      ptx::barrier_sync<2, kRoleThreads>();
    }
  }
};

/// Blocks of a head run side by side, so that its queries stay in L2; under a causal mask the first keys, which the
/// most queries see, come first. Deterministic: blocks draw numbers, so that whoever waits waits for one that runs.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardWorkspace workspace,
                    unsigned key_tiles) {
  extern __shared__ __align__(128) char shared[];
  auto* const s_work = reinterpret_cast<BackwardWork<Config>*>(shared + Config::kSharedBytes - Config::kWorkBytes);
  auto* const s_ticket = reinterpret_cast<unsigned*>(s_work);
  unsigned number = blockIdx.x;
  if (workspace.turns) {
    if (threadIdx.x == 0) *s_ticket = static_cast<unsigned>(atomicAdd(workspace.ticket, 1));
    __syncthreads();
    number = *s_ticket;
    __syncthreads();
  }
  const unsigned heads_kv = static_cast<unsigned>(p.heads_kv), heads = gridDim.x / key_tiles;
  const unsigned key_tile = workspace.turns ? key_tiles - 1 - number / heads : number % key_tiles;
  const unsigned head = workspace.turns ? number % heads : number / key_tiles;
  const int batch = static_cast<int>(head / heads_kv);
  const int head_q = static_cast<int>(head % heads_kv * (static_cast<unsigned>(p.heads_q) / heads_kv));
  const Sequence sequence(p, batch, head_q);
  const int first_key = static_cast<int>(key_tile) * Config::kBlockN;
  if (first_key >= sequence.seqlen_k) return;
  BackwardBlock<Config> block(p, workspace, *s_work, shared);
  block.load_keys(sequence, first_key);
  const BackwardWork<Config> work(p, workspace, sequence, static_cast<int>(key_tile));
  block.load_first_queries(work);
  if (threadIdx.x == 0) *s_work = work;
  __syncthreads();
  block.run();
}

template <class Config>
void launch_backward(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Element = typename Config::Element;
  constexpr int kBlockM = Config::kBlockM, kHeadDim = Config::kHeadDim;
  const BackwardWorkspace workspace(p, kBlockM, kHeadDim, memory);
  const LaunchShape rows{dim3(grid_size(RowTileOfBlock::blocks(p, kBlockM))), dim3(kRowTermThreads)};
  launch("sm80/backward rows", backward_row_terms_kernel<Element, kHeadDim, kBlockM>, rows, stream, p, workspace);

  if (p.dq.data || p.dk.data || p.dv.data) {
    const int64_t key_tiles = (p.seqlen_k + Config::kBlockN - 1) / Config::kBlockN;
    const LaunchShape keys{dim3(grid_size(key_tiles * p.heads_kv * p.batch)), dim3(Config::kThreads),
                           Config::kSharedBytes};
    launch("sm80/backward", backward_kernel<Config>, keys, stream, p, workspace, static_cast<unsigned>(key_tiles));
  }
  if (p.dq.data) {
    launch("sm80/backward dq", store_dq_kernel<Element, typename Config::Dq, kBlockM, kHeadDim>, rows, stream, p,
           workspace);
  }
  if (p.dsink) {
    const LaunchShape heads{dim3(static_cast<unsigned>(p.heads_q)), dim3(kRowTermThreads)};
    launch("sm80/backward sink", sink_gradient_kernel<kBlockM>, heads, stream, p, workspace);
  }
}

inline bool is_plain_backward(const BackwardParams& p) {
  const bool plain_scores = p.softmax_scale > 0 && p.softcap == 0 && !p.alibi_slopes && !p.bias.data;
  return plain_scores && !p.mask.data && !p.blocks.offsets && p.dropout.p == 0;
}

/// Calls run with the configuration that serves a call on the current device.
template <class Element, int kHeadDim, class Run>
void with_backward_config(const BackwardParams& p, Run run) {
  using Plain = BackwardConfig<Element, kHeadDim, false, false>;
  using General = BackwardConfig<Element, kHeadDim, true, false>;
  const int available = shared_bytes_per_block();
  if (is_plain_backward(p) && available >= Plain::kSharedBytes) return run(Plain());
  if (available >= General::kSharedBytes) return run(General());
  if constexpr (sizeof(Element) == 4 && kHeadDim == 256) {
    throw std::runtime_error(
        "flash_ext: gradients of float32 with a head_dim above 128 need a GPU with 173 KB of shared memory per block");
  } else {
    run(BackwardConfig<Element, kHeadDim, true, true>());
  }
}

template <class Element, int kHeadDim>
int64_t backward_bytes(const BackwardParams& p) {
  int64_t bytes = 0;
  with_backward_config<Element, kHeadDim>(
      p, [&](auto config) { bytes = BackwardWorkspace(p, decltype(config)::kBlockM, kHeadDim, nullptr).bytes; });
  return bytes;
}

template <class Element, int kHeadDim>
void run_backward(const BackwardParams& p, void* memory, cudaStream_t stream) {
  with_backward_config<Element, kHeadDim>(p,
                                          [&](auto config) { launch_backward<decltype(config)>(p, memory, stream); });
}

}  // namespace flash_ext::sm80
