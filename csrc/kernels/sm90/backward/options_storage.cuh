// What the warps of a CTA share in addition where the pipelined loop has options: option_scores.cuh says when it is
// written.
#pragma once

#include "kernels/common/backward/non_finite_rows.cuh"
#include "kernels/common/backward/visibility.cuh"
#include "kernels/sm90/common/backward/option_parts.cuh"
#include "kernels/sm90/common/backward/options.cuh"
#include "kernels/sm90/common/backward/steps.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// Whether a CTA without steps has turns that some later CTA may wait for.
template <class Config, bool kSkipsTurns = Config::kSkipsTurns>
struct BackwardSkippedTurns {};
template <class Config>
struct BackwardSkippedTurns<Config, true> {
  bool skips_turns;
};

/// Barriers of the bias tile, where there is a bias of query-key pairs.
template <class Config, bool kBiased = Config::kBiased>
struct BackwardBiasBarriers {
  __device__ __forceinline__ void init_bias() {}
};
template <class Config>
struct BackwardBiasBarriers<Config, true> {
  uint64_t bias_full, bias_empty;

  __device__ __forceinline__ void init_bias() {
    init_barrier(bias_full, 1);
    init_barrier(bias_empty, Config::kWarpgroups * kWarpgroupWarps);
  }
};

/// The steps of the CTA that a mask of pairs leaves.
template <class Config, bool kFindsSteps = Config::kFindsSteps>
struct BackwardFoundStepsOfCta {};
template <class Config>
struct BackwardFoundStepsOfCta<Config, true> {
  FoundQueries step_metadata[kMetadataSlots];
  const uint32_t* words;  // of all tiles
  int steps;
};

/// Returns the state of a query tile. `head` counts from the CTA's first.
template <class Config>
__device__ __forceinline__ TileState state_of(const VisibilityTiles& tiles, const BackwardWorkTile<Config>& work_tile,
                                              int head, int tile) {
  const Sequence& sequence = work_tile.sequence;
  return static_cast<TileState>(
      tiles.state_of(sequence.batch, sequence.head + head, work_tile.first_key / Config::kBlockN, tile));
}

