// Scores and weights of a key tile with a bias, masks and dropout, in a consumer warpgroup: what is loaded ahead of S,
// what is added or hidden, how row sums detect overflow, and what is dropped.
#pragma once

#include "epilogue.cuh"
#include "kernels/common/dropout/random_bits.cuh"
#include "kernels/common/mask/bits.cuh"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/load_shared.h"

namespace flash_ext::sm90 {

/// A part of a bias in shared memory: rows of 128 bytes with the swizzle of TMA, or one row for all queries.
struct BiasPart {
  uint32_t s_part;
  bool one_row;
  int warp, lane;

  __device__ __forceinline__ uint32_t row_at(int row) const { return s_part + (one_row ? 0 : row * kPanelRowBytes); }

  /// Loads the bias of the lane's scores: pairs[2 n + r] belongs to row r and keys [8 n, + 8). ldmatrix deals elements
  /// out to lanes as accumulators lie. `s_lane`: lane_at().
  __device__ __forceinline__ static void load(uint32_t (&pairs)[16], uint32_t s_lane) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) ptx::ldmatrix_x4(reinterpret_cast<uint32_t(&)[4]>(pairs[2 * n]), s_lane ^ (n << 4));
  }

  /// Calls f(x, b) for accumulators [first, + 8) and their bias.
  template <class Element, int kN, class F>
  __device__ __forceinline__ void for_each(float (&s)[1][kN][4], int first, F f) const {
    const uint32_t s_lane = lane_at();
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t pairs[4];
      ptx::ldmatrix_x4(pairs, s_lane ^ (n << 4));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 b = ptx::unpack2<Element>(pairs[e]);
        f(s[0][first + n + e / 2][e % 2 * 2], b.x);
        f(s[0][first + n + e / 2][e % 2 * 2 + 1], b.y);
      }
    }
  }

  /// The address of the row that this lane passes to ldmatrix.
  __device__ __forceinline__ uint32_t lane_at() const {
    const int row = 16 * warp + lane % 16, swizzle = one_row ? 0 : row & 7;
    return row_at(row) + ((lane / 16 ^ swizzle) << 4);
  }
};

/// Hides the pairs that are not visible. `visible`: the lane's bits of PairBits, for each of its two rows and 64 keys.
template <int kN, int kKeyParts>
__device__ __forceinline__ void hide_by_bits(float (&s)[1][kN][4], const uint32_t (&visible)[kKeyParts][2]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (!QuadOrder::sees(visible[n / 8][e / 2], n % 8, e % 2)) s[0][n][e] = -INFINITY;
}

template <class Config>
class ForwardOptionScores : public ForwardEpilogue<Config> {
  using Base = ForwardEpilogue<Config>;

 protected:
  using Base::k_at_, Base::kBlockN, Base::kD, Base::kN, Base::lane_, Base::out_, Base::p_, Base::release,
      Base::row_sum_, Base::stabiliser_, Base::warp_, Base::warpgroup_;
  using typename Base::Element, typename Base::Scores, typename Base::Weights;
  static constexpr int kKeyParts = Config::kKeyParts;
  // P must stay finite as an Element, l and out in float.
  static constexpr float kSumLimit = std::is_same_v<Element, __half> ? 0x1p14f : 0x1p60f;
  static constexpr float kMostExponent = 0x1p120f;
  using BiasPairs = uint32_t[kKeyParts][16];          // 64 keys of both rows
  using VisibleBits = uint32_t[kKeyParts][2];         // of this lane's keys, in both rows
  using SharedRandomBits = KeyRandomBits[kKeyParts];  // of this lane's keys
  using KeptWeights = uint32_t[kKeyParts];
  static_assert(kKeyGroup == kDropoutKeys);
  // Loading a bias ahead of S takes registers that dropout needs.
  static constexpr bool kPreloadsBias = !Config::kDrops;
  static constexpr bool kOnlyBias = Config::kOnlyBias, kOnlyMask = Config::kOnlyMask, kSingle = kOnlyBias || kOnlyMask;
  // In base 2. Where a bias pads with -10000, or with the lowest number of float16, stabilisers lie below this.
  static constexpr float kLowStabiliser = -8192.0f;

 public:
  using typename Base::WorkTile;

  __device__ __forceinline__ ForwardOptionScores(const ForwardArguments<Config>& arguments,
                                                 ForwardVisibleStorage<Config>& storage, uint32_t s_tiles, int group,
                                                 int lane, float scale)
      : Base(arguments, storage, s_tiles, group, lane, scale),
        options_(arguments.call.options),
        storage_(storage),
        s_bias_(s_tiles + Config::kBiasOffset + group * Config::kBiasSlots * Config::kBiasPartBytes) {
    if constexpr (Config::kDrops) random_key_.seeds = uniform_seeds(p_.dropout);
    if constexpr (kOnlyBias) s_lane_ = bias_part(0).lane_at();
    if constexpr (kOnlyMask) s_lane_ = bits_of_lane(warp_, lane_);
  }

