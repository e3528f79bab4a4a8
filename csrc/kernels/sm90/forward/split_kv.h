// The tail wave of the work tiles that all see the same number of keys: where it would leave SMs idle, its work tiles
// are split along the keys, and what the parts find is merged by a kernel that follows (split_kv.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/host_device.h"
#include "kernels/params.h"
#include "shape.h"

namespace flash_ext::sm90 {

/// Works from number `whole` on are cut into `parts`: the first of `short_tiles` of keys, the others of `long_tiles`,
/// or what is left. The long parts stand before the short ones in the order of work.
struct SplitKv {
  int64_t unsplit;
  uint32_t work_tiles = 0;
  uint32_t parts = 1;
  int short_tiles = 0, long_tiles = 0;

  FLASH_EXT_HOST_DEVICE_MEMBER int64_t positions() const { return unsplit + int64_t{work_tiles} * parts; }
};

/// Cycles of a tile of queries and one of keys: products of 16 bits, or the exponentials and what goes with them, which
/// bind at head_dim 64.
constexpr double tile_cycles(const ForwardShape& shape, const HeadDims& dims) {
  constexpr double kFlopPerCycle = 4096, kScoresPerCycle = 9.6;
  const double scores = 1.0 * shape.groups * kWarpgroupRows * shape.block_n;
  return std::max(2.0 * scores * (dims.qk + dims.v) / kFlopPerCycle, scores / kScoresPerCycle);
}

/// Of `works`, each of which takes `tiles` tiles of keys, by `blocks` CTAs. With r work tiles left for the tail wave,
/// each is cut into as many equal parts as give no CTA two of them; if that is one, then so that a CTA that has no long
/// part ends with its short ones when the others end with their long one. Uncut where that would save less than merging
/// costs.
inline SplitKv split_tail_wave(int64_t work_tiles, int64_t tiles, int64_t blocks, double cycles_of_tile) {
  constexpr double kEndsCycles = 4500;    // of a work tile, besides its tiles: the first step, the last, and the store
  constexpr double kMergeCycles = 35000;  // of the call; measured on H200
  constexpr int64_t kMostParts = 16;
  const SplitKv unsplit_call{work_tiles};
  const int64_t rest = work_tiles % blocks;
  if (rest == 0) return unsplit_call;
  const int64_t idle = blocks - rest;
  int64_t parts = 2, short_tiles = 0, long_tiles = 0;
  if (rest <= idle) {
    long_tiles = (tiles + std::min(blocks / rest, kMostParts) - 1) / std::min(blocks / rest, kMostParts);
    if (long_tiles == 0) return unsplit_call;
    parts = (tiles + long_tiles - 1) / long_tiles;
    short_tiles = tiles - (parts - 1) * long_tiles;
  } else {
    const int64_t turns = (rest + idle - 1) / idle;  // of short parts
    const double ends = kEndsCycles / cycles_of_tile;
    short_tiles = static_cast<int64_t>((static_cast<double>(tiles) - static_cast<double>(turns - 1) * ends) /
                                       static_cast<double>(turns + 1));
    long_tiles = tiles - short_tiles;
  }
  if (static_cast<double>(tiles - long_tiles) * cycles_of_tile < kMergeCycles) return unsplit_call;
  return {work_tiles - rest, static_cast<uint32_t>(rest), static_cast<uint32_t>(parts), static_cast<int>(short_tiles),
          static_cast<int>(long_tiles)};
}

/// The shape whose tiles have so many keys.
constexpr ForwardShape forward_shape_with(const HeadDims& dims, int64_t block_n) {
  const ForwardShape few = forward_shape(dims, ForwardKeys::kFew);
  return few.block_n == block_n ? few : forward_shape(dims, ForwardKeys::kMany);
}

/// What the splits of a call follow from. It may be split where all work tiles see all keys, and no variant but kPlain
/// is needed.
struct SplitKvCall {
  int64_t seqlen_q, seqlen_k, heads;  // heads of all batch entries
  bool plain, window, known_lengths;
};

inline SplitKv split_forward(const SplitKvCall& call, const ForwardShape& shape, const HeadDims& dims,
                             int64_t num_sms) {
  const int64_t block_m = shape.groups * kWarpgroupRows;
  const int64_t work_tiles = (call.seqlen_q + block_m - 1) / block_m * call.heads;
  if (!call.plain || call.window || !call.known_lengths) return {work_tiles};
  return split_tail_wave(work_tiles, (call.seqlen_k + shape.block_n - 1) / shape.block_n, num_sms,
                         tile_cycles(shape, dims));
}

inline SplitKv split_forward(const AttentionParams& p, const ForwardShape& shape, const HeadDims& dims,
                             int64_t num_sms) {
  const bool plain = !has_score_options(p.softcap, p.alibi_slopes != nullptr, p.softmax_scale);
  const bool known_lengths =
      !p.seq.cu_seqlens_q && !p.seq.cu_seqlens_k && !p.seq.seqused_q && !p.seq.seqused_k && !p.seq.leftpad_k;
  const bool window = p.window.left >= 0 || p.window.right >= 0;
  return split_forward({p.seqlen_q, p.seqlen_k, p.batch * p.heads_q, plain, window, known_lengths}, shape, dims,
                       num_sms);
}

/// What a warp leaves of a part, in pieces of 16 bytes: its rows of out, their stabilisers and sums.
constexpr int part_pieces_of_warp(const HeadDims& dims) { return (dims.v / 8 + 1) * 32; }

/// The workspace holds the counter of the schedule, and the parts.
constexpr int64_t kPartsOffset = 128;

inline int64_t split_kv_workspace_bytes(const SplitKv& split, const ForwardShape& shape, const HeadDims& dims,
                                        int64_t num_sms) {
  constexpr int64_t kPieceBytes = 16;
  const int64_t part = int64_t{shape.groups} * kWarpgroupWarps * part_pieces_of_warp(dims) * kPieceBytes;
  if (split.work_tiles > 0) return kPartsOffset + int64_t{split.work_tiles} * split.parts * part;
  return split.unsplit > num_sms ? sizeof(unsigned long long) : 0;
}

}  // namespace flash_ext::sm90
