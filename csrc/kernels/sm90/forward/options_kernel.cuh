// The forward's variant with options: bias, masks and dropout beside what the others serve (kernel.cuh).
//
// It differs from them in five things. A list of tiles drives the loads, made from what masks leave
// (common/mask/visibility.cuh), and each tile comes with a note that says which warpgroups visit it. Tiles that ask for
// no more than bits of a mask, and a bias or dropout, but not both, take steps, in runs that ask one note which groups
// visit them; others are taken one after the other, as all are at head_dim 64 with dropout. A bias alone and masks
// alone have kernels without tests for anything else. A warp raises the references of its rows as long as one of them
// has none, or one so low that it must be a padding bias's. And the row sums keep watch: a tile whose sum passes
// kSumLimit takes the exponent of the sum into the reference, while P is still in float, so that a bias that grows
// along the keys does not make every tile of queries be computed twice.
#pragma once

#include "kernel.cuh"
#include "kernels/ptx/lane.h"
#include "options_producer.cuh"

namespace flash_ext::sm90 {

template <class Config>
class GeneralGroup : public ForwardGroup<Config> {
  using Base = ForwardGroup<Config>;
  using Base::address;
  using Base::group_;
  using Base::k_at_;
  using Base::lane_;
  using Base::out_;
  using Base::p_;
  using Base::pin;
  using Base::pin_out;
  using Base::reference_;
  using Base::release;
  using Base::release_values;
  using Base::row_sum_;
  using Base::start_pv;
  using Base::start_qk;
  using Base::v_at_;
  using Base::wait_for_values;
  using Base::warp_;
  using typename Base::Element;
  using typename Base::Scores;
  using typename Base::Weights;
  using typename Base::Work;
  static constexpr int kBlockN = Config::kBlockN, kParts = kBlockN / kKeyGroup;
  static constexpr int kD = Base::kD, kN = Base::kN;
  // P must stay finite as an Element, l and out in float.
  static constexpr float kSumLimit = std::is_same_v<Element, __half> ? 0x1p14f : 0x1p60f;
  static constexpr float kMostExponent = 0x1p120f;
  using BiasPairs = uint32_t[kParts][16];  // 64 keys of both rows
  // S of a tile beside P V of the one before. Not where 128 keys are worth more.
  static constexpr bool kBeside = kParts == 1;
  // A bias, asked for before S is waited for, takes registers that dropout needs.
  static constexpr bool kAsksForBias = !Config::kDrops;
  static constexpr bool kOnlyBias = Config::kOnlyBias, kOnlyMask = Config::kOnlyMask, kSingle = kOnlyBias || kOnlyMask;
  template <bool kBias>
  static constexpr bool kHasStep = !kBias || kAsksForBias;
  // Base 2. A bias that pads with -10000, or with the lowest number of float16, leaves references below it.
  static constexpr float kLowReference = -8192.0f;
  // This warp raises references in the next tile; P of the tile before waits for its V; tiles may take steps; a tile of
  // a run that is left.
  static constexpr uint32_t kRaises = 1, kWaits = 2, kHurries = 4, kRun = 8;

 public:
  __device__ __forceinline__ GeneralGroup(const ForwardParams& p, const GeneralOptions& options,
                                          GeneralState<Config>& state, uint32_t s_tiles, int group, int lane)
      : Base(p, options.terms, state, s_tiles, group, lane, options.scale),
        options_(options),
        state_(state),
        s_bias_(s_tiles + Config::kBiasOffset + group * Config::kBiasSlots * Config::kBiasPartBytes) {
    if constexpr (Config::kDrops) draw_key_.seeds = uniform_seeds(p.dropout);
    if constexpr (kOnlyBias) s_lane_ = bias_part(0).lane_at();
    if constexpr (kOnlyMask) s_lane_ = bits_of_lane(warp_, lane_);
  }

  __device__ __forceinline__ void run() {
    WorkQueue<ForwardState<Config>> queue(state_);
    while (Work* const work = queue.front()) {
      this->clear();
      visit(*work);
      if (!work->careful) look_for_failure(*work);
      store(*work);
      if (work->met_non_finite) this->add_hidden_non_finite(*work, p_);
      queue.pop(lane_);
    }
  }

