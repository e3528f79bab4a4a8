// Options in the pipelined loop of the backward: softcap, ALiBi, bias, masks and dropout.
//
// A consumer prepares a step while S of this step and dK of the step before are multiplied, which is its longest wait.
// Meanwhile it computes random bits and reads slopes and per-key biases. That takes issue slots but hardly time, as
// long as nothing waits: a load that arrives late delays the exponentials. So loads from outside shared memory, and
// data of other warps, are requested earlier, while dP of the step before is multiplied. Work on scores and on dS does
// take time, so each option has a kernel of its own.
//
// Data that options read, and when it may be overwritten:
//   kept words      Philox words in which dropout's kept weights are bits. Computed in prepare(m - 1), a word a lane,
//                   written in prepare_ahead(m - 1), read in prepare(m). kept_full: the warpgroup has written them;
//                   kept_empty: all its warps have read them.
//   per-key biases  in shared memory, 16 keys for each warp, of one head. Where heads differ, the warp writes them anew
//                   when a head begins; where steps take turns, that is in each step. A word of the warp has a bit for
//                   each of these keys: whether it is visible.
//   mask words, slopes  in global memory, never overwritten.
//   bias            one tile in shared memory, loaded by TMA. bias_empty: all warps have computed P from it, so
//                   the next one may be loaded.
//   metadata        of the steps that a mask leaves, in kMetadataSlots slots.
#pragma once

#include "option_parts.cuh"
#include "pipelined_consumer.cuh"

namespace flash_ext::sm90 {

/// The score policy with options: what they do to the scores of a warp.
template <class Config, class Storage_>
class BackwardOptionScores {
 public:
  using Storage = Storage_;
  using WorkTile = BackwardWorkTile<Config>;
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
  // A branch between dP and dV makes ptxas put a fence there, but registers are short.
  static constexpr bool kPreparesEarly = kDrops && kHidesKeys;
  static constexpr bool kLateLse = kDrops;
  // D of so many groups of 16 queries is read while dP is multiplied. With kTwoWeights, P and the second weights leave
  // registers for half of D.
  static constexpr int kEarlySteps = kTwoWeights ? Tile::kSteps / 2 : Tile::kSteps;

  /// `slot`: the slot of the key tile, where the storage has two.
  __device__ __forceinline__ BackwardOptionScores(const BackwardParams& p, Storage& storage, const WorkTile& work_tile,
                                                  uint32_t slot, uint32_t s_tiles)
      : p_(p), storage_(storage), work_tile_(work_tile), s_tiles_(s_tiles) {
    if constexpr (kHidesKeys) {
      const uint32_t warp = threadIdx.x / 32 - kWarpgroupWarps;  // among those of the consumer warpgroups
      // Not by ptx::uniform(), because the address differs between warps: ptxas then treats the lanes of the whole loop
      // of a persistent CTA as divergent.
      visible_keys_ = __reduce_or_sync(~0u, storage.visible_keys[slot][warp / 2] >> 16 * (warp % 2) & kAllKeys);
      const int head = work_tile.sequence.head, end = head + work_tile.heads;
      next_head_ = ptx::uniform(p.mask.head_stride || p.bias.head_stride ? head_after(head, end) : kNoHead);
    }
  }

  __device__ __forceinline__ float keep_scale() const {
    const double scale = p_.dropout.rule.keep_scale;
    return kDrops && scale > 0 ? static_cast<float>(scale) : 1.0f;
  }

  __device__ __forceinline__ bool may_be_non_finite() const {
    if constexpr (Config::kBiased) return storage_.has_non_finite;
    return false;
  }
  /// Clears the bits of pairs that a mask of query-key pairs hides.
  __device__ __forceinline__ void hide_pairs(Visible& visible) const {
    visible[0] &= word_;
    visible[1] &= word_ << 8;
  }
  /// Whether some of the warp's keys are hidden from all queries of the head.
  __device__ __forceinline__ bool hides_keys() const { return visible_keys_ != kAllKeys; }
  __device__ __forceinline__ void hide_keys(Visible& visible) const {
    const uint32_t first = ptx::reread(threadIdx.x) % 32 / 4;  // the first of the lane's two keys
#pragma unroll
    for (int r = 0; r < 2; ++r) visible[r] &= 0u - (visible_keys_ >> (first + 8 * r) & 1u);
  }

