// Variants, tiles and shared memory of the forward, in one place that the plan reads too.
#pragma once

#include <cstdint>

#include "kernels/common/score/scale.h"
#include "kernels/params.h"
#include "kernels/sm80/common/config.h"

namespace flash_ext::sm80 {

/// What a kernel can do. Each option costs registers, of which head dim 128 has none to spare, and the branches around
/// it cost time. So the options that cost the most have variants of their own, for calls with no other option. kReads
/// serves every call.
enum class ForwardVariant {
  kPlain,      // scaled products within a window
  kComputes,   // softcap, ALiBi, any scale; at head dim 256 dropout alone
  kReads,      // these, bias, masks, and keys in pages
  kBias,       // plain, and a bias of the type of q, in 16-byte chunks
  kFloatBias,  // plain, and a bias of floats, in 16-byte chunks
  kMask,       // plain, and a boolean mask, or a block mask of dense sequences that allows a grid of whole tiles
  kDrops,      // plain, and dropout
};

constexpr int kMaskRows = 32, kMaskKeys = 32;  // of a unit of a mask's bits (mask_bits.h)

/// The blocks of a block mask, and what decides whether it may become a grid (mask_bits.h).
struct BlockGridAsked {
  int64_t block_m, block_n;
  int64_t seqlen_k, head_dim;
};

/// Whether a block mask may become a grid of 4 bytes a block: each unit lies in one block (blocks have whole units of
/// keys), and the grid of a head is no larger than its queries in 16 bits, so that memory grows with the length alone.
constexpr bool allows_grid(const BlockGridAsked& mask) {
  return mask.block_m % kMaskRows == 0 && 2 * mask.seqlen_k <= mask.block_m * mask.block_n * mask.head_dim;
}

/// Whether what a warp sees of a tile of 64 keys lies in one block, too.
constexpr bool allows_grid_of_whole_tiles(const BlockGridAsked& mask) {
  return allows_grid(mask) && mask.block_n % (2 * kMaskKeys) == 0;
}

/// What a call asks for.
struct ForwardAsked {
  double softmax_scale, softcap;
  bool alibi, drops, mask, block_mask;
  BlockGridAsked grid;  // of the block mask
  bool packed, paged;
  bool bias, bias_in_chunks;  // of 16 bytes
  DType dtype, bias_dtype;
};

/// The variant that serves a call best.
constexpr ForwardVariant variant_of(const ForwardAsked& call) {
  const bool scaled = is_positive_scale(call.softmax_scale) && call.softcap == 0 && !call.alibi;
  const bool plain = scaled && !call.drops;
  const bool masked = call.mask || call.block_mask;
  if (call.paged || (call.bias && masked) || (call.mask && call.block_mask)) return ForwardVariant::kReads;
  if (call.bias) {
    // The bias is added to products, and for that divided by the scale, which must be normal.
    if (!plain || !call.bias_in_chunks || !is_normal_scale(call.softmax_scale)) return ForwardVariant::kReads;
    return call.bias_dtype == call.dtype        ? ForwardVariant::kBias
           : call.bias_dtype == DType::kFloat32 ? ForwardVariant::kFloatBias
                                                : ForwardVariant::kReads;
  }
  if (masked)
    return plain && (call.mask || (!call.packed && allows_grid_of_whole_tiles(call.grid))) ? ForwardVariant::kMask
                                                                                           : ForwardVariant::kReads;
  if (plain) return ForwardVariant::kPlain;
  // kComputes has dropout at head dim 256 alone, in the place of kDrops: at 128 it lacks registers for it.
  if (call.drops) return scaled ? ForwardVariant::kDrops : ForwardVariant::kReads;
  return ForwardVariant::kComputes;
}

/// The variant with branches that stands in for one with a single option.
constexpr ForwardVariant with_branches(ForwardVariant wanted) {
  switch (wanted) {
    case ForwardVariant::kBias:
    case ForwardVariant::kFloatBias:
    case ForwardVariant::kMask:
      return ForwardVariant::kReads;
    case ForwardVariant::kDrops:
      return ForwardVariant::kComputes;
    default:
      return wanted;
  }
}

/// The variant that is instantiated in place of the wanted one, for an element type and a head dim. Branches cost
/// little where a tile of scores takes long, as it does at head dim 256 and in float32.
constexpr ForwardVariant available_variant(ForwardVariant wanted, bool is_float, int head_dim) {
  const bool has_single_options = !is_float && head_dim <= 128;
  if (wanted == ForwardVariant::kFloatBias && head_dim != 64) return ForwardVariant::kReads;  // it lacks a register
  const ForwardVariant found = has_single_options ? wanted : with_branches(wanted);
  return is_float && found == ForwardVariant::kComputes ? ForwardVariant::kReads : found;
}

struct ForwardShape {
  int warps;
  int warp_rows;  // queries of a warp
  int block_n;    // keys of a tile
  int stages;     // of K

