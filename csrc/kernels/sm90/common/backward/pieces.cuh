// Steps of a block mask's lists in the persistent kernel. A step consists of three pieces of 32 queries that follow
// each other in the list of a key tile, from any places of any heads of the group. It has the size of the persistent
// kernel's tiles, but blocks of 64 and 128 queries are whole numbers of pieces, so no step is half empty. The last step
// of a list may lack pieces.
#pragma once

#include <cstdint>

#include "kernels/common/backward/query_lists.h"
#include "kernels/common/mask/bits.cuh"
#include "kernels/ptx/reread.h"
#include "kernels/ptx/uniform.h"
#include "scheduler.cuh"
#include "steps.cuh"

namespace flash_ext::sm90 {

constexpr int kPieceQueries = 32;

/// Flags of a step.
enum BackwardPiecesFlags : int32_t {
  kPiecesHide = 1 << 30,       // some pair is hidden, or weights must be bounded
  kPiecesAreMasked = 1 << 29,  // a mask hides some pair, of queries and keys that exist
};

/// Metadata of a piece. tile: of 32 queries of its head, or kAbsent. dq: where its dQ^T lies, in pieces of a plane
/// (dq_of_plane) from the first of the group's first head. visible: as in ListedQueries. flags: of its step.
///
/// kTwoColumns: the key groups of a tile may lie in different columns of blocks. Else both have the same bits, and one
/// number says so: a second one costs 3 % of a step.
template <bool kTwoColumns>
struct BackwardPiece;
template <>
struct alignas(16) BackwardPiece<false> {
  int32_t tile_, visible_, dq_, flags_;

  __device__ __forceinline__ static int4 packed(int tile, const int4& entry, int dq, int flags, int /*piece*/) {
    return make_int4(tile, entry.z, dq, flags);
  }
  __device__ __forceinline__ static bool has_bits(const int4& entry) { return entry.z >= 0; }
  __device__ __forceinline__ int visible(int /*key_group*/) const { return visible_; }
  __device__ __forceinline__ int dq(int /*piece*/) const { return dq_; }
  __device__ __forceinline__ int flags() const { return flags_; }
};
/// Flags lie in the highest bits of dq of the first piece, which is never absent: shared memory has no room for more.
template <>
struct alignas(16) BackwardPiece<true> {
  int32_t tile_, dq_and_flags_, visible_[kListedKeyGroups];

  __device__ __forceinline__ static int4 packed(int tile, const int4& entry, int dq, int flags, int piece) {
    return make_int4(tile, piece == 0 ? dq | flags : dq, entry.z, entry.w);
  }
  __device__ __forceinline__ static bool has_bits(const int4& entry) { return (entry.z & entry.w) >= 0; }
  __device__ __forceinline__ int visible(int key_group) const { return visible_[key_group]; }
  __device__ __forceinline__ int dq(int piece) const {
    return piece == 0 ? dq_and_flags_ & ~(kPiecesHide | kPiecesAreMasked) : dq_and_flags_;
  }
  __device__ __forceinline__ int flags() const { return dq_and_flags_; }
};

/// What a consumer warp reads ahead of a step: its flags, and the lane's words of bits of each piece, as
/// QueryLists::visible has them.
template <class Config>
struct BackwardPieceBits {
  int32_t flags;
  uint2 of_piece[Config::kPieces];

  /// Marks all pairs of all pieces as visible.
  __device__ __forceinline__ void show_all() {
#pragma unroll
    for (uint2& bits : of_piece) bits = uint2{~0u, ~0u};
  }
};

/// Metadata of a step.
template <class Config>
struct BackwardPieces {
  static constexpr int32_t kAbsent = -1;  // a tile, or a place of dQ^T

  BackwardPiece<Config::kTwoColumns> pieces[Config::kPieces];

  __device__ __forceinline__ int flags() const { return pieces[0].flags(); }

  /// Issues the loads of the bits of this step, of the keys of a key group. `g_warp`: where those of the warp's 16 keys
  /// begin in a set of bits, of the first set.
  __device__ __forceinline__ void load_bits(BackwardPieceBits<Config>& bits, const uint2* g_warp, int key_group,
                                            int lane) const {
#pragma unroll
    for (int k = 0; k < Config::kPieces; ++k) {
      const int visible = ptx::uniform(pieces[k].visible(key_group));
      if (visible >= 0) bits.of_piece[k] = __ldg(g_warp + int64_t{visible} * kBitsOfKeyGroup + lane);
    }
  }

  /// Finds the pairs that are visible by these bits and by the ends of the sequences. `keys_left`: how many keys lie
  /// from the warp's first key to the end of the sequence. An absent piece has no visible pair, and nothing of it is
  /// computed.
  __device__ __forceinline__ void find_visible(uint32_t (&visible)[2], const BackwardPieceBits<Config>& bits,
                                               int seqlen_q, int keys_left, int lane) const {
    constexpr int kPieceBits = kPieceQueries / 8;  // of a piece in either half of a word, from the highest down
    constexpr uint32_t kAll = 0x10001u * (((1u << kPieceBits) - 1) << (16 - kPieceBits));
    const int at = ptx::reread(lane);
    visible[0] = visible[1] = 0;
#pragma unroll
    for (int k = 0; k < Config::kPieces; ++k) {
      const int tile = ptx::uniform(pieces[k].tile_);
      const int queries = tile < 0 ? 0 : seqlen_q - tile * kPieceQueries;
      const uint32_t exist = TransposedOrder::between(0, queries - 2 * (at % 4)) & kAll;
      visible[0] |= (exist & bits.of_piece[k].x) >> k * kPieceBits;
      visible[1] |= (exist & bits.of_piece[k].y) >> k * kPieceBits;
    }
    if (at / 4 >= keys_left) visible[0] = 0;
    if (at / 4 + 8 >= keys_left) visible[1] = 0;
  }
};

}  // namespace flash_ext::sm90
