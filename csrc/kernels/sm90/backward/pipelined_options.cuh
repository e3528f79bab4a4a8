// The pipelined loop with options: what they make of scores, beside the products that overlap.
//
// What a step needs is prepared while the products of its scores and of the dK before are under way, the longest wait
// of a consumer: kept weights are drawn, slopes, key biases and words of masks are read. So it costs slots, but hardly
// time. What is done to scores and to dS does cost time; each option has a kernel of its own.
//
// Who reads what, and when it may be written again:
//   kept words  written in prepare(m) between two barriers of the warpgroup, read behind the second one. Those of m - 1
//               have been read before the first one: a warp arrives there with them in registers, where dV took them.
//   words of masks, key biases, slopes  from global memory; nobody writes them.
//   bias        one tile in shared memory, by TMA. All reads of it come before dS of the step is published, which is
//               made of what was read; behind that the next one is loaded.
//   metadata    of steps that are found: kMetadataSlots.
#pragma once

#include "options_storage.cuh"
#include "pipelined_consumer.cuh"

namespace flash_ext::sm90 {

/// What is added to a key's scores, to base 2, by a bias or a mask that is the same for all queries.
/// kMaskAlone: a bias there may be is one of pairs.
template <bool kMaskAlone>
__device__ __forceinline__ float key_bias(const BackwardParams& p, const Sequence& sequence, int key) {
  float x = 0.0f;
  if (!kMaskAlone && p.bias.data) {
    const BiasRows bias(p.bias, sequence);
    bias.with_type([&](auto type) { x = bias.template load<decltype(type)>(0, key) * kLog2E; });
  }
  if (p.mask.data) {
    const MaskRows mask(p.mask, sequence);
    x = mask.data[key * mask.col_stride] ? x : -INFINITY;
  }
  return x;
}

/// What dropout needs: words of kept weights of a step, in one slot, and what random bits are made of.
template <class Config, bool kDrops = Config::may_have(kStepDrops)>
struct BackwardKeptWords {
  __device__ __forceinline__ void seed(const BackwardParams&, const Sequence&) {}
};
template <class Config>
struct BackwardKeptWords<Config, true> {
  __align__(16) RandomKey key;  // of head 0 of the batch entry: registers are short
  __align__(8) uint32_t kept[Config::kGroups][KeptTile<Config::kBlockM>::kWordsOfGroup];