 private:
  __device__ __forceinline__ void visit(const Work& work) {
    this->wait_for_query(work);
    mode_ = kRaises;
    if constexpr (Config::kDrops) prepare_draws(work);
    if (kOnlyBias || (!kOnlyMask && options_.adds_bias)) {
      visit_tiles<true>(work);
    } else {
      visit_tiles<false>(work);
    }
  }

  /// A loop with a bias and one without: registers for what comes ahead of S would have to be cleared in each tile.
  template <bool kBias>
  __device__ __forceinline__ void visit_tiles(const Work& work) {
    if constexpr (kBeside) {
      visit_beside<kBias>(work);
    } else {
      visit_in_turn<kBias>(work);
    }
  }

  /// S and P of a tile, and then P V. That S of the next one waits so long leaves registers to the options; the other
  /// warpgroups have products meanwhile.
  template <bool kBias>
  __device__ __forceinline__ void visit_in_turn(const Work& work) {
    uint32_t flags;
#pragma unroll 1
    do {
      this->wait_for_keys();
      const TileNote note = state_.k_notes[k_at_.stage()];
      flags = note.flags;
      if (!note.visible(group_)) {
        pass();
        continue;
      }
      Weights p;
      weigh_keys<kBias>(p, work, note);
      add_values(p);
    } while (!(flags & TileNote::kLast));
    release_query(work);
  }

  template <bool kBias>
  __device__ __forceinline__ void visit_beside(const Work& work) {
    Weights p = {};  // or its registers are taken from one work to the next, as those of the bias in a step
    uint32_t flags;
#pragma unroll 1
    do {
      this->wait_for_keys();
      const TileNote note = state_.k_notes[k_at_.stage()];
      flags = note.flags;
      if (!kHasStep<kBias> || !(mode_ & kHurries) || !note.whole(group_)) {
        visit_alone<kBias>(p, work, note);
      } else if constexpr (kHasStep<kBias>) {
        mode_ += note.run() * kRun;
        take_steps<kBias>(p);
      }
    } while (!(flags & TileNote::kLast));
    release_query(work);
    if (mode_ & kWaits) add_values(p);
  }

  /// P V of the tile before, and then S and P of this one, if the warpgroup sees it.
  template <bool kBias>
  __device__ __forceinline__ void visit_alone(Weights& p, const Work& work, const TileNote& note) {
    if (mode_ & kWaits) add_values(p);
    if (!note.visible(group_)) return pass();
    mode_ = (mode_ & kRaises) | kWaits;
    weigh_keys<kBias>(p, work, note);
    const bool may_hurry = kHasStep<kBias> && (kSingle || !options_.scales_first) && !work.careful;
    if (may_hurry && !some_warp_raises()) mode_ |= kHurries;
  }

  __device__ __forceinline__ void release_query(const Work& work) const {
    if (Config::kPlaces == 1 && work.has_rows(group_)) release(state_.q_empty[group_]);
  }

  /// Of the warpgroup: products are started by all four, so they take the same way to them.
  __device__ __forceinline__ bool some_warp_raises() const {
    return ptx::barrier_any<kGroupThreads>(1 + group_, mode_ & kRaises);
  }

  __device__ __forceinline__ void release_keys() {
    release(state_.k_empty[k_at_.stage()]);
    k_at_.advance();
  }

  __device__ __forceinline__ void pass() {
    __syncwarp();  // all lanes have read the note
    mode_ &= kRaises;
    release_keys();
    wait_for_values();
    release_values();
  }

  /// S and P of a tile, whatever the options.
  template <bool kBias>
  __device__ __forceinline__ void weigh_keys(Weights& p, const Work& work, const TileNote& note) {
    Scores s;
    uint32_t visible[kParts][2] = {};
    BiasPairs bias;
    start_qk(s);
    const bool hides = look(note, visible);
    if constexpr (kBias && kAsksForBias) ask_for_bias(bias);
    ptx::wgmma_wait<0>();
    pin(s);
    if constexpr (!Config::kDrops) release_keys();
    scale_first(s, work, note, !kBias && !hides && this->is_full(work, note.tile));
    if constexpr (kBias) {
      if (work.careful) {
        add_bias<true>(s, bias);
      } else {
        add_bias<false>(s, bias);
      }
    }
    if (hides) hide_by_bits(s, visible);
    this->hide(s, work, note.tile);
    float sum[2];
    if (mode_ & kRaises) {
      this->raise_reference(s);
      exponentiate<false, true>(s, this->scale_, reference_, sum);
      if (!work.careful && !some_reference_is_low(work)) mode_ ^= kRaises;
    } else {
      exponentiate<false>(s, this->scale_, reference_, sum);
    }
    add_sums(s, sum, [&] {
      if constexpr (kBias) hide_by_bias(s);
    });
    if constexpr (kBias) release_bias();
    this->pack(p, s);
    if constexpr (Config::kDrops) drop_weights(p);
  }