  __device__ __forceinline__ void prepare(const Steps& step) {
    if constexpr (kHidesKeys) {
      if (step.head == next_head_) find_visible_keys(step);
      if constexpr (kReadsKeyBias && !kReadsOnce) read_key_bias(step);
    }
    if constexpr (kSlopes) {
      if (!kReadsOnce || step.head == next_head_) read_slope(step);
      measure_distance(step);
    }
    if constexpr (kBoundsScores) cap_ = storage_.cap;
    if constexpr (Config::kBiased) bias_parity_ = step.count % 2;
    if constexpr (kDrops) {
      read_kept(step);
      Steps next = step;
      next.advance();
      next_kept_word_ = compute_kept(next);
    }
  }
  /// Reads what the first step needs and computes its Philox random bits, before its scores are started.
  __device__ __forceinline__ void prepare_first(const Steps& step) {
    if constexpr (kReadsKeyBias && kReadsOnce) read_key_bias(step);
    if constexpr (kSlopes && kReadsOnce) read_slope(step);
    if constexpr (kDrops) {
      next_kept_word_ = compute_kept(step);
      share_kept(0);
    }
    if constexpr (Config::kFindsSteps) find(step);
  }
  /// Runs while dP of this step is multiplied. Publishes kept words of the next step, and reads its metadata where a
  /// mask leaves steps.
  __device__ __forceinline__ void prepare_ahead(const Steps& step) {
    if constexpr (kDrops) share_kept(step.count + 1);
    if constexpr (Config::kFindsSteps) {
      Steps next = step;
      next.advance();
      if (!next.is_past_end()) find(next);
    }
  }
  __device__ __forceinline__ const FoundQueries& found() const { return found_; }

