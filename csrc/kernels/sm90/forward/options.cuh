// What the options of a call do to the scores of a warp: the forward's variant with options.
#pragma once

#include "kernels/common/dropout/random_bits.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/load_shared.h"
#include "kernels/sm90/common/softmax.cuh"
#include "storage.cuh"
#include "visibility.h"

namespace flash_ext::sm90 {

/// Of the variant with options.
template <class Element, int kHeadDim_, ForwardVariant kVariant>
struct ForwardOptionsConfig : ForwardConfig<Element, kHeadDim_, kHeadDim_, kVariant> {
  using Base = ForwardConfig<Element, kHeadDim_, kHeadDim_, kVariant>;
  static constexpr int kKeyParts = Base::kBlockN / kKeyGroup;               // of a tile
  static constexpr int kDrawsBits = Base::kDrops ? Base::kBlockN / 16 : 1;  // groups of keys of Philox, in a tile
  // Room for what draws share comes from the bias.
  static constexpr int kBiasSlots = Base::kBiasSlots - (Base::kDrops && Base::kBiasSlots != 3 ? 1 : 0);
  static constexpr int kBitsOffset = Base::kBiasOffset + Base::kGroups * kBiasSlots * Base::kBiasPartBytes;
  static constexpr int kTilesBytes = kBitsOffset + Base::kKeyStages * Base::kBitsBytes;
};

/// What the host makes of a call. Kernels find it in constant memory.
struct ForwardOptionsTerms {
  ScoreTerms terms;
  // A product becomes a score to base 2 by `scale`. With softcap, with ALiBi, or where what is added cannot be divided
  // by it, that is done first, and `scale` is 1.
  float scale;
  float bias_factor;  // of a bias, which is added before `scale`
  float most_bias;    // of saturate_bias()
  float keep_scale;   // of dropout
  bool scales_first, adds_alibi, adds_bias;
  ForwardVisibility visible;
};

/// A tile of keys to visit: bit g says that warpgroup g does, bit kPartly + g that a mask hides some of it, bit
/// kPartial + g that the window does. From bit kRun on, how many of the tiles behind this one need no note but for
/// kPartly: but for masks, all rows see all of them, and none of them is the last of the work tile.
struct alignas(8) TileMetadata {  // one load, which the branch that K is release behind waits for
  static constexpr int kPartly = 8, kPartial = 16, kRun = 24;
  static constexpr uint32_t kAll = (1u << kPartly) - 1, kMostRun = 31, kSanitised = 1u << 30, kLast = 1u << 31;

  int tile;
  uint32_t flags;  // kSanitised: V is; kLast: of a work tile

  __device__ __forceinline__ bool any() const { return flags & kAll; }
  __device__ __forceinline__ bool visible(int group) const { return flags >> group & 1; }
  /// But for masks.
  __device__ __forceinline__ bool is_full_for(int group) const {
    return (flags >> group & (1u | 1u << kPartial)) == 1u;
  }
  __device__ __forceinline__ bool partly(int group) const { return flags >> (kPartly + group) & 1; }
  __device__ __forceinline__ int run() const { return static_cast<int>(flags >> kRun & kMostRun); }
};

/// What the warps of the variant with options share besides. Parts of a bias: 64 queries, 64 keys.
template <class Config>
struct ForwardOptionsStorage : ForwardStorage<Config> {
  uint64_t bias_full[Config::kGroups][Config::kBiasSlots], bias_empty[Config::kGroups][Config::kBiasSlots];
  TileMetadata k_metadata[Config::kKeyStages];                            // beside k_full
  KeyRandomBits key_random_bits[Config::kKeyStages][Config::kDrawsBits];  // with the metadata

  /// By one thread.
  __device__ __forceinline__ void init() {
    for (int g = 0; g < Config::kGroups; ++g)
      for (int k = 0; k < Config::kBiasSlots; ++k) {
        ptx::mbarrier_init(ptx::shared_address(&bias_full[g][k]), 1);
        ptx::mbarrier_init(ptx::shared_address(&bias_empty[g][k]), kWarpgroupWarps);
      }
    ForwardStorage<Config>::init();
  }
};

/// A part of a bias in shared memory: rows of 128 bytes with the swizzle of TMA, or one for all queries.
struct BiasPart {
  uint32_t s_part;
  bool one_row;
  int warp, lane;

  __device__ __forceinline__ uint32_t row_at(int row) const { return s_part + (one_row ? 0 : row * kPanelRowBytes); }

  /// Pairs 2 n + r: of row r and keys [8 n, + 8). ldmatrix deals them out as accumulators lie. `s_lane`: lane_at().
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

  /// Of the row that this lane names to ldmatrix.
  __device__ __forceinline__ uint32_t lane_at() const {
    const int row = 16 * warp + lane % 16, swizzle = one_row ? 0 : row & 7;
    return row_at(row) + ((lane / 16 ^ swizzle) << 4);
  }
};

/// By what a lane has of PairBits: 64 keys of each of its two rows.
template <int kN, int kKeyParts>
__device__ __forceinline__ void hide_by_bits(float (&s)[1][kN][4], const uint32_t (&visible)[kKeyParts][2]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (!(visible[n / 8][e / 2] >> (2 * (n % 8) + e % 2) & 1u)) s[0][n][e] = -INFINITY;
}

}  // namespace flash_ext::sm90
