// What the options of a call do to the scores of a warp, and which tiles its masks leave.
#pragma once

#include "../common/scores.cuh"
#include "../common/visibility.cuh"
#include "bias_tile.cuh"
#include "forward_work.cuh"
#include "mask_tile.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct OptionTiles {
  using Element = typename Config::Element;
  using Rules = ScoreRules<Element>;
  using WarpBias = BiasTile<Config::kWarpRows, Config::kBlockN>;
  using WarpMask = MaskTile<Config::kWarpRows, Config::kBlockN>;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kThreads = Config::kThreads;

  const ForwardParams& p;
  const ForwardSchedule& schedule;
  ForwardWork<Config>& work;
  uint32_t s_begin;  // of the block's shared memory
  int warp_row, lane;

  __device__ __forceinline__ TileCoordinates<false> coordinates(int tile) const {
    return TileCoordinates<false>::of_lane(work.first_query + warp_row, tile * kBlockN, lane);
  }

  /// Scores, but for the row terms that it returns and for schedule.scale. `words` is the tile's visibility.
  template <int kM, int kN>
  __device__ __forceinline__ RowTerms apply(float (&s)[kM][kN][4], MaskedTile at, int words) const {
    RowTerms terms;
    if constexpr (Config::kOptions) {
      if (schedule.caps) {
        for_each_score(s, [&](float& x, int, int, int) { x = Rules::tanh(x * schedule.first_scale); });
        if (schedule.scales_first) for_each_score(s, [&](float& x, int, int, int) { x *= schedule.cap; });
      } else if (schedule.scales_first) {
        for_each_score(s, [&](float& x, int, int, int) { x *= schedule.first_scale; });
      }
      if (schedule.adds_alibi) terms = add_alibi(s, at.tile);
    }
    if constexpr (Config::kReads) {
      if (schedule.stages_bias) bias().add(s, kLog2E * schedule.per_unit);
      if (schedule.reads_bias) work.options.rules.add_bias(s, coordinates(at.tile));
      if (at.partly) WarpMask::hide(s, visibility(words), schedule.stages_mask && p.mask.row_stride == 0, lane);
    }
    return terms;
  }

  /// How much ALiBi will lift keys that are nearer to the row than this tile's. A reference that counts on it need not
  /// be raised tile by tile.
  __device__ __forceinline__ float alibi_to_come(int tile, int m, int r) const {
    if constexpr (Config::kOptions) {
      if (work.careful || !schedule.adds_alibi) return 0.0f;
      const float slope = fmaxf(work.options.rules.slope, 0.0f);
      const int i = work.first_query + warp_row + 16 * m + 8 * r + lane / 4;
      const int nearest = max(i + work.sequence.offset, work.sequence.keys_begin(i));
      return slope * static_cast<float>(max(tile * kBlockN - nearest, 0));
    }
    return 0.0f;
  }

  /// A bias of -inf hides even a score that is NaN. Rare. True if it looked.
  template <int kM, int kN>
  __device__ __forceinline__ bool hide_by_bias(float (&weights)[kM][kN][4]) const {
    if constexpr (Config::kReads) {
      if (schedule.stages_bias) bias().hide(weights);
      return schedule.stages_bias;
    }
    return false;
  }

  template <int kM, int kN>
  __device__ __forceinline__ void drop(float (&weights)[kM][kN][4], int tile) const {
    if constexpr (Config::kOptions) {
      if (schedule.drops) work.options.dropout.drop(weights, coordinates(tile));
    }
  }

  /// Without waiting, once the warp is done with what was there.
  __device__ __forceinline__ void load_bias(int tile) const {
    if constexpr (Config::kReads) {
      if (schedule.stages_bias && tile >= work.tiles.begin)
        bias().load(work.sequence, work.first_query + warp_row, tile * kBlockN);
    }
  }

  __device__ __forceinline__ bool masked() const { return Config::kReads && schedule.masked; }

  /// The next tile to visit, from `tile` down to `last`: that is, in which the masks leave something. Its visibility is
  /// in `words`. All copies of this thread have landed. Ends with a barrier.
  __device__ __forceinline__ MaskedTile find(int tile, int last, int words) const {
    if constexpr (Config::kReads) {
      if (schedule.masked && tile >= last)
        return schedule.stages_mask ? find_by_bytes(tile, words) : find_by_words(tile, words);
    }
    __syncthreads();
    return {tile, false};
  }

  /// The first tile to visit, which the block's list of tiles ends with from here on.
  __device__ __forceinline__ MaskedTile find_first(int words) const {
    const int last = work.tiles.end - 1;
    if (!masked()) return {last, false};
    if (schedule.stages_mask) {
      load_mask(last);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
    }
    const MaskedTile found = find(last, work.tiles.begin, words);
    if (threadIdx.x == 0) work.tiles.end = found.tile + 1;
    __syncthreads();
    return found;
  }

 private:
  __device__ __forceinline__ WarpBias bias() const {
    const int bytes = p.bias.dtype == DType::kFloat32 ? WarpBias::kBytes32 : WarpBias::kBytes16;
    return {s_begin + schedule.bias_offset + warp_row / Config::kWarpRows * bytes, p.bias, lane};
  }
  __device__ __forceinline__ WarpMask mask() const {
    const int bytes = 2 * Config::kVisibilityBytes + warp_row / Config::kWarpRows * WarpMask::kBytes;
    return {s_begin + schedule.mask_offset + bytes, p.mask, lane};
  }
  /// Words of the warp's rows, of one of two tiles.
  __device__ __forceinline__ uint32_t* visibility(int words) const {
    auto* const all = static_cast<uint32_t*>(__cvta_shared_to_generic(s_begin + schedule.mask_offset));
    return all + (words & 1) * (Config::kVisibilityBytes / 4) + warp_row * WarpMask::kGroups;
  }
  __device__ __forceinline__ void load_mask(int tile) const {
    if (tile >= work.tiles.begin) mask().load(work.sequence, work.first_query + warp_row, tile * kBlockN);
  }

  /// The bytes of `tile` are there.
  __device__ __forceinline__ MaskedTile find_by_bytes(int tile, int words) const {
#pragma unroll 1
    while (true) {
      __syncwarp();
      const TileVisibility visible = mask().make_words(visibility(words));
      const bool any = __syncthreads_or(visible.any);
      load_mask(tile - 1);
      if (any) return {tile, !__all_sync(~0u, visible.all)};
      if (--tile < work.tiles.begin) return {tile, false};
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
    }
  }

  __device__ __forceinline__ MaskedTile find_by_words(int tile, int words) const {
    const Sequence& sequence = work.sequence;
    uint32_t* const of_warp = visibility(words);
    for (; tile >= work.tiles.begin; --tile) {
      const TileVisibility visible = build_visibility<kThreads, kBlockM, kBlockN>(
          of_warp - warp_row * WarpMask::kGroups, MaskRows(p.mask, sequence), BlockMaskRows(p.blocks, sequence),
          work.first_query, tile * kBlockN, sequence.seqlen_q, sequence.seqlen_k);
      if (!visible.any) continue;
      if (!visible.all) {
        for (int k = lane; k < Config::kWarpRows * WarpMask::kGroups; k += 32) of_warp[k] = in_lane_order(of_warp[k]);
        __syncwarp();
      }
      return {tile, !visible.all};
    }
    return {tile, false};
  }

  /// -slope * distance. On one side of the diagonal it is linear: the keys' part is added, the rows' part returned.
  template <int kM, int kN>
  __device__ __forceinline__ RowTerms add_alibi(float (&s)[kM][kN][4], int tile) const {
    const TileCoordinates<false> at = coordinates(tile);
    const float per_key = work.options.rules.slope;
    const int diagonal = work.sequence.offset, first_key = tile * kBlockN;
    const int warp_query = work.first_query + warp_row + diagonal;
    const bool before = first_key + kBlockN - 1 <= warp_query;
    const bool after = first_key >= warp_query + Config::kWarpRows - 1;
    const float first = static_cast<float>(at.first_row + diagonal - at.first_column);
    if (before || after) {
      const float slope = before ? per_key : -per_key, along = slope * schedule.per_unit;
      for_each_score(s, [&](float& x, int, int n, int e) { x = fmaf(static_cast<float>(8 * n + e % 2), along, x); });
      return {-slope * first, slope};
    }
    const float slope = per_key * schedule.per_unit;
    for_each_score(s, [&](float& x, int m, int n, int e) {
      x = fmaf(-slope, fabsf(first + static_cast<float>(16 * m + 8 * (e / 2) - 8 * n - e % 2)), x);
    });
    return {};
  }
};

}  // namespace flash_ext::sm80
