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

/// Flags of a step. They have an array of their own, because shared memory has no room for a fourth int4 per step.
enum BackwardPiecesFlags : int32_t {
  kPiecesHide = 1,       // some pair is hidden, or weights must be bounded
  kPiecesAreMasked = 2,  // a mask hides some pair, of queries and keys that exist
};

/// Metadata of a piece.
struct alignas(16) BackwardPiece {
  static constexpr int32_t kAbsent = -1;

  int32_t tile;  // of 32 queries of its head, or kAbsent
  int32_t dq;    // where its dQ^T lies, in pieces of a plane (dq_of_plane) from the first of the group's first head
  int32_t visible[kListedKeyGroups];  // as in ListedQueries
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
  BackwardPiece pieces[Config::kPieces];

  /// Issues the loads of the bits of this step, of the keys of a key group. `g_warp`: where those of the warp's 16 keys
  /// begin in a set of bits, of the first set.
  __device__ __forceinline__ void load_bits(BackwardPieceBits<Config>& bits, const uint2* g_warp, int key_group,
                                            int lane) const {
#pragma unroll
    for (int k = 0; k < Config::kPieces; ++k) {
      const int visible = ptx::uniform(pieces[k].visible[key_group]);
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
      const int tile = ptx::uniform(pieces[k].tile);
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
