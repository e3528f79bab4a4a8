// The state of a warp of the backward's main kernel: its role, its rows and columns, where tiles lie.
#pragma once

#include "kernels/common/backward/workspace.h"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/warp_products.cuh"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/reread.h"
#include "kernels/ptx/shared_address.h"
#include "storage.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct BackwardWarp {
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
  // Tiles of 8 columns of dQ that a warp computes at once.
  static constexpr int kDqTiles = Config::kFloat ? 2 : Config::kHasOptions && Dq::kN > 4 ? 4 : Dq::kN;
  static constexpr int kUnrollDq = Config::kFloat ? 8 : 1;  // so that ptxas does not spill
#if __CUDA_ARCH__ >= 900
  static constexpr bool kRematerialisesKeys = !Config::kHasOptions, kRematerialisesValue = false;  // likewise
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

  __device__ __forceinline__ BackwardWarp(const BackwardParams& p, const BackwardWorkspace& workspace, bool copies_bias,
                                          BackwardWorkTile<Config>& work_tile, char* shared)
      : p(p),
        workspace(workspace),
        copies_bias(copies_bias),
        work_tile(work_tile),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        makes_p(warp < Config::kRoleWarps),
        first_row(warp % Config::kWarpsAlongKeys * Config::kWarpKeys),
        first_column(warp % Config::kRoleWarps / Config::kWarpsAlongKeys * Config::kWarpQueries),
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

  /// Returns x. Values that depend on it are not computed before the loop, for which options leave no registers.
  template <class T>
  __device__ __forceinline__ static T rematerialise(T x) {
    return Config::kHasOptions ? ptx::reread(x) : x;
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

  __device__ __forceinline__ void sync_role() const {
    if (makes_p) {
      ptx::barrier_sync<kProbabilityWarps, kRoleThreads>();
    } else {
      ptx::barrier_sync<kGradientWarps, kRoleThreads>();
    }
  }
};

}  // namespace flash_ext::sm80
