// Options of wide heads. The warpgroup of S, P and dV applies all of them, in passes over its scores. The kernel of any
// options tests for each option once per pass, not per score; those of one option only test whether a tile has masked
// pairs. What the warpgroup of dP and dS must know is in what is published in P's place: P times the softcap's
// derivative, with the sign of each weight set that dropout drops.
//
// Shared memory is full at head_dim 256. So a bias goes from global memory to registers.
#pragma once

#include "kernels/common/mask/visibility.cuh"
#include "kernels/common/score/alibi.cuh"
#include "kernels/common/score/bias_rows.cuh"
#include "kernels/ptx/load_pair.h"
#include "kernels/ptx/movmatrix.h"
#include "kernels/sm90/common/backward/option_parts.cuh"
#include "kernels/sm90/common/backward/options.cuh"
#include "keys_consumer.cuh"

namespace flash_ext::sm90 {

/// What scores need of a call's options, and how these lie in memory.
struct BackwardWideOptions {
  int flags;                        // StepFlags; kStepMasked if some step has it
  bool bias_of_keys, mask_of_keys;  // they are the same for all queries
  bool bias_by_pairs;               // a bias of 16 bits; keys j and j + 1 (j even) share an aligned word of 4 bytes
  float scale, cap;                 // of ScoreFactors

  explicit BackwardWideOptions(const BackwardParams& p)
      : flags(options_of(asked_of(p))), bias_of_keys(same_for_all_queries(p.bias)), mask_of_keys(masks_keys(p)) {
    const ScoreFactors factors = ScoreFactors::of_backward(p, kLog2E);
    scale = factors.scale, cap = factors.cap;
    const ScoreView& bias = p.bias;
    const bool has_even_strides = bias.batch_stride % 2 == 0 && bias.head_stride % 2 == 0 && bias.row_stride % 2 == 0;
    bias_by_pairs = bias_element_bytes(bias.dtype) == 2 && bias.col_stride == 1 && has_even_strides &&
                    p.seqlen_k % 2 == 0 && reinterpret_cast<uintptr_t>(bias.data) % 4 == 0;
  }
};

/// A part of a query tile, as passes go over it.
template <class Config>
using BackwardWidePart = BackwardTile<typename Config::Element, Config::kQueriesOfPart>;

/// Adds the scores to BackwardWideKeysConsumer.
template <class Config>
class BackwardWideOptionScores : protected BackwardWideKeysConsumer<Config> {
 public:
  using Base = BackwardWideKeysConsumer<Config>;
  using typename Base::Element, typename Base::Products, typename Base::Scores, typename Base::Storage,
      typename Base::Tile, typename Base::Weights;

  /// Passes no scale of scores: the options have it.
  __device__ __forceinline__ BackwardWideOptionScores(const BackwardParams& p, const BackwardWorkspace& workspace,
                                                      Storage& storage, uint32_t s_tiles,
                                                      const BackwardWideOptions& call, int rank, int lane)
      : Base(p, workspace, storage, s_tiles, 0, 0.0f, rank, lane), call_(call) {}

 protected:
  using Base::at_, Base::kBlockM, Base::storage_, Base::workspace_;
  static constexpr int kParts = Config::kParts, kQueriesOfPart = Config::kQueriesOfPart;
  using Part = BackwardWidePart<Config>;
  using PartScores = typename Part::Scores;
  using PartWeights = typename Part::Weights;
  /// The lane's biases: floats in the order of accumulators; or, read by pairs, two 16-bit biases of one query in each
  /// register of the first half.
  using PartBias = uint32_t[Part::kN * 4];

  /// Computes P of a step, and what is published of it.
  __device__ __forceinline__ void compute_p(Weights& p, Weights& published, const BackwardWideStep& step) {
    const int flags = step.is_masked ? call_.flags : call_.flags & ~kStepMasked;
    Scores s;
    PartBias bias;
    if constexpr (Config::kAny) {  // no registers while S is multiplied
      prepare(bias, step, flags);
      Products::multiply(s, Base::keys_, this->query_tile());
    } else {
      Products::start(s, Base::keys_, this->query_tile());
      prepare(bias, step, flags);
      Products::finish(s);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) compute_p_of_part(p, published, s, bias, step, flags, part);
  }

 private:
  using Base::lane_, Base::p_, Base::warp_, Base::warpgroup_, Base::work_tile_;
  using Kept = KeptTile<kBlockM>;
  using Barriers = BackwardBarriers<Config>;