  __device__ __forceinline__ void softmax_step(Weights& p, Weights& ds, const Scores& s, const Terms& lse,
                                               float scale) const {
    Weights& undropped = kDrops ? ds : p;
    if constexpr (Config::kBiased) {
      wait_for(storage_.bias_full, bias_parity_);
      Tile::softmax_step_bias(p, s, lse, scale, s_bias_row(), [&](float term, int) { return -term; });
    } else if constexpr (kBoundsScores) {
      Tile::softmax_step_softcap(p, ds, s, lse, scale, cap_);
    } else if constexpr (kSlopes) {
      // The sum of AlibiOfLane in another order of additions: its own makes a persistent CTA 3 % slower.
      Tile::softmax_step(undropped, s, lse, [&](float x, float term, int n, int e) {
        const float distance = fabsf(distance_ + static_cast<float>(8 * n + e % 2 - 8 * (e / 2)));
        return fmaf(-slope_, distance, fmaf(x, scale, -term));
      });
    } else if (kHidesKeys && p_.bias.data) {
      Tile::softmax_step(undropped, s, lse,
                         [&](float x, float term, int, int e) { return fmaf(x, scale, key_bias_[e / 2] - term); });
    } else {
      Tile::softmax_step(undropped, s, lse, scale);
    }
  }
  /// Zeroes weights that are NaN although a bias of -inf hides their pair: the product overflowed, and Inf - Inf is
  /// NaN. Then releases the bias, because P is the last to read it.
  __device__ __forceinline__ void sanitise_hidden(Weights& p) const {
    if constexpr (Config::kBiased) {
      if (Tile::holds_nan(p)) Tile::template hide_by_bias<typename Config::Element>(p, s_bias_row());
      arrive_as_warp(storage_.bias_empty, static_cast<int>(ptx::reread(threadIdx.x) % 32));
    }
  }
  /// Zeroes dS of these pairs, whose weights are 0: Inf or NaN in V of a hidden key may have made NaN of it.
  __device__ __forceinline__ void sanitise_hidden(Weights& ds, const Weights& p) const {
    if constexpr (Config::kBiased) {
      if (Tile::holds_nan(ds)) Tile::hide_weightless(ds, p);
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
  static constexpr bool kReadsKeyBias = kHidesKeys && !Config::kBiased;
  // Whether slopes and per-key biases are read only when a head begins. A persistent CTA has registers to keep them,
  // and no time to load them while dK is multiplied: a product whose operand is in registers holds its warp until it is
  // nearly over.
  static constexpr bool kReadsOnce = Config::kPersistent;
  static constexpr uint32_t kAllKeys = 0xFFFF;  // of a warp's keys
  static constexpr int kNoHead = -1;

  /// The lane's row of the bias tile of this warpgroup's keys: its address in shared memory.
  __device__ __forceinline__ uint32_t s_bias_row() const {
    const uint32_t thread = ptx::reread(threadIdx.x) - kWarpgroupThreads;
    const uint32_t group = thread / kWarpgroupThreads;
    return Tile::Base::row_of_lane(s_tiles_ + Config::kBiasOffset + group * Config::kBiasPanelBytes,
                                   static_cast<int>(thread / 32 % kWarpgroupWarps), static_cast<int>(thread % 32));
  }

  /// The lane's first key, counted from the first of the sequence.
  __device__ __forceinline__ int first_key() const {
    const uint32_t thread = ptx::reread(threadIdx.x) - kWarpgroupThreads;
    return work_tile_.first_key + static_cast<int>(thread / 32 * 16 + thread % 32 / 4);
  }

  /// Reads the biases of the lane's two keys. It is called in each step unless kReadsOnce, because there are no
  /// registers to keep them from step to step. Indices are clamped: a key past the last one has weights of 0 whatever
  /// its bias, and the step after the last one has no head.
  __device__ __forceinline__ void read_key_bias(const Steps& step) {
    if (!p_.bias.data) return;
    if constexpr (kSharesKeyBias<Config>) {
      const uint32_t thread = ptx::reread(threadIdx.x) - kWarpgroupThreads, key = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
      for (int r = 0; r < 2; ++r) key_bias_[r] = storage_.key_bias[key + 8 * r];
    } else {
      Sequence sequence = work_tile_.sequence;
      sequence.head = min(step.head, step.end_head - 1);
      const int first = first_key();
#pragma unroll
      for (int r = 0; r < 2; ++r)
        key_bias_[r] = key_bias_of<false>(p_, sequence, min(first + 8 * r, sequence.seqlen_k - 1));
    }
  }
  /// Reads the biases of the warp's keys, and which of them are visible. It is called where a head begins whose bias or
  /// mask differs from that of the head before.
  __device__ __forceinline__ void find_visible_keys(const Steps& step) {
    const uint32_t thread = ptx::reread(threadIdx.x) - kWarpgroupThreads, key = thread / 32 * 16 + thread % 16;
    Sequence sequence = work_tile_.sequence;
    sequence.head = step.head;
    const int last = sequence.seqlen_k - 1;
    const float bias =
        key_bias_of<Config::kBiased>(p_, sequence, min(work_tile_.first_key + static_cast<int>(key), last));
    const bool hidden = bias == -INFINITY;
    visible_keys_ = __ballot_sync(~0u, !hidden) & kAllKeys;
    if constexpr (kSharesKeyBias<Config>) {
      __syncwarp();
      storage_.set_key_bias(key, bias);
      __syncwarp();
    }
    if constexpr (kReadsKeyBias && kReadsOnce) read_key_bias(step);
    next_head_ = head_after(step.head, step.end_head);
    // The next tile begins with the first head of the group again.
    if (step.takes_turns() && next_head_ == kNoHead) next_head_ = step.first_head;
  }
  __device__ __forceinline__ static int head_after(int head, int end) { return head + 1 < end ? head + 1 : kNoHead; }

  /// Reads the ALiBi slope of the step's head. The step after the last one reads that of the last head.
  __device__ __forceinline__ void read_slope(const Steps& step) {
    const int head = min(step.head, step.end_head - 1);
    slope_ = __ldg(p_.alibi_slopes + work_tile_.sequence.batch * p_.alibi_batch_stride + head) * kLog2E;
    if constexpr (kReadsOnce) {
      lead_ = 2 * (ptx::reread(threadIdx.x) % 4) + work_tile_.sequence.offset - first_key();
      next_head_ = head_after(head, step.end_head);
    }
  }
  /// Computes how many keys the lane's first key lies before the one that the lane's first query is aligned with.
  __device__ __forceinline__ void measure_distance(const Steps& step) {
    if constexpr (kReadsOnce) {
      distance_ = static_cast<float>(step.tile * kBlockM + lead_);
    } else {
      const int first_query = step.tile * kBlockM + 2 * (ptx::reread(threadIdx.x) % 4);
      distance_ = static_cast<float>(first_query + work_tile_.sequence.offset - first_key());
    }
  }

  /// Computes which weights of a step are kept, one word of Philox random bits per lane of the warpgroup. The lane's
  /// position is computed anew from the thread's number, because registers are short.
  __device__ __forceinline__ uint32_t compute_kept(const Steps& step) const {
    static_assert(KeptWords::kWordsOfGroup == kWarpgroupThreads);
    const uint32_t thread = ptx::reread(threadIdx.x) - kWarpgroupThreads;  // among those of the consumer warpgroups
    const uint32_t group = ptx::uniform(thread / kWarpgroupThreads), word = thread % kWarpgroupThreads;
    const int i = step.tile * kBlockM + KeptWords::query(word);
    const int j = work_tile_.first_key + static_cast<int>(group) * kWarpgroupRows + KeptWords::key(word);
    RandomKey key = storage_.key;
    key.seeds.seed_lo = __reduce_or_sync(~0u, key.seeds.seed_lo);
    key.seeds.seed_hi = __reduce_or_sync(~0u, key.seeds.seed_hi);
    key.seeds.offset_lo = __reduce_or_sync(~0u, key.seeds.offset_lo);
    key.batch_head = __reduce_or_sync(~0u, key.batch_head) + step.head;
    const auto query = QueryRandomBits::of(key, dropout_query_group(i));
    const auto keys = KeyRandomBits::of(key, dropout_key_group(j));
    return draw_kept_weights(p_.dropout.rule, key, query, keys);
  }
  /// Publishes the kept words of step number `count`, when the warpgroup has read those of the step before.
  __device__ __forceinline__ void share_kept(uint32_t count) const {
    const uint32_t thread = ptx::reread(threadIdx.x) - kWarpgroupThreads;
    const uint32_t group = ptx::uniform(thread / kWarpgroupThreads);
    wait_for(storage_.kept_empty[group], (count & 1) ^ 1);
    storage_.kept[group][thread % kWarpgroupThreads] = next_kept_word_;
    arrive_as_warp(storage_.kept_full[group], static_cast<int>(thread % 32));
  }
  /// Reads the kept words of the lane's pairs.
  __device__ __forceinline__ void read_kept(const Steps& step) {
    const uint32_t thread = ptx::reread(threadIdx.x) - kWarpgroupThreads;
    const uint32_t group = ptx::uniform(thread / kWarpgroupThreads), lane = thread % 32;
    wait_for(storage_.kept_full[group], step.count & 1);
    const auto* const s_lane = reinterpret_cast<const uint2*>(&storage_.kept[0][0] + KeptWords::at(group, lane) / 4);
    const int shift = KeptWords::shift(16 * (thread % kWarpgroupThreads / 32), lane);
#pragma unroll
    for (int k = 0; k < Tile::kSteps; ++k) {
      const uint2 words = s_lane[k * KeptWords::kStepBytes / 8];
      kept_[k] = {words.x << shift, words.y << shift};
    }
    arrive_as_warp(storage_.kept_empty[group], static_cast<int>(lane));
  }

  /// Reads the metadata of a step that the mask leaves, and the mask word of the lane's pairs.
  __device__ __forceinline__ void find(const Steps& step) {
    wait_for(storage_.q_full[step.stage], step.parity);
    const FoundQueries queries = storage_.step_metadata[step.slot];
    found_ = {0, ptx::uniform(queries.tile), ptx::uniform(queries.words), ptx::uniform(queries.has_non_finite)};
    if (found_.words < 0) return;
    constexpr int kWordsOfTile = kBlockM * (Config::kBlockN / 32);
    word_ =
        __ldg(storage_.words + int64_t{found_.words} * kWordsOfTile + (ptx::reread(threadIdx.x) - kWarpgroupThreads));
  }

  const BackwardParams& p_;
  Storage& storage_;
  const WorkTile& work_tile_;
  const uint32_t s_tiles_;
  typename Tile::Kept kept_;
  uint32_t bias_parity_;
  uint32_t next_kept_word_;  // of the lane, for the next step
  FoundQueries found_;
  uint32_t word_;
  uint32_t visible_keys_;  // a bit for each of the warp's 16 keys
  int next_head_;          // whose slope, or biases of keys, must be read when it begins
  int lead_;               // distance_ in the tile that begins with query 0
  float key_bias_[2], slope_, distance_, cap_;
};

}  // namespace flash_ext::sm90
