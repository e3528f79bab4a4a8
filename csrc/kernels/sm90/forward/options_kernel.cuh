// The forward's variant with options: bias, masks and dropout beside what the others serve (kernel.cuh).
//
// It differs from them in five things. A list of tiles drives the loads, made from what masks leave
// (common/mask/visibility.cuh), and each tile comes with a note that says which warpgroups visit it. Tiles that ask for
// no more than bits of a mask, and a bias or dropout, but not both, take steps, in runs that ask one note which groups
// visit them; others are taken one after the other, as all are at head_dim 64 with dropout. A bias alone and masks
// alone have kernels without tests for anything else. A warp updates the row stabilisers of its rows as long as one of
// them has none, or one so low that it must be a padding bias's. And the row sums keep watch: a tile whose sum passes
// kSumLimit takes the exponent of the sum into the stabiliser, while P is still in float, so that a bias that grows
// along the keys does not make every tile of queries be computed twice.
#pragma once

#include "kernel.cuh"
#include "kernels/ptx/lane.h"
#include "options_producer.cuh"

namespace flash_ext::sm90 {

template <class Config>
class ForwardOptionsConsumer : public ForwardConsumer<Config> {
  using Base = ForwardConsumer<Config>;
  using Base::address;
  using Base::fence_operand;
  using Base::fence_out;
  using Base::k_at_;
  using Base::lane_;
  using Base::out_;
  using Base::p_;
  using Base::release;
  using Base::release_values;
  using Base::row_sum_;
  using Base::stabiliser_;
  using Base::start_pv;
  using Base::start_qk;
  using Base::v_at_;
  using Base::wait_for_values;
  using Base::warp_;
  using Base::warpgroup_;
  using typename Base::Element;
  using typename Base::Scores;
  using typename Base::Weights;
  using typename Base::WorkTile;
  static constexpr int kBlockN = Config::kBlockN, kKeyParts = kBlockN / kKeyGroup;
  static constexpr int kD = Base::kD, kN = Base::kN;
  // P must stay finite as an Element, l and out in float.
  static constexpr float kSumLimit = std::is_same_v<Element, __half> ? 0x1p14f : 0x1p60f;
  static constexpr float kMostExponent = 0x1p120f;
  using BiasPairs = uint32_t[kKeyParts][16];          // 64 keys of both rows
  using SharedRandomBits = KeyRandomBits[kKeyParts];  // of this lane's keys
  using KeptWeights = uint32_t[kKeyParts];
  static_assert(kKeyGroup == kDropoutKeys);
  // S of a tile beside P V of the one before. Not where 128 keys are worth more.
  static constexpr bool kOverlapsPv = kKeyParts == 1;
  // A bias, asked for before S is waited for, takes registers that dropout needs.
  static constexpr bool kAsksForBias = !Config::kDrops;
  static constexpr bool kOnlyBias = Config::kOnlyBias, kOnlyMask = Config::kOnlyMask, kSingle = kOnlyBias || kOnlyMask;
  template <bool kBias>
  static constexpr bool kHasStep = !kBias || kAsksForBias;
  // Base 2. A bias that pads with -10000, or with the lowest number of float16, leaves stabilisers below it.
  static constexpr float kLowStabiliser = -8192.0f;
  // This warp updates the row stabilisers in the next tile; P of the tile before waits for its V; tiles may take steps;
  // a tile of a run that is left.
  static constexpr uint32_t kUpdatesRowMax = 1, kWaits = 2, kPipelined = 4, kRun = 8;

 public:
  __device__ __forceinline__ ForwardOptionsConsumer(const ForwardParams& p, const ForwardOptionsTerms& options,
                                                    ForwardOptionsStorage<Config>& storage, uint32_t s_tiles, int group,
                                                    int lane)
      : Base(p, options.terms, storage, s_tiles, group, lane, options.scale),
        options_(options),
        storage_(storage),
        s_bias_(s_tiles + Config::kBiasOffset + group * Config::kBiasSlots * Config::kBiasPartBytes) {
    if constexpr (Config::kDrops) draw_key_.seeds = uniform_seeds(p.dropout);
    if constexpr (kOnlyBias) s_lane_ = bias_part(0).lane_at();
    if constexpr (kOnlyMask) s_lane_ = bits_of_lane(warp_, lane_);
  }

