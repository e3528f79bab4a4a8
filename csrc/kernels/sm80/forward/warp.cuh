// The state of a warp of the forward: its rows, where tiles lie, and what it accumulates for its rows.
#pragma once

#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/common/warp_products.cuh"
#include "kernels/ptx/lane.h"
#include "kernels/ptx/reread.h"
#include "kernels/ptx/shared_address.h"
#include "options.cuh"
#include "rows.cuh"
#include "storage.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct ForwardWarp {
  using Element = typename Config::Element;
  using Unit = ScoreUnit<Element>;
  using Products = flash_ext::Products<Element, Config::kHeadDim>;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kBlockM = Config::kBlockM;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kM = Config::kWarpRows / 16;
  static constexpr int kN = kBlockN / 8;
  static constexpr int kD = kHeadDim / 8;
  static constexpr int kSteps = kHeadDim / Products::kDepth;
  static constexpr int kUnroll = Config::kUnroll;
  using Scores = typename ForwardRows<Config>::Scores;
  using Visibility = typename OptionTiles<Config>::Visibility;
  using RandomBits = WarpRandomBits<Config>;
  using KeptWeights = std::conditional_t<Config::kOneDropout, typename RandomBits::Kept, NoRandomBits>;

  const ForwardParams& p;
  const ForwardConstants& constants;
  ForwardWorkTile<Config>& work_tile;
  int warp_row, lane;
  const uint32_t s_q, s_k, s_v;
  int phase = 0;          // which stage the K of this step is in
  uint32_t seen = 0;      // of the masks: visible_tiles of the next tile to visit
  const PhiloxKey seeds;  // of dropout

  ForwardRows<Config> rows;
  typename Products::A r_q[Config::kQueryInRegisters ? kSteps : 1][kM];

  __device__ __forceinline__ ForwardWarp(const ForwardParams& p, const ForwardConstants& constants,
                                         ForwardWorkTile<Config>& work_tile, char* shared)
      : p(p),
        constants(constants),
        work_tile(work_tile),
        warp_row(threadIdx.x / 32 * Config::kWarpRows),
        lane(threadIdx.x % 32),
        s_q(ptx::shared_address(shared)),
        s_k(s_q + Config::kQueryBytes),
        s_v(s_k + Config::kStages * Config::kTileBytes),
        seeds(seeds_of(p)) {}

  /// Seeds of dropout, for kOneDropout alone: there they stand in uniform registers. Other variants read them with the
  /// options.
  __device__ __forceinline__ static PhiloxKey seeds_of(const ForwardParams& p) {
    if constexpr (!Config::kOneDropout) return {};
    return uniform_seeds(p.dropout);
  }
  __device__ __forceinline__ OptionTiles<Config> options() const {
    return {p, constants, work_tile, s_q, warp_row, lane};
  }
  /// The stage of K or V of the current step, or of the step after it.
  __device__ __forceinline__ uint32_t stage(uint32_t s_ring, int steps_ahead) const {
    return s_ring + (Config::kStages == 1 ? 0u : static_cast<uint32_t>((phase + steps_ahead) & 1)) * Config::kTileBytes;
  }

  /// Returns threadIdx.x; where registers are short, so that its addresses are not kept from step to step. On sm_80
  /// ptxas finds room for them, except with a mask.
  __device__ __forceinline__ static int copying_thread() {
    const int thread = static_cast<int>(threadIdx.x);
#if __CUDA_ARCH__ >= 900
    constexpr bool kForgets = Config::kRematerialisesThread;
#else
    constexpr bool kForgets = Config::kRematerialisesThread && Config::kOneMask;
#endif
    if constexpr (kForgets) return ptx::reread(thread);
    return thread;
  }

  __device__ __forceinline__ void forget_lane() {
#if __CUDA_ARCH__ >= 900
    constexpr bool kForgets =
        Config::kRematerialisesLane || (kHeadDim == 128 && (Config::kOneBias || Config::kComputes));
#else
    constexpr bool kForgets = Config::kRematerialisesLane;
#endif
    if constexpr (!kForgets) return;
    lane = ptx::reread(lane);
    warp_row = ptx::reread(warp_row);
  }

  /// Rows of the sequence from this lane's first one on. It is seldom called, so values that depend on the lane are not
  /// kept for it.
  __device__ __forceinline__ int rows_left() const {
    return work_tile.sequence.seqlen_q - (work_tile.first_query + ptx::reread(warp_row) + ptx::reread(lane) / 4);
  }
};

}  // namespace flash_ext::sm80