  __device__ __forceinline__ Sequence sequence_of(int head) const {
    Sequence sequence = work_tile_.sequence;
    sequence.head += head;
    return sequence;
  }
  /// The lane's first key, counted from the first one of the sequence.
  __device__ __forceinline__ int key_of_lane() const { return this->first_key() + ptx::reread(lane_) / 4; }

  // ---- What is read or computed before the scores are there ---------------------------------------------------------

  __device__ __forceinline__ void prepare(PartBias& bias, const BackwardWideStep& step, int flags) {
    if (Config::template has<kStepKeyBiased>(flags) && step.head != head_) begin_head(step.head);
    if (Config::template has<kStepDrops>(flags) || Config::template has<kStepMasked>(flags)) share_words(step, flags);
    if (Config::template has<kStepBiased>(flags)) load_bias(bias, step, 0);
  }

  /// Reads the biases or the mask of the warp's keys when a head begins. A key past the last one has weights of 0
  /// whatever its bias.
  __device__ __forceinline__ void begin_head(int head) {
    head_ = head;
    const Sequence sequence = sequence_of(head);
    const int lane = ptx::reread(lane_) % 16, key = min(this->first_key() + lane, sequence.seqlen_k - 1);
    const float bias = key_bias_of(p_, sequence, key, call_.bias_of_keys, call_.mask_of_keys);
    __syncwarp();
    storage_.key_biases[16 * warp_ + lane] = bias;
    __syncwarp();
  }
  __device__ __forceinline__ float key_bias(int r) const {
    return storage_.key_biases[16 * warp_ + ptx::reread(lane_) / 4 + 8 * r];
  }

  /// Writes the step's words of kept weights and of visible pairs, one of each in a thread.
  __device__ __forceinline__ void share_words(const BackwardWideStep& step, int flags) {
    const int word = 32 * ptx::reread(warp_) + ptx::reread(lane_);
    const uint32_t kept = Config::template has<kStepDrops>(flags) ? compute_kept(step, word) : 0;
    const uint32_t visible = Config::template has<kStepMasked>(flags) ? look_up(step, word) : 0;
    ptx::barrier_sync<Barriers::kWordsRead, kWarpgroupThreads>();
    storage_.kept[word] = kept;
    storage_.visible[word] = visible;
    ptx::barrier_sync<Barriers::kWordsWritten, kWarpgroupThreads>();
  }
  /// The kept weights of a word of a KeptTile.
  __device__ __forceinline__ uint32_t compute_kept(const BackwardWideStep& step, int word) const {
    const int i = step.tile * kBlockM + Kept::query(word);
    const int j = work_tile_.first_key + warpgroup_ * kWarpgroupRows + Kept::key(word);
    RandomKey key = storage_.random_key;
    key.batch_head += step.head;
    return draw_kept_weights(p_.dropout.rule, key, QueryRandomBits::of(key, dropout_query_group(i)),
                             KeyRandomBits::of(key, dropout_key_group(j)));
  }
  /// The pairs of a query and 32 keys that the masks leave.
  __device__ __forceinline__ uint32_t look_up(const BackwardWideStep& step, int word) const {
    const Sequence sequence = sequence_of(step.head);
    uint32_t visible = ~0u;
    if (p_.mask.data) {
      const int key_tile = work_tile_.first_key / Config::kBlockN;
      visible = workspace_.visibility.words_of(sequence.batch, sequence.head, step.tile,
                                               key_tile)[warpgroup_ * kWarpgroupThreads + word];
    }
    if (!p_.blocks.offsets || visible == 0) return visible;
    const int i = step.tile * kBlockM + word % kBlockM;
    const int j = work_tile_.first_key + warpgroup_ * kWarpgroupRows + word / kBlockM * 32;
    if (i >= sequence.seqlen_q || j >= sequence.seqlen_k) return 0;
    return visible & BlockMaskRows(p_.blocks, sequence).word(i, j);
  }