  __device__ __forceinline__ void run() {
    WorkTileQueue<ForwardStorage<Config>> queue(storage_);
    while (WorkTile* const work_tile = queue.front()) {
      this->clear();
      visit(*work_tile);
      if (!work_tile->safe_path) look_for_failure(*work_tile);
      store(*work_tile);
      if (work_tile->met_non_finite) this->add_hidden_non_finite(*work_tile, p_);
      queue.pop(lane_);
    }
  }

 private:
  __device__ __forceinline__ void visit(const WorkTile& work_tile) {
    this->wait_for_query(work_tile);
    mode_ = kUpdatesRowMax;
    if constexpr (Config::kDrops) prepare_random_bits(work_tile);
    if (has_bias()) {
      visit_tiles<true>(work_tile);
    } else {
      visit_tiles<false>(work_tile);
    }
  }

  __device__ __forceinline__ bool has_bias() const { return kOnlyBias || (!kOnlyMask && options_.adds_bias); }

  /// A loop with a bias and one without: registers for what comes ahead of S would have to be cleared in each tile.
  template <bool kBias>
  __device__ __forceinline__ void visit_tiles(const WorkTile& work_tile) {
    if constexpr (kOverlapsPv) {
      visit_pipelined<kBias>(work_tile);
    } else {
      visit_sequentially<kBias>(work_tile);
    }
  }

  /// S and P of a tile, and then P V. That S of the next one waits so long leaves registers to the options; the other
  /// warpgroups have products meanwhile.
  template <bool kBias>
  __device__ __forceinline__ void visit_sequentially(const WorkTile& work_tile) {
    uint32_t flags;
#pragma unroll 1
    do {
      this->wait_for_keys();
      const TileMetadata metadata = storage_.k_metadata[k_at_.stage()];
      flags = metadata.flags;
      if (!metadata.visible(warpgroup_)) {
        pass();
        continue;
      }
      Weights p;
      softmax_tile<kBias>(p, work_tile, metadata);
      add_values(p);
    } while (!(flags & TileMetadata::kLast));
    release_query(work_tile);
  }

  template <bool kBias>
  __device__ __forceinline__ void visit_pipelined(const WorkTile& work_tile) {
    Weights p = {};  // or its registers are taken from one work tile to the next, as those of the bias in a step
    uint32_t flags;
#pragma unroll 1
    do {
      this->wait_for_keys();
      const TileMetadata metadata = storage_.k_metadata[k_at_.stage()];
      flags = metadata.flags;
      if (!kHasStep<kBias> || !(mode_ & kPipelined) || !metadata.is_full_for(warpgroup_)) {
        visit_alone<kBias>(p, work_tile, metadata);
      } else if constexpr (kHasStep<kBias>) {
        mode_ += metadata.run() * kRun;
        take_steps<kBias>(p);
      }
    } while (!(flags & TileMetadata::kLast));
    release_query(work_tile);
    if (mode_ & kWaits) add_values(p);
  }

  /// P V of the tile before, and then S and P of this one, if the warpgroup sees it.
  template <bool kBias>
  __device__ __forceinline__ void visit_alone(Weights& p, const WorkTile& work_tile, const TileMetadata& metadata) {
    if (mode_ & kWaits) add_values(p);
    if (!metadata.visible(warpgroup_)) return pass();
    mode_ = (mode_ & kUpdatesRowMax) | kWaits;
    softmax_tile<kBias>(p, work_tile, metadata);
    const bool may_pipeline = kHasStep<kBias> && (kSingle || !options_.scales_first) && !work_tile.safe_path;
    if (may_pipeline && !some_warp_updates_row_max()) mode_ |= kPipelined;
  }

  __device__ __forceinline__ void release_query(const WorkTile& work_tile) const {
    if (Config::kQuerySlots == 1 && work_tile.has_rows(warpgroup_)) release(storage_.q_empty[warpgroup_]);
  }

  /// Of the warpgroup: products are started by all four, so they take the same way to them.
  __device__ __forceinline__ bool some_warp_updates_row_max() const {
    return ptx::barrier_any<kWarpgroupThreads>(1 + warpgroup_, mode_ & kUpdatesRowMax);
  }