  /// P V of the tile before.
  __device__ __forceinline__ void add_values(const Weights& p) {
    wait_for_values();
    start_pv(p);
    ptx::wgmma_wait<0>();
    pin_out();
    release_values();
  }

  /// What a step knows of its tile: of the bias before it begins, of masks before S is there.
  template <bool kBias>
  struct Terms {
    BiasPairs bias;
    uint32_t visible[kParts][2];
    bool hides;
    bool v_came = false;  // V of the tile before
  };

  /// P V of the tile before, S and P of this one, and so on for a run of tiles, which the window leaves whole, and in
  /// which all rows have references. A warp waits for itself more than for products: each load from shared memory, and
  /// each look at a barrier, takes some 100 cycles, as products of the others hold them up. So they are asked for ahead
  /// of what a warp has to do anyway: a bias, and whether the next tile is there, a step ahead.
  template <bool kBias>
  __device__ __forceinline__ void take_steps(Weights& p) {
    Terms<kBias> terms;
    if constexpr (kBias) ask_for_bias(terms.bias);
#pragma unroll 1
    while (true) {
      Scores s;
      if constexpr (!kOnlyBias) ask_for_bits(terms.visible);
      const bool partly = !kOnlyBias && state_.k_notes[k_at_.stage()].partly(group_);
      start_qk(s);
      if (!terms.v_came) wait_for_values();
      start_pv(p);
      terms.hides = !kOnlyBias && __any_sync(~0u, partly && hide_something(terms.visible));
      ptx::wgmma_wait<1>();
      pin(s);
      if constexpr (!Config::kDrops) release_keys();
      const bool goes_on = mode_ >= kRun;
      float sum[2];
      weigh(s, terms, sum);
      ptx::wgmma_wait<0>();
      pin_out();
      release_values();
      bool k_came = false, bias_came = false;
      if constexpr (!Config::kDrops) {  // which has K still
        k_came = ptx::mbarrier_test(address(state_.k_full[k_at_.stage()]), k_at_.parity());
        terms.v_came = ptx::mbarrier_test(address(state_.v_full[v_at_.stage()]), v_at_.parity());
      }
      if constexpr (kBias) bias_came = next_bias_came();
      add_sums(s, sum, [&] {
        if constexpr (kBias) hide_by_bias(s);
        if constexpr (kOnlyMask) hide_weights(s, terms.visible);
      });
      if constexpr (kBias) {
        release_bias();
        if (goes_on) ask_for_bias(terms.bias, bias_came);
      }
      this->pack(p, s);
      if constexpr (Config::kDrops) drop_weights(p);
      if (!goes_on) break;
      mode_ -= kRun;
      if (!k_came) this->wait_for_keys();
    }
  }

  /// That of the tile behind this one.
  __device__ __forceinline__ bool next_bias_came() const {
    static_assert(kParts == 1);
    auto at = bias_at_;
    at.advance();
    return ptx::mbarrier_test(address(state_.bias_full[group_][at.stage()]), at.parity());
  }

  /// Products to weights, and their sums. An option alone goes into the addend of the exponential's FMA, where the
  /// reference is, so that what makes it stands between exponentials, which leave three of four issue slots.
  template <bool kBias>
  __device__ __forceinline__ void weigh(Scores& s, const Terms<kBias>& terms, float (&sum)[2]) const {
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = reference_[r] == -INFINITY ? 0.0f : -reference_[r];
    if constexpr (kOnlyBias) {
      exponentiate_with(s, this->scale_, sum, [&](int n, int e) {
        const float2 b = ptx::unpack2<Element>(terms.bias[n / 8][n % 8 * 2 + e / 2]);
        return fmaf(e % 2 == 0 ? b.x : b.y, kLog2E, shift[e / 2]);
      });
    } else if (kOnlyMask && terms.hides) {
      exponentiate_with(s, this->scale_, sum, [&](int n, int e) {
        return terms.visible[n / 8][e / 2] >> (2 * (n % 8) + e % 2) & 1u ? shift[e / 2] : -INFINITY;
      });
    } else {
      if constexpr (kBias) add_bias<false>(s, terms.bias);
      if (terms.hides) hide_by_bits(s, terms.visible);
      exponentiate<false>(s, this->scale_, reference_, sum);
    }
  }