template <class Config>
struct BackwardPipelinedOptionsStorage : BackwardPipelinedStorage<Config>,
                                         BackwardKeptWords<Config>,
                                         BackwardBiasBarriers<Config>,
                                         BackwardVisibleKeys<Config>,
                                         BackwardSkippedTurns<Config>,
                                         BackwardKeyBiases<Config>,
                                         BackwardFoundStepsOfCta<Config> {
  float cap;            // of scores, to base 2
  bool has_non_finite;  // Q or dO of some step may hold Inf or NaN, and some pair is hidden

  __device__ __forceinline__ void init() {
    this->init_bias();
    this->init_kept();
    BackwardPipelinedStorage<Config>::init();
  }

  __device__ __forceinline__ void prepare(const BackwardParams& p) {
    if constexpr (Config::may_have(kStepSoftcapped)) cap = static_cast<float>(p.softcap) * kLog2E;
    this->seed(p, this->work_tile.sequence);
  }
  /// Reads masks, called by all threads of the CTA. If no head sees a key, the CTA then has no steps, but it may have
  /// turns.
  __device__ __forceinline__ void read_masks(const BackwardParams& p, const BackwardWorkspace& workspace) {
    if constexpr (Config::kFindsSteps) count_steps(workspace);
    bool hides = Config::kBiased;  // it may hide any pair
    if constexpr (Config::may_have(kStepKeyBiased)) hides |= find_hidden_keys(p);
    if (hides) find_non_finite(workspace);
  }

 private:
  __device__ __forceinline__ void count_steps(const BackwardWorkspace& workspace) {
    ptx::wait_for_previous_grid();  // for states
    const BackwardWorkTile<Config>& tile = this->work_tile;
    const VisibilityTiles& tiles = workspace.visibility;
    const int of_head = tile.tiles.end - tile.tiles.begin;
    int count = 0;
#pragma unroll 1
    for (int first = 0; first < tile.heads * of_head; first += Config::kThreads) {
      const int step = first + static_cast<int>(threadIdx.x);
      bool left = false;
      if (step < tile.heads * of_head)
        left = state_of(tiles, tile, step / of_head, tile.tiles.begin + step % of_head) != kTileHidden;
      count += __syncthreads_count(left);
    }
    if (threadIdx.x == 0) {
      this->words = tiles.words;
      this->steps = count;
      if (count == 0) this->work_tile.tiles.end = tile.tiles.begin;
    }
    __syncthreads();
  }

  /// Finds whether Q and dO must be sanitised. If so, no tile counts as full any more.
  __device__ __forceinline__ void find_non_finite(const BackwardWorkspace& workspace) {
    ptx::wait_for_previous_grid();  // for row terms
    BackwardWorkTile<Config>& tile = this->work_tile;
    const bool found = __syncthreads_or(finds_non_finite(workspace, tile.workspace_tile + tile.tiles.begin,
                                                         tile.tiles.end - tile.tiles.begin, tile.heads,
                                                         static_cast<int>(threadIdx.x), Config::kThreads));
    if (threadIdx.x == 0) {
      has_non_finite = found;
      if (found) tile.tiles.full_begin = tile.tiles.full_end = tile.tiles.end;
    }
    __syncthreads();
  }

  /// Whether some key is hidden from all queries of some head.
  __device__ __forceinline__ bool find_hidden_keys(const BackwardParams& p) {
    bool sees = false, hides = false;
    if (threadIdx.x < Config::kBlockN) find_if_hidden(p, this->work_tile.first_key + threadIdx.x, sees, hides);
    sees = __syncthreads_or(sees);
    hides = __syncthreads_or(hides);
    if constexpr (Config::kSkipsTurns) {
      const bool skips = !sees && sees_later_keys(p);
      if (threadIdx.x == 0) this->skips_turns = skips;
    }
    if (threadIdx.x == 0 && !sees) this->work_tile.tiles.end = this->work_tile.tiles.begin;
    __syncthreads();
    return hides;
  }
  /// Whether some head of the group, be it of another split, sees a key after the tile. If none does, no later CTA
  /// has steps.
  __device__ __forceinline__ bool sees_later_keys(const BackwardParams& p) const {
    Sequence sequence = this->work_tile.sequence;
    const int group = static_cast<int>(p.heads_q) / static_cast<int>(p.heads_kv);
    const int heads = p.mask.head_stride || p.bias.head_stride ? group : 1;
    sequence.head = sequence.head_kv * group;
    bool sees = false;
#pragma unroll 1
    for (int head = 0; head < heads; ++head, ++sequence.head)
#pragma unroll 1
      for (int key = this->work_tile.first_key + Config::kBlockN + static_cast<int>(threadIdx.x);
           key < sequence.seqlen_k && !sees; key += Config::kThreads)
        sees = key_bias_of<Config::kBiased>(p, sequence, key) != -INFINITY;
    return __syncthreads_or(sees);
  }
  /// Reads the bias of a key in all heads, and keeps that of the first head. Called by whole warps, one thread per key.
  __device__ __forceinline__ void find_if_hidden(const BackwardParams& p, int key, bool& sees, bool& hides) {
    Sequence sequence = this->work_tile.sequence;
    const bool exists = key < sequence.seqlen_k;
    const int heads = p.mask.head_stride || p.bias.head_stride ? this->work_tile.heads : 1;
#pragma unroll 1
    for (int head = 0; head < heads; ++head, ++sequence.head) {
      const float bias = exists ? key_bias_of<Config::kBiased>(p, sequence, key) : 0.0f;
      const bool hidden = bias == -INFINITY;
      sees |= exists && !hidden;
      hides |= hidden;
      const uint32_t visible = __ballot_sync(~0u, !hidden);
      if (head > 0) continue;
      this->set_key_bias(threadIdx.x, bias);
      this->visible_keys[0][threadIdx.x / 32] = visible;
    }
  }
};

}  // namespace flash_ext::sm90
