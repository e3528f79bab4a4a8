// Tiles, stages and registers of the forward, in one table that the plan reads too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/score/scale.h"
#include "kernels/sm90/common/warpgroup.h"

namespace flash_ext::sm90 {

struct HeadDims {
  int qk, v;

  constexpr bool serve(int64_t head_dim, int64_t head_dim_v) const { return head_dim <= qk && head_dim_v <= v; }
};

/// The head dims of q and k, and of v, that the forward is instantiated for; the first that serve a call do. Rows are
/// filled up by zeros in shared memory, never in the tensors.
constexpr HeadDims kForwardHeadDims[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};

/// The head dims of the variants with bias, masks or dropout.
constexpr HeadDims kForwardOptionsHeadDims[] = {{64, 64}, {128, 128}, {256, 256}};

/// The head dims of the variant of block masks.
constexpr HeadDims kForwardBlocksHeadDims[] = {{64, 64}, {128, 128}};

/// The head dims of the variant with max_logit.
constexpr HeadDims kForwardMaxLogitHeadDims[] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};

/// The head dims of the variant of caches.
constexpr HeadDims kForwardCacheHeadDims[] = {{64, 64}, {128, 128}, {256, 256}};

template <int kCount>
constexpr HeadDims first_that_serves(const HeadDims (&table)[kCount], int64_t head_dim, int64_t head_dim_v) {
  for (const HeadDims& dims : table)
    if (dims.serve(head_dim, head_dim_v)) return dims;
  return {};
}

/// Returns the head dims of the kernel that serves q and k of head_dim and v of head_dim_v. visible: of the variants
/// with bias, masks or dropout.
constexpr HeadDims forward_head_dims(int64_t head_dim, int64_t head_dim_v, bool visible = false) {
  return visible ? first_that_serves(kForwardOptionsHeadDims, head_dim, head_dim_v)
                 : first_that_serves(kForwardHeadDims, head_dim, head_dim_v);
}

struct ForwardShape {
  int warpgroups;  // consumer warpgroups
  int block_n;     // keys of a tile
  int key_stages;
  int value_stages;
  bool out_in_rings;       // out leaves through a stage of K and one of V, else through one of the two slots of Q
  int registers;           // of a consumer thread
  int producer_registers;  // of a producer thread
  // The variants with bias, masks or dropout: how many parts of a bias each warpgroup has room for, and whether out is
  // stored from registers, without room in shared memory. With dropout there may be fewer parts (ForwardConfig).
  int bias_slots = 0;
  bool stores_registers = false;
  int ctas_per_sm = 1;
  // S of a tile runs together with P V of the tile before; else one after the other, where registers have no room for
  // both.
  bool overlaps = true;
};

/// The shapes that a kernel may have: for many keys; for few keys, which fill smaller tiles better; for sequences of
/// few queries, which would leave warpgroups of a large CTA without rows; for few query tiles, which smaller ones
/// spread better over the SMs.
enum class ForwardTiles { kManyKeys, kFewKeys, kFewQueries, kFewTiles };

/// Whether a kernel has a shape of its own for such tiles.
constexpr bool has_tiles(const HeadDims& dims, ForwardTiles tiles) {
  if (tiles == ForwardTiles::kFewQueries) return dims.qk == 64 || dims.qk == 128;
  if (tiles == ForwardTiles::kFewTiles) return dims.qk == 128;
  return tiles == ForwardTiles::kManyKeys || dims.qk == 128 || dims.qk == 256;
}

/// Up to so many queries and keys, tiles for few queries are faster if they fill warpgroups better. Measured on H200.
constexpr int64_t most_of_few_queries(const HeadDims& dims) { return dims.qk == 64 ? 384 : 256; }

/// The cost of a key in tiles for few keys, as a multiple of its cost in tiles for many. Measured on H200.
constexpr double few_keys_cost(const HeadDims& dims) { return dims.qk == 256 ? 1.06 : 1.03; }

constexpr ForwardShape forward_shape(const HeadDims& dims, ForwardTiles tiles = ForwardTiles::kManyKeys) {
  switch (dims.qk) {
    case 64:
      // A sequence costs little more than its start and end. So a CTA has one warpgroup, and an SM four CTAs.
      if (tiles == ForwardTiles::kFewQueries) return {1, 64, 2, 2, false, 96, 32, 0, false, 4, false};
      // The exponentials are the bound; four warpgroups hide most of what a tile costs beside them.
      return {4, 64, 4, 4, false, 112, 32};
    case 96:  // a third stage is worth more than the 112 keys that registers allow, and short sequences fill 80 better
      return {3, 80, 3, 3, false, 160, 32};
    case 128:  // 64 registers of out, 40 of S, 20 of P and what addresses need are what three warpgroups can have
      // Few keys fill tiles of 64 better, and wait less for the first tile and the last.
      if (tiles == ForwardTiles::kFewKeys) return {3, 64, 4, 4, false, 160, 32};
      // One tile holds a sequence of up to 256 queries. More keys would take registers that four warpgroups lack.
      if (tiles == ForwardTiles::kFewQueries) return {4, 32, 6, 6, false, 112, 32, 0, false, 1, false};
      // Two warpgroups need wide tiles of keys to keep the tensor cores busy.
      if (tiles == ForwardTiles::kFewTiles) return {2, 128, 2, 2, false, 232, 40};
      return {3, 80, 3, 3, false, 160, 32};
    case 192:  // out takes 64 or 96 registers beside those of S, so two warpgroups
      if (dims.v <= 128) return {2, 128, 2, 2, true, 232, 40};
      // Memory of its own for out is worth more than 112 keys.
      return {2, 80, 2, 2, false, 232, 40};
    default:  // out takes 128 registers, so two warpgroups; shared memory has room for two stages of 80 keys
      if (tiles == ForwardTiles::kFewKeys) return {2, 64, 3, 2, true, 232, 40};
      return {2, 80, 2, 2, true, 232, 40};
  }
}

