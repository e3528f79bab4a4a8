// What the options of a call do to the scores of a warp, and which tiles its masks leave.
#pragma once

#include "bias.cuh"
#include "dropout.cuh"
#include "kernels/common/score/bias_tile.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/ptx/reread.h"
#include "mask.cuh"
#include "storage.cuh"

namespace flash_ext::sm80 {

struct NoVisibility {};

template <class Config>
struct OptionTiles {
  using Element = typename Config::Element;
  using Unit = ScoreUnit<Element>;
  using WarpBias = std::conditional_t<Config::kOneBias,
                                      StartingBias<typename Config::BiasElement, Config::kWarpRows, Config::kBlockN>,
                                      BiasTile<Config::kWarpRows, Config::kBlockN>>;
  using Visibility =
      std::conditional_t<Config::kMasks, WarpVisibility<Config::kWarpRows, Config::kBlockN>, NoVisibility>;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;

  const ForwardParams& p;
  const ForwardConstants& constants;
  ForwardWorkTile<Config>& work_tile;
  uint32_t s_begin;  // of the CTA's shared memory
  int warp_row, lane;

  __device__ __forceinline__ TileCoordinates<false> coordinates(int tile) const {
    return TileCoordinates<false>::of_lane(work_tile.first_query + warp_row, tile * kBlockN, lane);
  }

  /// Sets the accumulators to what products are added to: 0, or the bias.
  template <int kM, int kN>
  __device__ __forceinline__ void start(float (&s)[kM][kN][4]) const {
    if constexpr (Config::kOneBias) {
      bias().fill(s, kLog2E * constants.per_unit);
    } else {
      for_each_score(s, [](float& x, int, int, int) { x = 0.0f; });
    }
  }

  /// Loads the bits of what the masks leave of a tile. The code between this call and the scores hides the latency.
  __device__ __forceinline__ void load_mask_bits(Visibility& visible, int tile) const {
    if constexpr (Config::kMasks) {
      if (Config::kOneMask || constants.masked)
        visible.template load<Config::kReads>(constants.masks, work_tile.masks, p.blocks, work_tile.sequence,
                                              work_tile.first_query, warp_row, tile * kBlockN, lane);
    }
  }

  /// Turns products into scores, except for two things: constants.scale, and the rows' part of ALiBi, which it returns.
  template <int kM, int kN>
  __device__ __forceinline__ AlibiOfRows apply(float (&s)[kM][kN][4], int tile, const Visibility& visible) const {
    AlibiOfRows terms;
    if constexpr (Config::kOptionBranches) {
      if (constants.caps) {
        for_each_score(s, [&](float& x, int, int, int) { x = softcap_tanh<Element>(x * constants.first_scale); });
        if (constants.scales_first)
          for_each_score(s, [&](float& x, int, int, int) { x = Unit::multiply(x, constants.cap); });
      } else if (constants.scales_first) {
        for_each_score(s, [&](float& x, int, int, int) { x = Unit::multiply(x, constants.first_scale); });
      }
      if (constants.adds_alibi) terms = add_alibi(s, tile);
    }
    if constexpr (Config::kReads) {
      if (constants.stages_bias) bias().add(s, Unit::kPerNatural * constants.per_unit);
      if (constants.reads_bias) work_tile.options.rules.add_bias(s, coordinates(tile));
      if (constants.masked) visible.hide(s);
    }
    if constexpr (Config::kOneMask) visible.hide(s);
    return terms;
  }

  /// How much ALiBi will lift keys that are nearer to the row than this tile's. A stabiliser that counts on it need not
  /// be updated tile by tile.
  __device__ __forceinline__ float alibi_to_come(int tile, int m, int r) const {
    if constexpr (Config::kOptionBranches) {
      if (work_tile.safe_path || !constants.adds_alibi) return 0.0f;
      const float slope = fmaxf(work_tile.options.rules.slope, 0.0f);
      const int i = work_tile.first_query + warp_row + 16 * m + 8 * r + lane / 4;
      const int nearest = max(i + work_tile.sequence.offset, work_tile.sequence.keys_begin(i));
      return slope * static_cast<float>(max(tile * kBlockN - nearest, 0));
    }
    return 0.0f;
  }

  /// Bounds the warp's bias of this tile, which has arrived, so that no score overflows by it. Natural scores do not
  /// overflow.
  __device__ __forceinline__ void saturate_bias() const {
    if constexpr (Config::kBiases && !Unit::kNatural) {
      if (!(Config::kOneBias || constants.stages_bias)) return;
      bias().saturate(constants.most_bias);
    }
  }

  /// Zeroes weights that a bias of -inf hides: it hides even a score that is NaN. Rare. True if it looked at the bias.
  template <int kM, int kN>
  __device__ __forceinline__ bool hide_by_bias(float (&weights)[kM][kN][4]) const {
    if constexpr (Config::kBiases) {
      const bool staged = Config::kOneBias || constants.stages_bias;
      if (staged) bias().hide(weights);
      return staged;
    }
    return false;
  }

  /// Whether a bias comes through shared memory. One that is read element by element is not saturated: that spills.
  __device__ __forceinline__ bool stages_bias() const {
    return Config::kOneBias || (Config::kReads && constants.stages_bias);
  }

  template <int kM, int kN>
  __device__ __forceinline__ void drop(float (&weights)[kM][kN][4], int tile) const {
    if constexpr (Config::kDropsByBranch) {
      if (constants.drops) work_tile.options.dropout.drop(weights, p.dropout.rule, coordinates(tile));
    }
  }