  __device__ __forceinline__ void release_keys() {
    release(storage_.k_empty[k_at_.stage()]);
    k_at_.advance();
  }

  __device__ __forceinline__ void pass() {
    __syncwarp();  // all lanes have read the note
    mode_ &= kUpdatesRowMax;
    release_keys();
    wait_for_values();
    release_values();
  }

  /// S and P of a tile, whatever the options.
  template <bool kBias>
  __device__ __forceinline__ void softmax_tile(Weights& p, const WorkTile& work_tile, const TileMetadata& metadata) {
    Scores s;
    uint32_t visible[kKeyParts][2] = {};
    BiasPairs bias;
    SharedRandomBits random_bits;
    if constexpr (Config::kDrops) ask_for_random_bits(random_bits);
    start_qk(s);
    const bool hides = look(metadata, visible);
    if constexpr (kBias && kAsksForBias) ask_for_bias(bias);
    ptx::wgmma_wait<0>();
    fence_operand(s);
    if constexpr (Config::kDrops) wait_for_random_bits(random_bits);
    release_keys();
    scale_first(s, work_tile, metadata, !kBias && !hides && this->is_full(work_tile, metadata.tile));
    if constexpr (kBias) {
      if (work_tile.safe_path) {
        add_bias<true>(s, bias);
      } else {
        add_bias<false>(s, bias);
      }
    }
    if (hides) hide_by_bits(s, visible);
    this->hide(s, work_tile, metadata.tile);
    float sum[2];
    if (mode_ & kUpdatesRowMax) {
      this->update_row_max(s);
      exponentiate<false, true>(s, this->scale_, stabiliser_, sum);
      if (!work_tile.safe_path && !some_stabiliser_is_low(work_tile)) mode_ ^= kUpdatesRowMax;
    } else {
      exponentiate<false>(s, this->scale_, stabiliser_, sum);
    }
    add_sums(s, sum, [&] {
      if constexpr (kBias) hide_by_bias(s);
    });
    if constexpr (kBias) release_bias();
    this->pack(p, s);
    if constexpr (Config::kDrops) {
      KeptWeights kept;
      draw(kept, random_bits);
      drop(p, kept);
    }
  }

  /// P V of the tile before.
  __device__ __forceinline__ void add_values(const Weights& p) {
    wait_for_values();
    start_pv(p);
    ptx::wgmma_wait<0>();
    fence_out();
    release_values();
  }

  /// What a step knows of its tile: of the bias before it begins, of masks before S is there.
  template <bool kBias>
  struct Terms {
    BiasPairs bias;
    uint32_t visible[kKeyParts][2];
    bool hides;
    bool v_came = false;  // V of the tile before
  };

  /// P V of the tile before, S and P of this one, and so on for a run of tiles, which the window leaves whole, and in
  /// which all rows have stabilisers. A warp waits for itself more than for products: each load from shared memory, and
  /// each look at a barrier, takes some 100 cycles, as products of the others hold them up. So they are asked for ahead
  /// of what a warp has to do anyway: a bias, and whether the next tile is there, a step ahead.
  template <bool kBias>
  __device__ __forceinline__ void take_steps(Weights& p) {
    Terms<kBias> terms;
    if constexpr (kBias) ask_for_bias(terms.bias);
#pragma unroll 1
    while (true) {
      Scores s;
      SharedRandomBits random_bits;
      if constexpr (Config::kDrops) ask_for_random_bits(random_bits);
      if constexpr (!kOnlyBias) ask_for_bits(terms.visible);
      const bool partly = !kOnlyBias && storage_.k_metadata[k_at_.stage()].partly(warpgroup_);
      start_qk(s);
      if (!terms.v_came) wait_for_values();
      start_pv(p);
      terms.hides = !kOnlyBias && __any_sync(~0u, partly && hide_something(terms.visible));
      ptx::wgmma_wait<1>();
      fence_operand(s);
      if constexpr (Config::kDrops) wait_for_random_bits(random_bits);
      release_keys();
      const bool goes_on = mode_ >= kRun;
      float sum[2];
      softmax_step(s, terms, sum);
      ptx::wgmma_wait<0>();
      fence_out();
      release_values();
      bool bias_came = false;
      const bool k_came = ptx::mbarrier_test(address(storage_.k_full[k_at_.stage()]), k_at_.parity());
      terms.v_came = ptx::mbarrier_test(address(storage_.v_full[v_at_.stage()]), v_at_.parity());
      if constexpr (kBias) bias_came = next_bias_came();
      KeptWeights kept;
      if constexpr (Config::kDrops) draw(kept, random_bits);
      add_sums(s, sum, [&] {
        if constexpr (kBias) hide_by_bias(s);
        if constexpr (kOnlyMask)
          if (terms.hides) hide_weights(s, terms.visible);  // else there are no bits of this tile
      });
      if constexpr (kBias) {
        release_bias();
        if (goes_on) ask_for_bias(terms.bias, bias_came);
      }
      this->pack(p, s);
      if constexpr (Config::kDrops) drop(p, kept);
      if (!goes_on) break;
      mode_ -= kRun;
      if (!k_came) this->wait_for_keys();
    }
  }