  /// K, which has been used, is released behind it.
  __device__ __forceinline__ void drop_weights(Weights& p) {
    options_.drops_most ? drop<true>(p) : drop<false>(p);
    release_keys();
  }

  /// Beside K is what the draws of its keys share.
  template <bool kDropsMost>
  __device__ __forceinline__ void drop(Weights& p) const {
    const KeyDraws* const s_keys = state_.key_draws[k_at_.stage()] + lane_ % 4 * 2;
    uint32_t read = 0;
#pragma unroll
    for (int group = 0; group < kBlockN / 32; ++group) {  // of 32 keys
      const PhiloxWords even = draw_words(draw_key_, query_draws_, s_keys[8 * group]);
      const PhiloxWords odd = draw_words(draw_key_, query_draws_, s_keys[8 * group + 1]);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t(&pairs)[4] = p[2 * group + w / 2];
        const uint32_t x = below_threshold<kDropsMost>(even.word[w], options_.minus_threshold);
        const uint32_t y = below_threshold<kDropsMost>(odd.word[w], options_.minus_threshold);
        pairs[w % 2 * 2] &= ~ptx::pair_signs<0>(x, y);
        pairs[w % 2 * 2 + 1] &= ~ptx::pair_signs<1>(x, y);
      }
      read ^= p[2 * group][0];
    }
    ptx::wait_for_loaded(read);
  }

  /// Of the work.
  __device__ __forceinline__ void prepare_draws(const Work& work) {
    draw_key_.batch_head =
        static_cast<uint32_t>(work.sequence.batch * static_cast<int>(p_.heads_q) + work.sequence.head);
    const int sixteen = (work.first_query + group_ * kGroupRows) / 16 + warp_;  // rows
    query_draws_ = QueryDraws::of(draw_key_, static_cast<uint32_t>(sixteen * 8 + lane_ / 4));
  }

