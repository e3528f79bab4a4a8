// What the warps of a CTA share for options of the pipelined loop, after the tiles: option_scores.cuh says when it is
// written. Wide heads take key_bias_of(), too.
#pragma once

#include "kernels/common/dropout/random_bits.cuh"
#include "kernels/common/mask/visibility.cuh"
#include "kernels/common/score/bias_rows.cuh"
#include "kernels/common/score/units.cuh"
#include "scheduler.cuh"
#include "storage.cuh"
#include "variant.h"

namespace flash_ext::sm90 {

/// Returns what a per-key bias (if has_bias) and a per-key mask (if has_mask) add to a key's scores, to base 2; -inf
/// where the mask hides the key.
__device__ __forceinline__ float key_bias_of(const BackwardParams& p, const Sequence& sequence, int key, bool has_bias,
                                             bool has_mask) {
  float x = 0.0f;
  if (has_bias) {
    const BiasRows bias(p.bias, sequence);
    bias.with_type([&](auto type) { x = bias.template load<decltype(type)>(0, key) * kLog2E; });
  }
  if (has_mask) {
    const MaskRows mask(p.mask, sequence);
    x = mask.data[key * mask.col_stride] ? x : -INFINITY;
  }
  return x;
}
/// The same for calls without a mask of pairs. kMaskAlone: if there is a bias, it is one of pairs.
template <bool kMaskAlone>
__device__ __forceinline__ float key_bias_of(const BackwardParams& p, const Sequence& sequence, int key) {
  return key_bias_of(p, sequence, key, !kMaskAlone && p.bias.data, p.mask.data);
}

/// What dropout needs: the words of kept weights of a step, in one slot, and the key from which random bits are
/// computed.
template <class Config, bool kDrops = Config::may_have(kStepDrops)>
struct BackwardKeptWords {
  __device__ __forceinline__ void init_kept() {}
  __device__ __forceinline__ void seed(const BackwardParams&, const Sequence&) {}
};
template <class Config>
struct BackwardKeptWords<Config, true> {
  __align__(16) RandomKey key;  // of head 0 of the batch entry: registers are short
  __align__(8) uint32_t kept[Config::kWarpgroups][KeptTile<Config::kBlockM>::kWordsOfGroup];
  uint64_t kept_full[Config::kWarpgroups], kept_empty[Config::kWarpgroups];  // of a warpgroup's words

  __device__ __forceinline__ void init_kept() {
    init_barriers(kept_full, kWarpgroupWarps);
    init_barriers(kept_empty, kWarpgroupWarps);
  }
  __device__ __forceinline__ void seed(const BackwardParams& p, const Sequence& sequence) {
    key = {philox_key(p.dropout.rng[0], p.dropout.rng[1]), static_cast<uint32_t>(sequence.batch * p.heads_q)};
  }
};

/// Bits of the keys of a tile that a per-key bias or mask leaves visible, for one head.
template <class Config, bool kHidesKeys = Config::may_have(kStepKeyBiased)>
struct BackwardVisibleKeys {};
template <class Config>
struct BackwardVisibleKeys<Config, true> {
  uint32_t visible_keys[Config::kKeySlots][Config::kBlockN / 32];
};

/// Whether shared memory holds what a per-key bias adds, to base 2, or 0 where it hides the key. Kept words leave no
/// room for it, nor do the two key tiles of a persistent CTA.
template <class Config>
constexpr bool kSharesKeyBias =
    Config::may_have(kStepKeyBiased) && !Config::may_have(kStepDrops) && !Config::kBiased && !Config::kPersistent;
template <class Config, bool kShares = kSharesKeyBias<Config>>
struct BackwardKeyBiases {
  __device__ __forceinline__ void set_key_bias(uint32_t, float) {}
};
template <class Config>
struct BackwardKeyBiases<Config, true> {
  float key_bias[Config::kBlockN];

  __device__ __forceinline__ void set_key_bias(uint32_t key, float bias) {
    key_bias[key] = bias == -INFINITY ? 0.0f : bias;
  }
};

}  // namespace flash_ext::sm90