  __device__ __forceinline__ bool has_bias() const { return kOnlyBias || (!kOnlyMask && options_.adds_bias); }

  /// As ForwardEpilogue's, except for rows with a low stabiliser or with none, which updated their row max until the
  /// end. A row with a low one does not fail. A row without one, of which masks leave nothing, fails only if there is a
  /// bias and the window has keys for it: the lowest finite bias may have become -inf.
  __device__ __forceinline__ void find_failures(WorkTile& work_tile) const {
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
          exists && (Base::has_overflowed(row_sum_[r]) || stabiliser_[r] > FixedStabiliser<Element>::kHighest ||
                     (stabiliser_[r] == -INFINITY && has_bias() && Base::sees_keys(work_tile, row)));
    }
    this->record_failures(work_tile, failed, overflowed);
  }

  /// Normalises the rows and writes them from registers: these variants have no shared memory for out.
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

 protected:
  /// Loads the terms of random bits that depend on the tile's keys alone; they arrived with K. It is called early,
  /// because products keep shared memory busy later.
  __device__ __forceinline__ void load_random_bits(SharedRandomBits& random_bits) const {
    const KeyRandomBits* const s_keys = storage_.key_random_bits[k_at_.stage()] + lane_ % 4;
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) random_bits[part] = s_keys[4 * part];
  }

  /// Waits until these terms are loaded. It must precede the release of K: an arrival does not wait for loads in
  /// flight. compute_kept() uses them later, between the exponentials, which leave issue slots free.
  __device__ __forceinline__ static void wait_for_random_bits(SharedRandomBits& random_bits) {
    uint32_t read = 0;
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) {
      random_bits[part].mixed = ptx::reread(random_bits[part].mixed);
      read ^= random_bits[part].mixed;
    }
    ptx::wait_for_loaded(read);
  }

  /// Decides which weights dropout keeps. ptx::reread() keeps the computation here: ptxas would move it to where the
  /// words are needed.
  __device__ __forceinline__ void compute_kept(KeptWeights& kept, const SharedRandomBits& random_bits) const {
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part)
      kept[part] = ptx::reread(draw_kept_weights(p_.dropout.rule, random_key_, query_random_bits_, random_bits[part]));
  }

  __device__ __forceinline__ static void drop(Weights& p, const KeptWeights& kept) {
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) keep_weights(p[step], kept[step / 4], step % 4);
  }

  /// The random bits that depend on a work tile and on no key.
  __device__ __forceinline__ void prepare_random_bits(const WorkTile& work_tile) {
    random_key_.batch_head =
        static_cast<uint32_t>(work_tile.sequence.batch * static_cast<int>(p_.heads_q) + work_tile.sequence.head);
    const int first_row = work_tile.first_query + warpgroup_ * kWarpgroupRows + 16 * warp_;
    query_random_bits_ = QueryRandomBits::of(random_key_, dropout_query_group(first_row + lane_ / 4));
  }

  /// Releases the bias of this tile. It comes after a branch on the row sums, which depend on all loads of the bias:
  /// an arrival does not wait for loads in flight.
  __device__ __forceinline__ void release_bias() {
    static_assert(kKeyParts <= Config::kBiasSlots, "all parts of a tile are kept until now");
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) {
      release(storage_.bias_empty[warpgroup_][bias_at_.stage()]);
      bias_at_.advance();
    }
  }

  /// Whether the bias of the next tile has arrived.
  __device__ __forceinline__ bool next_bias_arrived() const {
    static_assert(kKeyParts == 1);
    auto at = bias_at_;
    at.advance();
    return ptx::mbarrier_test(address(storage_.bias_full[warpgroup_][at.stage()]), at.parity());
  }

  /// Adds the row sums of a tile. If one is too large, hide() first zeroes the weights of hidden pairs, which may be
  /// NaN: adding -inf hides a score, unless the score is NaN. Then lower() moves the excess into the stabiliser.
  template <class Hide>
  __device__ __forceinline__ void add_sums(Scores& s, float (&sum)[2], Hide hide) {
    // Also true for Inf and NaN.
    if (__any_sync(~0u, !(sum[0] + sum[1] <= kSumLimit))) {
      hide();
      sum_up(s, sum);
      lower(s, sum);
    }
    row_sum_[0] += sum[0];
    row_sum_[1] += sum[1];
  }

  /// Sums the weights of each row, in the order of exponentiate().
  __device__ __forceinline__ static void sum_up(Scores& s, float (&sum)[2]) {
    sum[0] = sum[1] = 0.0f;
    for_each_score(s, [&](float& x, int, int, int e) { sum[e / 2] += x; });
  }

  __device__ __forceinline__ static void hide_weights(Scores& s, const VisibleBits& visible) {
    for_each_score(s, [&](float& x, int, int n, int e) {
      if (!QuadOrder::sees(visible[n / 8][e / 2], n % 8, e % 2)) x = 0.0f;
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

  /// Moves the exponent of row sums beyond the limit into the stabiliser, as long as a power of 2 can undo it.
  /// Otherwise the sum becomes Inf, which find_failures() detects.
  __device__ __forceinline__ void lower(Scores& s, float (&sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest = max_of_row(sum[r]);
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

  /// Loads the mask bits of this lane's rows, which arrived with K, and returns whether they hide a pair from this
  /// warp. The vote must come before K is released: an arrival does not wait for loads in flight, and TMA could
  /// overwrite the bits first.
  __device__ __forceinline__ bool load_bits_and_vote(const TileMetadata& metadata, VisibleBits& visible) const {
    if (kOnlyBias || !metadata.is_masked(warpgroup_)) return false;
    load_bits(visible);
    return __any_sync(~0u, hide_something(visible));
  }

  __device__ __forceinline__ static bool hide_something(const VisibleBits& visible) {
    uint32_t all = 0xFFFFu;
    for (const auto& part : visible) all &= part[0] & part[1];
    return all != 0xFFFFu;
  }

  __device__ __forceinline__ void load_bits(VisibleBits& visible) const {
    constexpr int kPairBytes = sizeof(PairBits), kRowBytes = kPairBytes / kWarpgroupRows;
    const uint32_t s_bits = (kOnlyMask ? s_lane_ : bits_of_lane(rematerialise(warp_), rematerialise(lane_))) +
                            k_at_.stage() * Config::kBitsBytes;
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        visible[part][r] = ptx::load_shared_16(s_bits + part * kPairBytes + 8 * r * kRowBytes);
  }

  /// The lane's mask bits in the first stage: their address in shared memory.
  __device__ __forceinline__ uint32_t bits_of_lane(int warp, int lane) const {
    constexpr int kPairBytes = sizeof(PairBits), kRowBytes = kPairBytes / kWarpgroupRows;
    return this->s_tiles_ + Config::kBitsOffset + warpgroup_ * (kKeyParts * kPairBytes) +
           (16 * warp + lane / 4) * kRowBytes + lane % 4 * 2;
  }

  /// Turns products into scores where a bias cannot be added to products. `visible`: no pair of the tile can be hidden;
  /// with a bias it is false, because a bias may hide pairs.
  __device__ __forceinline__ void scale_first(Scores& s, const WorkTile& work_tile, const TileMetadata& metadata,
                                              bool visible) const {
    if (kSingle || !options_.scales_first) return;
    const ScoreRules<Element> rules = this->rules(work_tile);
    scale_and_cap<Config::kCapsByProducts>(s, rules, options_.terms.softcap, visible);
    if (options_.adds_alibi) rules.add_alibi(s, this->coordinates(work_tile, metadata.tile));
  }

  /// Loads the bias as pairs, in the order in which ldmatrix deals them out. `arrived`: the bias is known to have
  /// arrived.
  __device__ __forceinline__ void load_bias(BiasPairs& bias, bool arrived = false) const {
    auto at = bias_at_;
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) {
      if (!arrived) ptx::mbarrier_wait(address(storage_.bias_full[warpgroup_][at.stage()]), at.parity());
      const uint32_t s_lane =
          kOnlyBias ? s_lane_ + at.stage() * Config::kBiasPartBytes : bias_part(at.stage()).lane_at();
      BiasPart::load(bias[part], s_lane);
      at.advance();
    }
  }

  __device__ __forceinline__ bool is_half_bias() const {
    return kOnlyBias ? std::is_same_v<Element, __half> : p_.bias.dtype == DType::kFloat16;
  }

  /// Adds the bias to products. kSafe: -inf hides even a score that is NaN, and nothing overflows.
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
    if constexpr (kPreloadsBias) {
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

  /// Calls add(x, b) for each score and its bias, which it reads part by part from shared memory.
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

  /// Keeps values that depend on x from being computed before the loop, which has no registers for them.
  __device__ __forceinline__ static int rematerialise(int x) { return ptx::reread(x); }

  const ForwardOptionsTerms& options_;
  ForwardVisibleStorage<Config>& storage_;
  const uint32_t s_bias_;  // of this warpgroup
  RingPosition<Config::kBiasSlots> bias_at_;
  uint32_t s_lane_;  // kSingle: the address of this lane's bias, or mask bits, in the first slot or stage
  RandomKey random_key_;
  QueryRandomBits query_random_bits_;  // of this lane's rows
};

}  // namespace flash_ext::sm90