  /// The parts of this tile, behind a branch on the sum of what was made of them.
  __device__ __forceinline__ void release_bias() {
    static_assert(kParts <= Config::kBiasSlots, "all parts of a tile are kept until now");
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      release(state_.bias_empty[group_][bias_at_.stage()]);
      bias_at_.advance();
    }
  }

  /// Of a tile's P. `hide` makes 0 of the weights of hidden pairs that an option made NaN of: what is added to a score
  /// hides it by -inf, unless the score is NaN.
  template <class Hide>
  __device__ __forceinline__ void add_sums(Scores& s, float (&sum)[2], Hide hide) {
    // Inf and NaN too.
    if (__any_sync(~0u, !(sum[0] + sum[1] <= kSumLimit))) {
      hide();
      sum_up(s, sum);
      lower(s, sum);
    }
    row_sum_[0] += sum[0];
    row_sum_[1] += sum[1];
  }

  /// In the order of exponentiate().
  __device__ __forceinline__ static void sum_up(Scores& s, float (&sum)[2]) {
    sum[0] = sum[1] = 0.0f;
    for_each_score(s, [&](float& x, int, int, int e) { sum[e / 2] += x; });
  }

  __device__ __forceinline__ static void hide_weights(Scores& s, const uint32_t (&visible)[kParts][2]) {
    for_each_score(s, [&](float& x, int, int n, int e) {
      if (!(visible[n / 8][e / 2] >> (2 * (n % 8) + e % 2) & 1u)) x = 0.0f;
    });
  }

  __device__ __forceinline__ void hide_by_bias(Scores& s) const {
    const auto hide = [](float& x, float b) {
      if (b == -INFINITY) x = 0.0f;
    };
    is_half_bias() ? add_parts<__half>(s, hide) : add_parts<__nv_bfloat16>(s, hide);
  }

  __device__ __forceinline__ bool some_reference_is_low(const Work& work) const {
    const TileCoordinates<false> at = this->coordinates(work, 0);
    bool low = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) low |= reference_[r] < kLowReference && at.row(0, 2 * r) < work.end_query;
    return __any_sync(~0u, low);
  }

  /// Takes the exponent of sums beyond the limit into the reference, as long as a power of 2 can undo it. Else the sum
  /// becomes Inf, which look_for_failure() notices.
  __device__ __forceinline__ void lower(Scores& s, float (&sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = fmaxf(sum[r], __shfl_xor_sync(~0u, sum[r], 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const bool beyond = largest > kSumLimit && largest < kMostExponent;
      const float exponent = beyond ? floorf(log2f(largest)) : 0.0f, factor = ptx::exp2_approx(-exponent);
      reference_[r] += exponent;
      sum[r] = largest >= kMostExponent ? INFINITY : sum[r] * factor;
      row_sum_[r] *= factor;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        s[0][n][2 * r] *= factor;
        s[0][n][2 * r + 1] *= factor;
      }
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        out_[d][2 * r] *= factor;
        out_[d][2 * r + 1] *= factor;
      }
    }
  }

  /// As ForwardGroup's. Rows that masks leave nothing of have no reference; who found none was raised until the end.
  __device__ __forceinline__ void look_for_failure(Work& work) const {
    const TileCoordinates<false> at = this->coordinates(work, 0);
    bool failed = false, overflowed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float trace = 0.0f;
#pragma unroll
      for (int d = 0; d < kD; ++d) trace = fmaf(0.0f, out_[d][2 * r], fmaf(0.0f, out_[d][2 * r + 1], trace));
      const bool exists = at.row(0, 2 * r) < work.end_query, met = trace != 0.0f;
      failed |= exists && met;
      overflowed |= exists && Base::has_overflowed(row_sum_[r], met);
    }
    Base::note_failure(work, failed, overflowed);
  }

  /// What masks leave of this lane's rows, which came with K; whether they hide something from this warp. That is asked
  /// before K is released: an arrival does not wait for loads under way, and TMA may then be faster.
  __device__ __forceinline__ bool look(const TileNote& note, uint32_t (&visible)[kParts][2]) const {
    if (kOnlyBias || !note.partly(group_)) return false;
    ask_for_bits(visible);
    return __any_sync(~0u, hide_something(visible));
  }

  __device__ __forceinline__ static bool hide_something(const uint32_t (&visible)[kParts][2]) {
    uint32_t all = 0xFFFFu;
    for (const auto& part : visible) all &= part[0] & part[1];
    return all != 0xFFFFu;
  }

  __device__ __forceinline__ void ask_for_bits(uint32_t (&visible)[kParts][2]) const {
    constexpr int kPairBytes = sizeof(PairBits), kRowBytes = kPairBytes / kGroupRows;
    const uint32_t s_bits =
        (kOnlyMask ? s_lane_ : bits_of_lane(again(warp_), again(lane_))) + k_at_.stage() * Config::kBitsBytes;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        visible[part][r] = ptx::load_shared_16(s_bits + part * kPairBytes + 8 * r * kRowBytes);
  }

  /// In the first stage.
  __device__ __forceinline__ uint32_t bits_of_lane(int warp, int lane) const {
    constexpr int kPairBytes = sizeof(PairBits), kRowBytes = kPairBytes / kGroupRows;
    return this->s_tiles_ + Config::kBitsOffset + group_ * (kParts * kPairBytes) + (16 * warp + lane / 4) * kRowBytes +
           lane % 4 * 2;
  }

  /// Products to scores, where a bias cannot be added to products. A bias may hide some, so it counts as if it did.
  __device__ __forceinline__ void scale_first(Scores& s, const Work& work, const TileNote& note, bool visible) const {
    if (kSingle || !options_.scales_first) return;
    const ScoreRules<Element> rules = this->rules(work);
    scale_and_cap<Config::kCapsByProducts>(s, rules, options_.terms.softcap, visible);
    if (options_.adds_alibi) rules.add_alibi(s, this->coordinates(work, note.tile));
  }

  /// As ldmatrix deals it out.
  __device__ __forceinline__ void ask_for_bias(BiasPairs& bias, bool came = false) const {
    auto at = bias_at_;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (!came) ptx::mbarrier_wait(address(state_.bias_full[group_][at.stage()]), at.parity());
      const uint32_t s_lane =
          kOnlyBias ? s_lane_ + at.stage() * Config::kBiasPartBytes : bias_part(at.stage()).lane_at();
      BiasPart::load(bias[part], s_lane);
      at.advance();
    }
  }

  __device__ __forceinline__ bool is_half_bias() const {
    return kOnlyBias ? std::is_same_v<Element, __half> : p_.bias.dtype == DType::kFloat16;
  }

  /// kHides: -inf hides even a score that is NaN.
  template <bool kHides>
  __device__ __forceinline__ void add_bias(Scores& s, const BiasPairs& bias) const {
    is_half_bias() ? add_bias_of<__half, kHides>(s, bias) : add_bias_of<__nv_bfloat16, kHides>(s, bias);
  }

  template <class BiasElement, bool kHides>
  __device__ __forceinline__ void add_bias_of(Scores& s, const BiasPairs& bias) const {
    const auto add = [this](float& x, float b) {
      x = fmaf(b, options_.bias_factor, x);
      if (kHides && b == -INFINITY) x = -INFINITY;
    };
    if constexpr (kAsksForBias) {
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 b = ptx::unpack2<BiasElement>(bias[n / 8][n % 8 * 2 + r]);
          add(s[0][n][2 * r], b.x);
          add(s[0][n][2 * r + 1], b.y);
        }
    } else {
      add_parts<BiasElement>(s, add);
    }
  }

  __device__ __forceinline__ BiasPart bias_part(int slot) const {
    return {s_bias_ + slot * Config::kBiasPartBytes, p_.bias.row_stride == 0, again(warp_), again(lane_)};
  }

  /// As they come.
  template <class BiasElement, class F>
  __device__ __forceinline__ void add_parts(Scores& s, F add) const {
    auto at = bias_at_;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      ptx::mbarrier_wait(address(state_.bias_full[group_][at.stage()]), at.parity());
      bias_part(at.stage()).template for_each<BiasElement>(s, 8 * part, add);
      at.advance();
    }
  }

  /// There are no registers for what would follow from it outside of the loop.
  __device__ __forceinline__ static int again(int x) { return ptx::reread(x); }

  /// Normalises the rows and writes them, from registers: shared memory is given to other things.
  __device__ __forceinline__ void store(const Work& work) {
    const int first_row = work.first_query + group_ * kGroupRows;
    if (first_row < work.end_query) {
      float scale[2], lse[2];
      this->finish_rows(work, scale, lse);
      this->store_lse(work, first_row, lse);
      if constexpr (Config::kDrops) {
        scale[0] *= options_.keep_scale;
        scale[1] *= options_.keep_scale;
      }
      this->store_rows(work, first_row, scale);
    }
    if (work.has_rows(group_)) this->q_at_.advance();
  }

  const GeneralOptions& options_;
  GeneralState<Config>& state_;
  const uint32_t s_bias_;  // of this warpgroup
  RingPosition<Config::kBiasSlots> bias_at_;
  uint32_t s_lane_;  // of an option alone: where this lane's share of it lies, in the first slot or stage
  uint32_t mode_;    // kRaises and so on
  DrawKey draw_key_;
  QueryDraws query_draws_;  // of this lane's rows
};