  /// That of the tile behind this one.
  __device__ __forceinline__ bool next_bias_came() const {
    static_assert(kKeyParts == 1);
    auto at = bias_at_;
    at.advance();
    return ptx::mbarrier_test(address(storage_.bias_full[warpgroup_][at.stage()]), at.parity());
  }

  /// Products to weights, and their sums. An option alone goes into the addend of the exponential's FMA, where the
  /// stabiliser is, so that what makes it stands between exponentials, which leave three of four issue slots.
  template <bool kBias>
  __device__ __forceinline__ void softmax_step(Scores& s, const Terms<kBias>& terms, float (&sum)[2]) const {
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = stabiliser_[r] == -INFINITY ? 0.0f : -stabiliser_[r];
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
      exponentiate<false>(s, this->scale_, stabiliser_, sum);
    }
  }

  /// What random bits of a tile's keys share, which came with K. Before products hold up shared memory.
  __device__ __forceinline__ void ask_for_random_bits(SharedRandomBits& random_bits) const {
    const KeyRandomBits* const s_keys = storage_.key_random_bits[k_at_.stage()] + lane_ % 4;
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) random_bits[part] = s_keys[4 * part];
  }

  /// Before K is released. What is made of them comes behind S, between the exponentials, which leave the time for it.
  __device__ __forceinline__ static void wait_for_random_bits(SharedRandomBits& random_bits) {
    uint32_t read = 0;
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) {
      random_bits[part].mixed = ptx::reread(random_bits[part].mixed);
      read ^= random_bits[part].mixed;
    }
    ptx::wait_for_loaded(read);
  }

  /// Here, and not where they are needed.
  __device__ __forceinline__ void draw(KeptWeights& kept, const SharedRandomBits& random_bits) const {
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part)
      kept[part] = ptx::reread(draw_kept_weights(p_.dropout.rule, draw_key_, query_random_bits_, random_bits[part]));
  }

  __device__ __forceinline__ static void drop(Weights& p, const KeptWeights& kept) {
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) keep_weights(p[step], kept[step / 4], step % 4);
  }

  /// Of the work tile.
  __device__ __forceinline__ void prepare_random_bits(const WorkTile& work_tile) {
    draw_key_.batch_head =
        static_cast<uint32_t>(work_tile.sequence.batch * static_cast<int>(p_.heads_q) + work_tile.sequence.head);
    const int first_row = work_tile.first_query + warpgroup_ * kWarpgroupRows + 16 * warp_;
    query_random_bits_ = QueryRandomBits::of(draw_key_, dropout_query_group(first_row + lane_ / 4));
  }

  /// The parts of this tile, behind a branch on the sum of what was made of them.
  __device__ __forceinline__ void release_bias() {
    static_assert(kKeyParts <= Config::kBiasSlots, "all parts of a tile are kept until now");
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) {
      release(storage_.bias_empty[warpgroup_][bias_at_.stage()]);
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

  __device__ __forceinline__ static void hide_weights(Scores& s, const uint32_t (&visible)[kKeyParts][2]) {
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

  __device__ __forceinline__ bool some_stabiliser_is_low(const WorkTile& work_tile) const {
    const TileCoordinates<false> at = this->coordinates(work_tile, 0);
    bool low = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) low |= stabiliser_[r] < kLowStabiliser && at.row(0, 2 * r) < work_tile.end_query;
    return __any_sync(~0u, low);
  }

  /// Takes the exponent of sums beyond the limit into the stabiliser, as long as a power of 2 can undo it. Else the sum
  /// becomes Inf, which look_for_failure() notices.
  __device__ __forceinline__ void lower(Scores& s, float (&sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = fmaxf(sum[r], __shfl_xor_sync(~0u, sum[r], 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const bool beyond = largest > kSumLimit && largest < kMostExponent;
      const float exponent = beyond ? floorf(log2f(largest)) : 0.0f, factor = ptx::exp2_approx(-exponent);
      stabiliser_[r] += exponent;
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

  /// As ForwardConsumer's. Rows that masks leave nothing of have no stabiliser; who found none was raised until the
  /// end, and so was who found a low one. Where there is a bias, the lowest of finite numbers may have been -inf.
  __device__ __forceinline__ void look_for_failure(WorkTile& work_tile) const {
    const TileCoordinates<false> at = this->coordinates(work_tile, 0);
    bool failed = false, overflowed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float trace = 0.0f;
#pragma unroll
      for (int d = 0; d < kD; ++d) trace = fmaf(0.0f, out_[d][2 * r], fmaf(0.0f, out_[d][2 * r + 1], trace));
      const int row = at.row(0, 2 * r);
      const bool exists = row < work_tile.end_query, met = trace != 0.0f;
      failed |= exists && met;
      overflowed |=
          exists && (Base::has_overflowed(row_sum_[r], met) || stabiliser_[r] > FixedStabiliser<Element>::kHighest ||
                     (stabiliser_[r] == -INFINITY && has_bias() && Base::sees_keys(work_tile, row)));
    }
    Base::record_failure(work_tile, failed, overflowed);
  }

  /// What masks leave of this lane's rows, which came with K; whether they hide something from this warp. That is asked
  /// before K is released: an arrival does not wait for loads under way, and TMA may then be faster.
  __device__ __forceinline__ bool look(const TileMetadata& metadata, uint32_t (&visible)[kKeyParts][2]) const {
    if (kOnlyBias || !metadata.partly(warpgroup_)) return false;
    ask_for_bits(visible);
    return __any_sync(~0u, hide_something(visible));
  }

  __device__ __forceinline__ static bool hide_something(const uint32_t (&visible)[kKeyParts][2]) {
    uint32_t all = 0xFFFFu;
    for (const auto& part : visible) all &= part[0] & part[1];
    return all != 0xFFFFu;
  }

  __device__ __forceinline__ void ask_for_bits(uint32_t (&visible)[kKeyParts][2]) const {
    constexpr int kPairBytes = sizeof(PairBits), kRowBytes = kPairBytes / kWarpgroupRows;
    const uint32_t s_bits = (kOnlyMask ? s_lane_ : bits_of_lane(rematerialise(warp_), rematerialise(lane_))) +
                            k_at_.stage() * Config::kBitsBytes;
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        visible[part][r] = ptx::load_shared_16(s_bits + part * kPairBytes + 8 * r * kRowBytes);
  }

  /// In the first stage.
  __device__ __forceinline__ uint32_t bits_of_lane(int warp, int lane) const {
    constexpr int kPairBytes = sizeof(PairBits), kRowBytes = kPairBytes / kWarpgroupRows;
    return this->s_tiles_ + Config::kBitsOffset + warpgroup_ * (kKeyParts * kPairBytes) +
           (16 * warp + lane / 4) * kRowBytes + lane % 4 * 2;
  }

  /// Products to scores, where a bias cannot be added to products. A bias may hide some, so it counts as if it did.
  __device__ __forceinline__ void scale_first(Scores& s, const WorkTile& work_tile, const TileMetadata& metadata,
                                              bool visible) const {
    if (kSingle || !options_.scales_first) return;
    const ScoreRules<Element> rules = this->rules(work_tile);
    scale_and_cap<Config::kCapsByProducts>(s, rules, options_.terms.softcap, visible);
    if (options_.adds_alibi) rules.add_alibi(s, this->coordinates(work_tile, metadata.tile));
  }

  /// As ldmatrix deals it out.
  __device__ __forceinline__ void ask_for_bias(BiasPairs& bias, bool came = false) const {
    auto at = bias_at_;
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) {
      if (!came) ptx::mbarrier_wait(address(storage_.bias_full[warpgroup_][at.stage()]), at.parity());
      const uint32_t s_lane =
          kOnlyBias ? s_lane_ + at.stage() * Config::kBiasPartBytes : bias_part(at.stage()).lane_at();
      BiasPart::load(bias[part], s_lane);
      at.advance();
    }
  }

  __device__ __forceinline__ bool is_half_bias() const {
    return kOnlyBias ? std::is_same_v<Element, __half> : p_.bias.dtype == DType::kFloat16;
  }

  /// kSafe: -inf hides even a score that is NaN, and nothing overflows.
  template <bool kSafe>
  __device__ __forceinline__ void add_bias(Scores& s, const BiasPairs& bias) const {
    is_half_bias() ? add_bias_of<__half, kSafe>(s, bias) : add_bias_of<__nv_bfloat16, kSafe>(s, bias);
  }

  template <class BiasElement, bool kSafe>
  __device__ __forceinline__ void add_bias_of(Scores& s, const BiasPairs& bias) const {
    const auto add = [this](float& x, float b) {
      x = fmaf(kSafe ? saturate_bias(b, options_.most_bias) : b, options_.bias_factor, x);
      if (kSafe && b == -INFINITY) x = -INFINITY;
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
    return {s_bias_ + slot * Config::kBiasPartBytes, p_.bias.row_stride == 0, rematerialise(warp_),
            rematerialise(lane_)};
  }

  /// As they come.
  template <class BiasElement, class F>
  __device__ __forceinline__ void add_parts(Scores& s, F add) const {
    auto at = bias_at_;
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) {
      ptx::mbarrier_wait(address(storage_.bias_full[warpgroup_][at.stage()]), at.parity());
      bias_part(at.stage()).template for_each<BiasElement>(s, 8 * part, add);
      at.advance();
    }
  }

  /// There are no registers for what would follow from it outside of the loop.
  __device__ __forceinline__ static int rematerialise(int x) { return ptx::reread(x); }

  /// Normalises the rows and writes them, from registers: shared memory is given to other things.
  __device__ __forceinline__ void store(const WorkTile& work_tile) {
    const int first_row = work_tile.first_query + warpgroup_ * kWarpgroupRows;
    if (first_row < work_tile.end_query) {
      float scale[2], lse[2];
      this->finish_rows(work_tile, scale, lse);
      this->store_lse(work_tile, first_row, lse);
      if constexpr (Config::kDrops) {
        scale[0] *= options_.keep_scale;
        scale[1] *= options_.keep_scale;
      }
      this->store_rows(work_tile, first_row, scale);
    }
    if (work_tile.has_rows(warpgroup_)) this->q_at_.advance();
  }

  const ForwardOptionsTerms& options_;
  ForwardOptionsStorage<Config>& storage_;
  const uint32_t s_bias_;  // of this warpgroup
  RingPosition<Config::kBiasSlots> bias_at_;
  uint32_t s_lane_;  // of an option alone: where this lane's share of it lies, in the first slot or stage
  uint32_t mode_;    // kUpdatesRowMax and so on
  RandomKey draw_key_;
  QueryRandomBits query_random_bits_;  // of this lane's rows
};

/// Where batch entries share what is read for each query and key, those of one head follow each other.
struct ForwardOptionsSchedule : ForwardSchedule {
  int batch, heads_q;
  bool batch_first;

  ForwardOptionsSchedule(const ForwardSchedule& schedule, const AttentionParams& p)
      : ForwardSchedule(schedule),
        batch(static_cast<int>(p.batch)),
        heads_q(static_cast<int>(p.heads_q)),
        batch_first(p.bias.data && p.bias.batch_stride == 0 && p.bias.head_stride != 0 && p.bias.row_stride != 0) {}

  __device__ __forceinline__ TileIndex locate(int64_t position) const {
    if (list) return list.locate(static_cast<int>(position));
    ForwardOptionsSchedule here = *this;
    // What follows from them is computed once a work tile: the producers lack the registers to keep it.
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
    forward_options_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardOptionsTerms options,
                           const __grid_constant__ ForwardMaps maps, const __grid_constant__ CUtensorMap bias_map,
                           const __grid_constant__ ForwardOptionsSchedule schedule) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<ForwardOptionsStorage<Config>*>(shared + Config::kTilesBytes);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) storage.init();
  __syncthreads();
  if (warp < kWarpgroupWarps) {
    ptx::release_registers<Config::kProducerRegisters>();
    const int lane = ptx::lane_id();  // of each role: the one with the fewest registers else takes it from all
    ForwardOptionsProducer<Config> producer(p, options, maps, bias_map, storage, shared, lane);
    if (warp == 0) {
      producer.load_keys();
    } else if (warp == 1) {
      producer.load_queries_and_bias();
    } else if (warp == 2) {
      producer.load_values();
    } else if (lane == 0) {
      producer.schedule_work_tiles(schedule);
    }
  } else {
    ptx::acquire_registers<Config::kRegisters>();
    ForwardOptionsConsumer<Config>(p, options, storage, ptx::shared_address(shared), warp / kWarpgroupWarps - 1,
                                   ptx::lane_id())
        .run();
  }
}

inline ForwardOptionsTerms forward_options_terms(const ForwardParams& p) {
  ForwardOptionsTerms options{ScoreTerms(p)};
  const float scale = static_cast<float>(p.softmax_scale) * kLog2E;
  options.adds_alibi = p.alibi_slopes != nullptr;
  options.adds_bias = p.bias.data != nullptr;
  options.scales_first = scales_first(p.softcap, options.adds_alibi, p.softmax_scale);
  options.scale = options.scales_first ? 1.0f : scale;
  options.bias_factor = kLog2E / options.scale;
  options.most_bias = most_bias(options.bias_factor);
  options.keep_scale = static_cast<float>(p.dropout.rule.keep_scale);
  return options;
}

template <class Config>
void launch_forward_options(const ForwardParams& p, const ForwardVisibility& visible, void* workspace,
                            cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(ForwardOptionsStorage<Config>);
  static_assert(kSharedBytes <= 227 * 1024, "a block can have no more");
  const WorkListPlan list = forward_work_list(p, Config::kBlockM);
  ForwardOptionsSchedule schedule = {schedule_forward<Config>(p, workspace), p};
  use_list(schedule, list, workspace);
  if (list.listed) {
    fill_work_list(p, list, schedule.list, stream);
  } else {
    clear_forward_workspace(workspace, stream);
  }
  ForwardOptionsTerms options = forward_options_terms(p);
  options.visible = visible;
  const CUtensorMap bias_map =
      options.adds_bias ? encode_bias_map(p, p.bias.row_stride == 0 ? 1 : kWarpgroupRows) : CUtensorMap{};
  launch("sm90/forward", forward_options_kernel<Config>,
         {dim3(forward_ctas<Config>(schedule)), dim3(Config::kThreads), kSharedBytes}, stream, p, options,
         encode_maps<Config>(p), bias_map, schedule);
}

template <class Element, int kHeadDim>
void run_forward_options(const ForwardParams& p, const ForwardVisibility& visible, void* workspace,
                         cudaStream_t stream) {
  const bool drops = p.dropout.rule.threshold > 0;
  const auto launch = [&](auto config) { launch_forward_options<decltype(config)>(p, visible, workspace, stream); };
  switch (forward_variant({drops, p.bias.data != nullptr, p.bias.dtype == p.dtype, p.mask.data || p.blocks.offsets,
                           forward_options_terms(p).scales_first})) {
    case ForwardVariant::kBias:
      return launch(ForwardOptionsConfig<Element, kHeadDim, ForwardVariant::kBias>());
    case ForwardVariant::kMask:
      return launch(ForwardOptionsConfig<Element, kHeadDim, ForwardVariant::kMask>());
    case ForwardVariant::kDropout:
      return launch(ForwardOptionsConfig<Element, kHeadDim, ForwardVariant::kDropout>());
    default:
      return launch(ForwardOptionsConfig<Element, kHeadDim, ForwardVariant::kGeneral>());
  }
}

}  // namespace flash_ext::sm90