  /// Loads the bias of a part of a tile. What lies outside the tensor is any number: the weights there are 0.
  __device__ __forceinline__ void load_bias(PartBias& bias, const BackwardWideStep& step, int part) const {
    const int first_query = step.tile * kBlockM + part * kQueriesOfPart;
    if (has_bias_pairs()) {
      load_bias_pairs(bias, step.head, first_query);
    } else {
      const BiasRows rows(p_.bias, sequence_of(step.head));
      rows.with_type([&](auto type) {
#pragma unroll
        for (int k = 0; k < Part::kN * 4; ++k) {
          const int i = query_of_lane(first_query) + k / 4 * 8 + k % 2, j = key_of_lane() + 8 * (k / 2 % 2);
          bias[k] = __float_as_uint(rows.template load<decltype(type)>(min(i, work_tile_.sequence.seqlen_q - 1),
                                                                       min(j, work_tile_.sequence.seqlen_k - 1)));
        }
      });
    }
  }
  __device__ __forceinline__ bool has_bias_pairs() const {
    return Config::kAny ? call_.bias_by_pairs : !Config::kReadsElements;
  }
  /// Loads rows of queries, two keys at a time.
  __device__ __forceinline__ void load_bias_pairs(PartBias& bias, int head, int first_query) const {
    const ScoreView& view = p_.bias;
    const int lane = ptx::reread(lane_), i = first_query + lane / 4, j = this->first_key() + 2 * (lane % 4);
    const int queries = static_cast<int>(p_.seqlen_q) - i, keys = static_cast<int>(p_.seqlen_k) - j;
    const auto* g_pair = static_cast<const uint16_t*>(view.data) + work_tile_.sequence.batch * view.batch_stride +
                         (work_tile_.sequence.head + head) * view.head_stride + i * view.row_stride + j;
#pragma unroll
    for (int n = 0; n < Part::kN; ++n, g_pair += 8 * view.row_stride)
#pragma unroll
      for (int r = 0; r < 2; ++r) bias[2 * n + r] = ptx::load_pair_if(8 * n < queries && 8 * r < keys, g_pair + 8 * r);
  }

  // ---- Passes over the scores of a part of a tile -------------------------------------------------------------------

  /// P of a part of a tile, and what is published of it. `bias` is that of the part, and becomes that of the next one.
  __device__ __forceinline__ void compute_p_of_part(Weights& p_of_tile, Weights& published_of_tile, Scores& s_of_tile,
                                                    PartBias& bias, const BackwardWideStep& step, int flags, int part) {
    PartScores& s = reinterpret_cast<PartScores&>(s_of_tile[0][part * Part::kN]);
    PartWeights& p = reinterpret_cast<PartWeights&>(p_of_tile[part * Part::kSteps]);
    PartWeights& published = reinterpret_cast<PartWeights&>(published_of_tile[part * Part::kSteps]);
    PartWeights slopes;
    const int first_query = step.tile * kBlockM + part * kQueriesOfPart;
    if (Config::template has<kStepSoftcapped>(flags)) cap(s, slopes);
    compute_exponents(s, bias, storage_.lse[at_.stage()] + part * kQueriesOfPart, flags, first_query, step.head);
    if (part + 1 < kParts && Config::template has<kStepBiased>(flags)) load_bias(bias, step, part + 1);
    for_each_score(s, [](float& x, int, int, int) { x = ptx::exp2_approx(x); });
    if (this->hides(step.tile)) {
      Part::hide(s, work_tile_.sequence, this->first_key(), first_query, lane_);
      if (work_tile_.large) for_each_score(s, [](float& x, int, int, int) { x = LargeLse::bound(x); });
    }
    pack_operand<Element>(p, s);
    if (Config::template has<kStepMasked>(flags)) {
      const uint32_t* const words = storage_.visible + warp_ / 2 * kBlockM + part * kQueriesOfPart;
      Part::hide_by_words(p, ptx::shared_address(words), warp_, lane_);
    }
    if (Config::template has<kStepKeyBiased>(flags)) hide_keys(p);
    select_published(published, p, slopes, flags, part * Part::kSteps);
  }

  /// Replaces products by tanh(scaled product / cap), and computes the softcap's derivatives.
  __device__ __forceinline__ void cap(PartScores& s, PartWeights& slopes) const {
    const float scale = call_.scale;
    for_each_score(s, [&](float& x, int, int, int) { x = softcap_tanh<Element>(x * scale); });
    Part::for_each_pair([&](int k, int e, int n, int r) {
      slopes[k][e] = ptx::pack2<Element>(softcap_slope(s[0][n][2 * r]), softcap_slope(s[0][n][2 * r + 1]));
    });
  }