/// Where batch entries share what is read for each query and key, those of one head follow each other.
struct GeneralSchedule : ForwardSchedule {
  int batch, heads_q;
  bool batch_first;

  GeneralSchedule(const ForwardSchedule& schedule, const AttentionParams& p)
      : ForwardSchedule(schedule),
        batch(static_cast<int>(p.batch)),
        heads_q(static_cast<int>(p.heads_q)),
        batch_first(p.bias.data && p.bias.batch_stride == 0 && p.bias.head_stride != 0 && p.bias.row_stride != 0) {}

  __device__ __forceinline__ WorkTile locate(int64_t position) const {
    if (list) return list.locate(static_cast<int>(position));
    GeneralSchedule here = *this;
    // What follows from them is computed once a work: the loaders lack the registers to keep it.
    here.blocks_m = ptx::reread(blocks_m), here.section_heads = ptx::reread(section_heads);
    int head, block;
    here.locate_in_sections(position, head, block);
    if (batch_first) head = head % batch * heads_q + head / batch;
    return of_entry(head, block);
  }
};

/// Warpgroup 0 loads, the others compute.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    general_forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ GeneralOptions options,
                           const __grid_constant__ ForwardMaps maps, const __grid_constant__ CUtensorMap bias_map,
                           const __grid_constant__ GeneralSchedule schedule) {
  extern __shared__ __align__(1024) char shared[];
  auto& state = *reinterpret_cast<GeneralState<Config>*>(shared + Config::kTilesBytes);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) state.init();
  __syncthreads();
  if (warp < kGroupWarps) {
    ptx::give_up_registers<Config::kLoaderRegisters>();
    const int lane = ptx::lane_id();  // of each role: the one with the fewest registers else takes it from all
    GeneralLoader<Config> loader(p, options, maps, bias_map, state, shared, lane);
    if (warp == 0) {
      loader.load_keys();
    } else if (warp == 1) {
      loader.load_queries_and_bias();
    } else if (warp == 2) {
      loader.load_values();
    } else if (lane == 0) {
      loader.schedule_work(schedule);
    }
  } else {
    ptx::take_registers<Config::kRegisters>();
    GeneralGroup<Config>(p, options, state, ptx::shared_address(shared), warp / kGroupWarps - 1, ptx::lane_id()).run();
  }
}