  __device__ __forceinline__ void seed(const BackwardParams& p, const Sequence& sequence) {
    key = {philox_key(p.dropout.rng[0], p.dropout.rng[1]), static_cast<uint32_t>(sequence.batch * p.heads_q)};
  }
};

/// What a mask of pairs leaves of the CTA's steps.
template <class Config, bool kFindsSteps = Config::kFindsSteps>
struct BackwardFoundStepsOfCta {};
template <class Config>
struct BackwardFoundStepsOfCta<Config, true> {
  // head: among all; visible: number of the tile's words, -1: none; spare: whether Q or dO may hold Inf or NaN
  ListedQueries step_metadata[kMetadataSlots];
  const uint32_t* words;  // of all tiles
  int steps;
};

/// Of a head, counted from the CTA's first.
template <class Config>
__device__ __forceinline__ TileState state_of(const VisibilityTiles& tiles, const BackwardWorkTile<Config>& work_tile,
                                              int head, int tile) {
  const Sequence& sequence = work_tile.sequence;
  const uint8_t* const g_states =
      tiles.states_of(sequence.batch, sequence.head + head, work_tile.first_key / Config::kBlockN);
  return static_cast<TileState>(g_states[tiles.query_tiles > 1 ? tile : 0]);
}

template <class Config>
struct BackwardPipelinedOptionsStorage : BackwardPipelinedStorage<Config>,
                                         BackwardKeptWords<Config>,
                                         BackwardFoundStepsOfCta<Config> {
  uint64_t bias_full;
  float cap;        // of scores, to base 2
  bool hides_keys;  // some key is hidden from all queries of some head
  bool unclean;     // Q or dO of some step may hold Inf or NaN

  __device__ __forceinline__ void init() {
    init_barrier(bias_full, 1);
    BackwardPipelinedStorage<Config>::init();
  }

  __device__ __forceinline__ void prepare(const BackwardParams& p) {
    if constexpr (Config::may_have(kStepSoftcapped)) cap = static_cast<float>(p.softcap) * kLog2E;
    this->seed(p, this->work_tile.sequence);
  }
  /// By all threads of the CTA, which then has no steps if no head sees a key.
  __device__ __forceinline__ void look_at_masks(const BackwardParams& p, const BackwardWorkspace& workspace) {
    if constexpr (Config::kFindsSteps) count_steps(workspace);
    if constexpr (Config::kBiased) find_unclean(workspace);
    if constexpr (Config::may_have(kStepKeyBiased)) {
      bool sees = false, hides = false;
      if (threadIdx.x < Config::kBlockN) look_at_key(p, this->work_tile.first_key + threadIdx.x, sees, hides);
      sees = __syncthreads_or(sees);
      hides = __syncthreads_or(hides);
      if (threadIdx.x == 0) {
        hides_keys = hides;
        if (!sees) this->work_tile.tiles.end = this->work_tile.tiles.begin;
      }
      __syncthreads();
    }
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

  /// A bias may hide any pair.
  __device__ __forceinline__ void find_unclean(const BackwardWorkspace& workspace) {
    ptx::wait_for_previous_grid();  // for row terms
    const BackwardWorkTile<Config>& tile = this->work_tile;
    bool found = false;
#pragma unroll 1
    for (int head = 0; head < tile.heads; ++head)
      for (int k = tile.tiles.begin + static_cast<int>(threadIdx.x); k < tile.tiles.end; k += Config::kThreads)
        found |= workspace.unclean[tile.workspace_tile + head * workspace.tiles_per_head + k] != 0;
    found = __syncthreads_or(found);
    if (threadIdx.x == 0) unclean = found;
    __syncthreads();
  }

  __device__ __forceinline__ void look_at_key(const BackwardParams& p, int key, bool& sees, bool& hides) const {
    Sequence sequence = this->work_tile.sequence;
    if (key >= sequence.seqlen_k) return;
    const int heads = p.mask.head_stride || p.bias.head_stride ? this->work_tile.heads : 1;
#pragma unroll 1
    for (int head = 0; head < heads; ++head, ++sequence.head) {
      const bool hidden = key_bias<Config::kBiased>(p, sequence, key) == -INFINITY;
      sees |= !hidden;
      hides |= hidden;
    }
  }
};

/// What options make of the scores of a warp.
template <class Config>
class BackwardOptionScores {
 public:
  using Storage = BackwardPipelinedOptionsStorage<Config>;
  using Steps = BackwardStepsOf<Config>;
  using Tile = BackwardPipelinedTile<typename Config::Element, Config::kBlockM>;
  using Scores = typename Tile::Scores;
  using Weights = typename Tile::Weights;
  using Terms = typename Tile::Terms;
  using Visible = typename Tile::Visible;
  static constexpr int kBlockM = Config::kBlockM;
  static constexpr bool kDrops = Config::may_have(kStepDrops);
  static constexpr bool kTwoWeights = Config::kTwoWeights;
  static constexpr bool kBoundsScores = Config::may_have(kStepSoftcapped);
  static constexpr bool kHidesKeys = Config::may_have(kStepKeyBiased);
  static constexpr bool kLateLse = kDrops || kHidesKeys || Config::kFindsSteps;
  // Both weights leave room for half of D beside dP.
  static constexpr int kEarlySteps = kTwoWeights ? Tile::kSteps / 2 : Tile::kSteps;

  __device__ __forceinline__ BackwardOptionScores(const BackwardParams& p, Storage& storage, uint32_t s_tiles)
      : p_(p), storage_(storage), s_tiles_(s_tiles) {}

  __device__ __forceinline__ float unit() const {
    const double keep_scale = p_.dropout.rule.keep_scale;
    return kDrops && keep_scale > 0 ? static_cast<float>(keep_scale) : 1.0f;
  }

  /// Some of the CTA's pairs, beside what the window and the lengths hide.
  __device__ __forceinline__ bool may_hide() const {
    return (kHidesKeys && storage_.hides_keys) || (Config::kBiased && storage_.unclean);
  }
  __device__ __forceinline__ bool is_unclean() const { return Config::kBiased && storage_.unclean; }
  /// What a mask of pairs leaves of the warp's.
  __device__ __forceinline__ void hide_pairs(Visible& visible, int number) const {
    constexpr int kWordsOfTile = kBlockM * (Config::kBlockN / 32);
    const uint32_t word =
        __ldg(storage_.words + int64_t{number} * kWordsOfTile + (ptx::reread(threadIdx.x) - kWarpgroupThreads));
    visible[0] &= word;
    visible[1] &= word << 8;
  }
  /// Of the warp's keys.
  __device__ __forceinline__ bool hides_keys() const {
    return __any_sync(~0u, fminf(key_bias_[0], key_bias_[1]) == -INFINITY);
  }
  __device__ __forceinline__ void hide_keys(Visible& visible) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) visible[r] &= key_bias_[r] == -INFINITY ? 0u : ~0u;
  }