  /// Computes the part of the Philox random bits that all queries share for the keys of `tile`. The barrier that
  /// follows publishes it.
  __device__ __forceinline__ void share_random_bits(const PhiloxKey& seeds, int tile) const {
    if constexpr (Config::kOneDropout) WarpRandomBits<Config>::share(work_tile, seeds, s_random_bits(tile), tile);
  }
  __device__ __forceinline__ WarpRandomBits<Config> random_bits(const PhiloxKey& seeds, int tile) const {
    return {work_tile, seeds, s_random_bits(tile), ptx::reread(warp_row), ptx::reread(lane)};
  }

  /// Starts the copies of the warp's bias tile, once the warp has read the tile before. It does not wait for them.
  __device__ __forceinline__ void load_bias(const ForwardWorkTile<Config>& work_tile, int tile) const {
    if constexpr (Config::kBiases) {
      if (!(Config::kOneBias || constants.stages_bias) || tile < work_tile.tiles.begin) return;
      WarpBias next = bias();
      if constexpr (Config::kWide && Config::kFullPrecision) next.lane = ptx::reread(next.lane);
      next.load(work_tile.sequence, work_tile.first_query + warp_row, tile * kBlockN);
    }
  }

  __device__ __forceinline__ bool masked() const {
    if constexpr (Config::kReads) return constants.masked;
    return Config::kMasks;
  }

  /// Finds the next tile to visit, from `tile` down to `last`: one in which the masks leave something. `seen` must have
  /// the visible_tiles_of() the group of the tile visited before, or of `tile`; it then has those of the group of the
  /// tile found. Ends with a barrier.
  __device__ __forceinline__ int find(int tile, int last, uint32_t& seen) const {
    if constexpr (Config::kMasks) {
      if (masked()) tile = find_visible(tile, last, seen);
    }
    __syncthreads();
    return tile;
  }

  /// Finds the first tile to visit, and makes it the last of the CTA's range of tiles.
  __device__ __forceinline__ int find_first(uint32_t& seen) const {
    const int last = work_tile.tiles.end - 1;
    if (!masked()) return last;
    if constexpr (Config::kMasks) {
      if (last >= 0) seen = visible_tiles_of(last / 32);
    }
    const int found = find(last, work_tile.tiles.begin, seen);
    if (ptx::reread(static_cast<int>(threadIdx.x)) == 0) work_tile.tiles.end = found + 1;
    __syncthreads();
    return found;
  }

 private:
  /// The slot of a tile's random bits. Tiles use two slots in turn, as none of them is left out.
  __device__ __forceinline__ uint32_t s_random_bits(int tile) const {
    return s_begin + Config::kSharedBytes + (tile & 1) * Config::kRandomBytes;
  }
  __device__ __forceinline__ WarpBias bias() const {
    int bytes;
    if constexpr (Config::kOneBias) {
      bytes = WarpBias::kBytes;
    } else {
      bytes = p.bias.dtype == DType::kFloat32 ? WarpBias::kBytes32 : WarpBias::kBytes16;
    }
    return {s_begin + constants.bias_offset + warp_row / Config::kWarpRows * bytes, p.bias, lane};
  }
  __device__ __forceinline__ uint32_t visible_tiles_of(int group) const {
    return visible_tiles<kBlockM, kBlockN>(constants.masks, work_tile.masks, p.blocks, work_tile.sequence,
                                           work_tile.first_query, group, lane);
  }

  /// Does find()'s search. All threads find the same tile, without a barrier.
  __device__ __forceinline__ int find_visible(int tile, int last, uint32_t& seen) const {
    // In float32 there is no register to keep `seen` in.
    bool other_group = Config::kFloat || tile % 32 == 31;
#pragma unroll 1
    while (tile >= last) {
      if (other_group) seen = visible_tiles_of(tile / 32);
      const uint32_t left = seen & ~0u >> (31 - tile % 32);
      if (left) return tile - tile % 32 + 31 - __clz(static_cast<int>(left));
      tile = tile - tile % 32 - 1;
      other_group = true;
    }
    return tile;
  }

  /// Adds -slope * distance. On one side of the diagonal this is linear: the keys' part is added, the rows' part
  /// returned. Natural scores get both parts at once, because they are rounded once, as in the backward.
  template <int kM, int kN>
  __device__ __forceinline__ AlibiOfRows add_alibi(float (&s)[kM][kN][4], int tile) const {
    const TileCoordinates<false> at = coordinates(tile);
    const float per_key = work_tile.options.rules.slope;
    const int diagonal = work_tile.sequence.offset, first_key = tile * kBlockN;
    const int warp_query = work_tile.first_query + warp_row + diagonal;
    constexpr bool kOnce = Unit::kNatural;
    const bool before = first_key + kBlockN - 1 <= warp_query;
    const bool after = first_key >= warp_query + Config::kWarpRows - 1;
    const float first = static_cast<float>(at.first_row + diagonal - at.first_column);
    if (!kOnce && (before || after)) {
      const float slope = before ? per_key : -per_key, along = slope * constants.per_unit;
      for_each_score(s, [&](float& x, int, int n, int e) { x = fmaf(static_cast<float>(8 * n + e % 2), along, x); });
      return {-slope * first, slope};
    }
    AlibiOfLane<false>{per_key * constants.per_unit, first}.add(s);
    return {};
  }
};

}  // namespace flash_ext::sm80