  constexpr int block_m() const { return warps * warp_rows; }
};

/// `small`: fits into the shared memory of every GPU.
constexpr ForwardShape forward_shape(int head_dim, bool is_float, ForwardVariant variant, bool small) {
  const bool wide = head_dim == 256, reads = variant == ForwardVariant::kReads;
  // 32 rows a warp halve the shared-memory reads of K and V per product; at 256 the accumulators leave no room for it.
  const int warp_rows = wide || (is_float && reads && head_dim == 128) ? 16 : 32;
  const int warps = is_float ? (wide && small ? 2 : 4) : wide && !small ? 8 : 4;
  const int block_n = is_float || (head_dim == 128 && reads) ? 32 : 64;
  // K of the next tile comes while P is computed and multiplied; at 64 that is too short a time.
  const int stages = (head_dim == 64 || (head_dim == 128 && reads)) && !is_float ? 2 : 1;
  return {warps, warp_rows, block_n, stages};
}

constexpr int kForwardWorkTileBytes = 384;  // a multiple of 128, to which tiles are aligned

/// Shared memory of a CTA in bytes, without what options need.
constexpr int forward_shared_bytes(const ForwardShape& shape, int head_dim, bool is_float) {
  const int row_bytes = head_dim * (is_float ? 4 : 2);
  return (shape.block_m() + 2 * shape.stages * shape.block_n) * row_bytes + kForwardWorkTileBytes;
}

/// Whether there is room for a tile of bias for each warp: else it is read element by element.
constexpr bool has_room_for_bias(const ForwardShape& shape, int shared_bytes, DType bias_dtype, int available) {
  const int row_bytes = bias_dtype == DType::kFloat32 ? shape.block_n * 4
                        : shape.block_n * 2 > 128     ? shape.block_n * 2
                                                      : 128;
  return shared_bytes + shape.block_m() * row_bytes <= available;
}

/// Whether a kernel has two shapes of CTAs: else the one there is fits into the shared memory of every GPU.
constexpr bool has_small_forward(int head_dim, bool is_float) {
  const ForwardShape large = forward_shape(head_dim, is_float, ForwardVariant::kPlain, false);
  return forward_shared_bytes(large, head_dim, is_float) > kSmallestSharedBytes;
}

/// At head dim 256 two CTAs of 64 queries on an SM beat one of 128, where an SM has the shared memory for them.
constexpr bool takes_small_forward(int head_dim, bool is_float, int shared_bytes_per_cta, int shared_bytes_per_sm) {
  constexpr int kReservedBytes = 1024;  // of an SM, for each CTA
  if (!has_small_forward(head_dim, is_float)) return false;
  const ForwardShape large = forward_shape(head_dim, is_float, ForwardVariant::kPlain, false);
  const ForwardShape small = forward_shape(head_dim, is_float, ForwardVariant::kPlain, true);
  const bool large_fits = shared_bytes_per_cta >= forward_shared_bytes(large, head_dim, is_float);
  const bool two_fit = shared_bytes_per_sm >= 2 * (forward_shared_bytes(small, head_dim, is_float) + kReservedBytes);
  return !large_fits || two_fit;
}

}  // namespace flash_ext::sm80