  /// Replaces products, or with a softcap their tanh, by the exponents of P. Those of pairs that a bias hides become
  /// -inf, even if the sum overflowed.
  __device__ __forceinline__ void compute_exponents(PartScores& s, const PartBias& bias, const float* s_lse, int flags,
                                                    int first_query, int head) const {
    const float scale = Config::template has<kStepSoftcapped>(flags) ? call_.cap : call_.scale;
    float of_keys[2] = {0.0f, 0.0f};
    if (Config::template has<kStepKeyBiased>(flags)) of_keys[0] = key_bias(0), of_keys[1] = key_bias(1);
    const auto with_bias = [&](float x, float b, float term, int e) {
      const float sum = fmaf(x, scale, fmaf(b, kLog2E, of_keys[e / 2] - term));
      return b == -INFINITY ? b : sum;
    };
    if (Config::template has<kStepBiased>(flags) && has_bias_pairs()) {
      const bool is_half = Config::kAny ? p_.bias.dtype == DType::kFloat16 : std::is_same_v<Element, __half>;
      is_half ? add_pairs<__half>(s, bias, s_lse, with_bias) : add_pairs<__nv_bfloat16>(s, bias, s_lse, with_bias);
    } else if (Config::template has<kStepBiased>(flags)) {
      Part::for_each_with_term(s, s_lse, lane_, [&](float& x, float term, int n, int e) {
        x = with_bias(x, __uint_as_float(bias[4 * n + e]), term, e);
      });
    } else {
      Part::for_each_with_term(s, s_lse, lane_,
                               [&](float& x, float term, int, int e) { x = fmaf(x, scale, of_keys[e / 2] - term); });
    }
    if (Config::template has<kStepAlibi>(flags)) {
      const int distance = query_of_lane(first_query) + work_tile_.sequence.offset - key_of_lane();
      const Sequence& sequence = work_tile_.sequence;
      const float slope = p_.alibi_slopes[sequence.batch * p_.alibi_batch_stride + sequence.head + head] * kLog2E;
      AlibiOfLane<true>{slope, static_cast<float>(distance)}.add(s);
    }
  }
  __device__ __forceinline__ int query_of_lane(int first_query) const {
    return first_query + 2 * (ptx::reread(lane_) % 4);
  }
  template <class T, class WithBias>
  __device__ __forceinline__ void add_pairs(PartScores& s, const PartBias& bias, const float* s_lse,
                                            WithBias with_bias) const {
    float2 pair;
    Part::for_each_with_term(s, s_lse, lane_, [&](float& x, float term, int n, int e) {
      if (e % 2 == 0) pair = ptx::unpack2<T>(ptx::movmatrix_trans(bias[2 * n + e / 2]));
      x = with_bias(x, e % 2 ? pair.y : pair.x, term, e);
    });
  }

  /// Zeroes weights of keys that a per-key bias or mask hides, as they may be NaN.
  __device__ __forceinline__ void hide_keys(PartWeights& p) const {
    const uint32_t shown[2] = {key_bias(0) == -INFINITY ? 0u : ~0u, key_bias(1) == -INFINITY ? 0u : ~0u};
    Part::for_each_pair([&](int k, int e, int, int) { p[k][e] &= shown[e % 2]; });
  }

  /// Publishes P times the softcap's derivative. Where dropout drops a weight, zeroes it in p and sets its sign in
  /// `published`. A hidden pair publishes 0, as its derivative may be NaN. first_step: number of the part's first
  /// sixteen queries in the tile.
  __device__ __forceinline__ void select_published(PartWeights& published, PartWeights& p, const PartWeights& slopes,
                                                   int flags, int first_step) const {
    Part::for_each_pair([&](int k, int e, int, int) { published[k][e] = p[k][e]; });
    if (Config::template has<kStepSoftcapped>(flags))
      Part::for_each_pair([&](int k, int e, int, int) {
        published[k][e] = multiply_pairs<Element>(p[k][e], slopes[k][e]) & ptx::differs<Element>(p[k][e], 0);
      });
    if (!Config::template has<kStepDrops>(flags)) return;
    const uint32_t lane = static_cast<uint32_t>(ptx::reread(lane_));
    const uint32_t s_lane = ptx::shared_address(storage_.kept) + Kept::at(0, lane);
    const int shift = Kept::shift(16 * warp_, lane);
    uint2 kept;
    Part::for_each_pair([&](int k, int e, int, int) {
      if (e == 0) {
        kept = load_shared<uint2>(s_lane + (first_step + k) * Kept::kStepBytes);
        kept = {kept.x << shift, kept.y << shift};
      }
      const uint32_t is_kept = ptx::pair_byte_signs(kept.x, kept.y, e);
      published[k][e] = (published[k][e] & ~Tile::kSigns) | (~is_kept & Tile::kSigns);
      p[k][e] &= is_kept;
    });
  }

  const BackwardWideOptions& call_;
  int head_ = -1;  // of the step before
};

}  // namespace flash_ext::sm90