  __device__ __forceinline__ void prepare(const Steps& step) {
    if constexpr (kHidesKeys) read_key_bias(step);
    if constexpr (kSlopes) read_slope(step);
    if constexpr (kBoundsScores) cap_ = storage_.cap;
    if constexpr (Config::kBiased) bias_parity_ = step.count % 2;
    if constexpr (kDrops) draw(step);
  }

  __device__ __forceinline__ void make_weights(Weights& p, Weights& ds, const Scores& s, const Terms& lse,
                                               float scale) const {
    Weights& whole = kDrops ? ds : p;
    if constexpr (Config::kBiased) {
      wait_for(storage_.bias_full, bias_parity_);
      Tile::softmax_step_bias(p, s, lse, scale, s_bias_row(),
                              [&](float term, int r) { return kHidesKeys ? key_bias_[r] - term : -term; });
    } else if constexpr (kBoundsScores) {
      Tile::softmax_step_softcap(p, ds, s, lse, scale, cap_);
    } else if constexpr (kSlopes) {
      Tile::softmax_step(whole, s, lse, [&](float x, float term, int n, int e) {
        const float distance = fabsf(distance_ + static_cast<float>(8 * n + e % 2 - 8 * (e / 2)));
        return fmaf(-slope_, distance, fmaf(x, scale, -term));
      });
    } else if constexpr (kHidesKeys) {
      Tile::softmax_step(whole, s, lse,
                         [&](float x, float term, int, int e) { return fmaf(x, scale, key_bias_[e / 2] - term); });
    } else {
      Tile::softmax_step(whole, s, lse, scale);
    }
  }
  /// Pairs of weights, or of gradients, that a bias of -inf hides: a sum that overflowed, or what a hidden key has in
  /// V, may have made NaN of them. The bias lies there until dS is published.
  __device__ __forceinline__ void clear_hidden(Weights& pairs) const {
    if constexpr (Config::kBiased) {
      if (Tile::holds_nan(pairs)) Tile::hide_by_bias(pairs, s_bias_row());
    }
  }
  __device__ __forceinline__ void drop(Weights& p, const Weights& ds) const {
    if constexpr (kDrops) Tile::keep(p, ds, kept_);
  }
  __device__ __forceinline__ void compute_ds(Weights& ds, const Scores& dp, const Weights& p,
                                             const Terms& minus_delta) const {
    if constexpr (kDrops) {
      Tile::compute_ds_kept(ds, dp, p, minus_delta);
    } else if constexpr (kTwoWeights) {
      Tile::compute_ds(ds, dp, ds, minus_delta);
    } else {
      Tile::compute_ds(ds, dp, p, minus_delta);
    }
  }

 private:
  using KeptWords = KeptTile<kBlockM>;
  static constexpr bool kSlopes = Config::may_have(kStepAlibi);