inline GeneralOptions general_options(const ForwardParams& p) {
  GeneralOptions options{ScoreTerms(p)};
  const float scale = static_cast<float>(p.softmax_scale) * kLog2E;
  options.adds_alibi = p.alibi_slopes != nullptr;
  options.adds_bias = p.bias.data != nullptr;
  options.scales_first = scales_first(p.softcap, options.adds_alibi, p.softmax_scale);
  options.scale = options.scales_first ? 1.0f : scale;
  options.bias_factor = kLog2E / options.scale;
  options.keep_scale = static_cast<float>(dropout_keep_scale(p.dropout.p));
  const uint32_t threshold = dropout_threshold(p.dropout.p);
  options.drops_most = threshold > 0x8000u;
  options.minus_threshold = (0x10000u - threshold) * 0x10001u;
  return options;
}

template <class Config>
void launch_general_forward(const ForwardParams& p, const ForwardVisibility& visible, void* workspace,
                            cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(GeneralState<Config>);
  static_assert(kSharedBytes <= 227 * 1024, "a block can have no more");
  const WorkListPlan list = forward_work_list(p, Config::kBlockM);
  GeneralSchedule schedule = {schedule_forward<Config>(p, workspace), p};
  use_list(schedule, list, workspace);
  if (list.listed) {
    fill_work_list(p, list, schedule.list, stream);
  } else {
    clear_forward_workspace(workspace, stream);
  }
  GeneralOptions options = general_options(p);
  options.visible = visible;
  const CUtensorMap bias_map =
      options.adds_bias ? encode_bias_map(p, p.bias.row_stride == 0 ? 1 : kGroupRows) : CUtensorMap{};
  launch("sm90/forward", general_forward_kernel<Config>,
         {dim3(forward_blocks(schedule)), dim3(Config::kThreads), kSharedBytes}, stream, p, options,
         encode_maps<Config>(p), bias_map, schedule);
}

template <class Element, int kHeadDim>
void run_general_forward(const ForwardParams& p, const ForwardVisibility& visible, void* workspace,
                         cudaStream_t stream) {
  const bool drops = dropout_threshold(p.dropout.p) > 0;
  const auto launch = [&](auto config) { launch_general_forward<decltype(config)>(p, visible, workspace, stream); };
  switch (general_class({drops, p.bias.data != nullptr, p.bias.dtype == p.dtype, p.mask.data || p.blocks.offsets,
                         general_options(p).scales_first})) {
    case ForwardClass::kBias:
      return launch(GeneralConfig<Element, kHeadDim, ForwardClass::kBias>());
    case ForwardClass::kMask:
      return launch(GeneralConfig<Element, kHeadDim, ForwardClass::kMask>());
    case ForwardClass::kDropout:
      return launch(GeneralConfig<Element, kHeadDim, ForwardClass::kDropout>());
    default:
      return launch(GeneralConfig<Element, kHeadDim, ForwardClass::kGeneral>());
  }
}

}  // namespace flash_ext::sm90