/// Keys of a part of a tile. Masks and biases come in such parts.
constexpr int kKeyGroup = 64;

/// Cycles of a query tile and a key tile: of their 16-bit products, or of the exponentials and the instructions around
/// them, which take longer at head_dim 64. kScoresPerCycle is 60 % of what the MUFU unit can do, 16
/// exponentials a cycle; long calls at head_dim 64 reach 64 % (docs/tuning/forward_sm90.md).
constexpr double tile_cycles(const ForwardShape& shape, const HeadDims& dims) {
  constexpr double kFlopPerCycle = 4096, kScoresPerCycle = 9.6;
  const double scores = 1.0 * shape.warpgroups * kWarpgroupRows * shape.block_n;
  return std::max(2.0 * scores * (dims.qk + dims.v) / kFlopPerCycle, scores / kScoresPerCycle);
}

/// What a variant of the forward can do. Each option costs registers, and its tests cost time between products.
enum class ForwardVariant {
  kPlain,          // products scaled by a positive number, within a window
  kScoreOptions,   // softcap, ALiBi, any scale
  kBias,           // a bias of the inputs' dtype (traverse_visible.cuh)
  kMask,           // masks
  kAllButDropout,  // all of these
  kDropout,        // all of these, and dropout
  kBlocks,         // a block mask alone, whose blocks are made of whole tiles (traverse_listed.cuh)
  kCache,          // plain, with keys in a cache: contiguous or in pages (CacheTiles)
  kMaxLogit,       // plain, and the largest score of each head of each batch entry
};

/// What a call of the variants with bias, masks or dropout asks for.
struct VariantOptions {
  bool drops, has_bias, has_bias_dtype_of_inputs, has_mask;  // a mask of any kind
  bool scales_first;                                         // scales_first()
};

/// Whether the variants with bias, masks or dropout scale scores before anything is added. Softcap and ALiBi need that,
/// and so does a scale that a bias cannot be divided by.
constexpr bool scales_first(double softcap, bool has_alibi, double softmax_scale) {
  return softcap > 0 || has_alibi || !is_normal_scale(softmax_scale);
}

constexpr ForwardVariant forward_variant(const VariantOptions& call) {
  if (call.drops) return ForwardVariant::kDropout;
  if (call.scales_first) return ForwardVariant::kAllButDropout;
  if (!call.has_bias) return ForwardVariant::kMask;
  return call.has_bias_dtype_of_inputs && !call.has_mask ? ForwardVariant::kBias : ForwardVariant::kAllButDropout;
}

/// The shape of the variants with bias, masks or dropout. Tiles consist of groups of 64 keys, in which masks and biases
/// come; out, P and S leave registers for the options. A third stage lets warpgroups wait less for each other than a
/// second slot of Q does.
constexpr ForwardShape forward_options_shape(const HeadDims& dims, ForwardVariant variant) {
  const bool alone = variant == ForwardVariant::kBias || variant == ForwardVariant::kMask;
  switch (dims.qk) {
    case 64:
      // A warp's own waits are the bound. So there is a fourth warpgroup where registers suffice.
      if (alone || variant == ForwardVariant::kDropout) return {4, 64, 4, 4, false, 112, 32, 3, true};
      return {3, 64, 4, 4, false, 160, 32, 4, true};
    case 128:
      return {3, 64, 3, 3, false, 160, 32, 3, true};
    default:
      return {2, 64, 2, 2, false, 232, 40, 2, true};
  }
}

/// The shape of the variant of block masks. A query tile lies within one row of blocks, so that both warpgroups visit
/// the key tiles listed for this row and no others. A tile of 192 queries would visit the tiles listed for two rows.
constexpr ForwardShape forward_blocks_shape(const HeadDims& dims) {
  // Two CTAs on an SM fill each other's waits, as four warpgroups of one do in the plain kernel.
  if (dims.qk == 64) return {2, 64, 4, 4, false, 104, 32, 0, false, 2, false};
  return {2, 64, 5, 5, false, 232, 40};
}

/// The fewest rows that TMA copies into a tile at a time: swizzled tiles are made of eight rows.
constexpr int kFewestRowsOfCopy = 8;

/// Rows of a page that TMA copies at a time: the largest power of two that divides pages and tiles.
constexpr int rows_of_copy(int block_n, int64_t page_size) {
  const int64_t common = page_size | block_n;
  return static_cast<int>(common & -common);
}

/// What decides whether the variant of block masks serves a call.
struct ForwardBlocksCall {
  int64_t block_m, block_n;  // 0: no block mask
  bool only_blocks;          // no bias, other mask, dropout, softcap, ALiBi, window; a normal scale
  bool equal_lengths;        // the host knows them all
  int64_t head_dim, head_dim_v;
};

constexpr bool lists_blocks(const ForwardBlocksCall& call) {
  const HeadDims dims = first_that_serves(kForwardBlocksHeadDims, call.head_dim, call.head_dim_v);
  if (call.block_m == 0 || dims.qk == 0 || !call.only_blocks || !call.equal_lengths) return false;
  const ForwardShape shape = forward_blocks_shape(dims);
  return call.block_m % (shape.warpgroups * kWarpgroupRows) == 0 && call.block_n % shape.block_n == 0;
}

}  // namespace flash_ext::sm90