  /// In the bias of this warpgroup's keys.
  __device__ __forceinline__ uint32_t s_bias_row() const {
    const uint32_t thread = ptx::reread(threadIdx.x) - kWarpgroupThreads;
    const uint32_t group = thread / kWarpgroupThreads;
    return Tile::Base::row_of_lane(s_tiles_ + Config::kBiasOffset + group * Config::kBiasPanelBytes,
                                   static_cast<int>(thread / 32 % kWarpgroupWarps), static_cast<int>(thread % 32));
  }

  /// This lane's first key, among all.
  __device__ __forceinline__ int first_key() const {
    const uint32_t thread = ptx::reread(threadIdx.x) - kWarpgroupThreads;
    return storage_.work_tile.first_key + static_cast<int>(thread / 32 * 16 + thread % 32 / 4);
  }

  /// Of the lane's keys, once a step, from L1: registers are short. Behind the last key there are no weights, behind
  /// the last step no head.
  __device__ __forceinline__ void read_key_bias(const Steps& step) {
    Sequence sequence = storage_.work_tile.sequence;
    sequence.head = min(step.head, step.end_head - 1);
    const int first = first_key();
#pragma unroll
    for (int r = 0; r < 2; ++r)
      key_bias_[r] = key_bias<Config::kBiased>(p_, sequence, min(first + 8 * r, sequence.seqlen_k - 1));
  }

  /// ALiBi's, and how far the lane's first key lies before what its first query is aligned with. Behind the last step,
  /// of the last head.
  __device__ __forceinline__ void read_slope(const Steps& step) {
    const Sequence& sequence = storage_.work_tile.sequence;
    const int head = min(step.head, step.end_head - 1);
    slope_ = __ldg(p_.alibi_slopes + sequence.batch * p_.alibi_batch_stride + head) * kLog2E;
    const int first_query = step.tile * kBlockM + 2 * (ptx::reread(threadIdx.x) % 4);
    distance_ = static_cast<float>(first_query + sequence.offset - first_key());
  }

  /// Which weights of a step are kept. Each lane of the warpgroup draws one word. What tells lanes apart is made of the
  /// thread's number anew: registers are short.
  __device__ __forceinline__ void draw(const Steps& step) {
    static_assert(KeptWords::kWordsOfGroup == kWarpgroupThreads);
    const uint32_t thread = ptx::reread(threadIdx.x) - kWarpgroupThreads;  // among those that compute
    const uint32_t group = thread / kWarpgroupThreads, word = thread % kWarpgroupThreads;
    const int barrier = BackwardBarriers<Config>::kKeptDrawn + static_cast<int>(group);
    const int i = step.tile * kBlockM + KeptWords::query(word);
    const int j = storage_.work_tile.first_key + static_cast<int>(group) * kWarpgroupRows + KeptWords::key(word);
    RandomKey key = storage_.key;
    key.batch_head += step.head;
    const auto query = QueryRandomBits::of(key, dropout_query_group(i));
    const auto keys = KeyRandomBits::of(key, dropout_key_group(j));
    const uint32_t drawn = draw_kept_weights(p_.dropout.rule, key, query, keys);
    const uint32_t s_kept = ptx::shared_address(storage_.kept[0]);
    ptx::barrier_sync<kWarpgroupThreads>(barrier);
    store_shared(s_kept + 4 * thread, drawn);
    ptx::barrier_sync<kWarpgroupThreads>(barrier);
    const uint32_t s_lane = s_kept + KeptWords::at(group, thread % 32);
    const int shift = KeptWords::shift(16 * (word / 32), thread % 32);
#pragma unroll
    for (int k = 0; k < Tile::kSteps; ++k) {
      const auto words = load_shared<uint2>(s_lane + k * KeptWords::kStepBytes);
      kept_[k] = {words.x << shift, words.y << shift};
    }
  }

  const BackwardParams& p_;
  Storage& storage_;
  const uint32_t s_tiles_;
  typename Tile::Kept kept_;
  uint32_t bias_parity_;
  float key_bias_[2], slope_, distance_, cap_;
};

}  // namespace flash_ext::sm90
