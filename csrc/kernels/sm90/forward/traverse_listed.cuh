// The traversal of the key tiles that a block mask lists.
//
// The loop is the plain one (traverse_range.cuh), driven by a list. A query tile lies within one row of blocks. The
// producer walks the list of that row, so that K and V of the next blocks, and of the next query tile, are loaded
// while a block is computed. A full block sets the row stabilisers if it is the first one, and otherwise takes a step
// with a fixed row max. A block with a bitmap updates the row max. Query tiles come longest first
// (common/scheduler/longest_first.h).
#pragma once

#include "epilogue.cuh"

namespace flash_ext::sm90 {

template <class Config>
class TraverseListed : public ForwardEpilogue<Config> {
  using Base = ForwardEpilogue<Config>;
  using Base::kBlockN, Base::kN, Base::lane_, Base::p_, Base::stabiliser_, Base::warp_, Base::warpgroup_;
  using typename Base::Element, typename Base::Scores, typename Base::Weights;
  static constexpr int kWords = kBlockN / 32;
  // Tiles of a lower rank than this one, which come last, update the row max: see kUpdatesRowMaxInLast.
  static constexpr int kFixedBegin = Config::kUpdatesRowMaxInLast ? 1 : 0;

  /// The keys that a lane's two rows see, as words of a bitmap.
  struct Visible {
    uint32_t words[2][kWords];
  };

 public:
  using typename Base::WorkTile;

  __device__ __forceinline__ TraverseListed(const ForwardArguments<Config>& arguments,
                                            ForwardListedStorage<Config>& storage, uint32_t s_tiles, int group,
                                            int lane, float scale)
      : Base(arguments, storage, s_tiles, group, lane, scale), storage_(storage) {}

 protected:
  __device__ __forceinline__ void visit(const WorkTile& work_tile) {
    int rank = work_tile.tiles.end - 1;
    this->wait_for_query(work_tile);
    if (!work_tile.has_rows(warpgroup_)) {
      for (; rank >= 0; --rank) this->skip_tile();
    } else if (work_tile.safe_path) {
#pragma unroll 1
      for (; rank >= 0; --rank) {
        Weights p;
        this->wait_for_keys();
        softmax_tile<false, true>(p, work_tile, listed(), rank);
        this->add_values(p);
      }
    } else if constexpr (Config::kOverlaps) {
      visit_pipelined(work_tile, rank);
    } else {
      visit_sequentially(work_tile, rank);
    }
  }

  /// Adds non-finite values of V to the rows that see them. It looks at all keys: the lists say which rows see a key.
  __device__ __forceinline__ void add_hidden_non_finite(const WorkTile& work_tile) const {
    const Sequence& sequence = work_tile.sequence;
    const int first_row = work_tile.first_query + warpgroup_ * kWarpgroupRows;
    ptx::barrier_any<kWarpgroupThreads>(barrier_of_warpgroup(warpgroup_), false);  // out is written
    add_non_finite<Element, kWarpgroupThreads>(p_, sequence, query_rows<Element>(p_.out, sequence),
                                               key_rows<Element, false>(p_, p_.v, sequence), first_row,
                                               min(first_row + kWarpgroupRows, work_tile.end_query), 0,
                                               sequence.seqlen_k, static_cast<int>(threadIdx.x) % kWarpgroupThreads);
  }

 private:
  /// Computes S and P V of each tile one after the other; other warpgroups fill the waits.
  __device__ __forceinline__ void visit_sequentially(const WorkTile& work_tile, int rank) {
    bool has_stabilisers = false;
    while (rank >= 0) {
      Weights p;
      this->wait_for_keys();
      const ListedKeys keys = listed();
      softmax_tile<false>(p, work_tile, keys, rank);
      this->add_values(p);
      has_stabilisers |= keys.bitmap == ListedKeys::kFull;
      const int end = max(--rank - keys.run, kFixedBegin - 1);
      if (!has_stabilisers) continue;
#pragma unroll 1
      for (; rank > end; --rank) {
        this->wait_for_keys();
        Base::softmax_tile(work_tile, rank, p, [&](Scores& s) { fixed_softmax_step(s, work_tile, rank); });
        this->add_values(p);
      }
    }
  }

  __device__ __forceinline__ void visit_pipelined(const WorkTile& work_tile, int rank) {
    Weights p;
    this->wait_for_keys();
    ListedKeys keys = listed();
    softmax_tile<true>(p, work_tile, keys, rank);
    bool has_stabilisers = keys.bitmap == ListedKeys::kFull;
    for (--rank; rank >= 0;) {
      // Full tiles of a run need no metadata.
      if (has_stabilisers && keys.run > 0 && rank >= kFixedBegin) {
        const int end = max(rank - keys.run, kFixedBegin - 1);
#pragma unroll 1
        for (; rank > end; --rank) {
          this->wait_for_keys();
          Base::template step<true>(work_tile, rank, p, [&](Scores& s) { fixed_softmax_step(s, work_tile, rank); });
        }
        keys.run = 0;
        continue;
      }
      this->wait_for_keys();
      keys = listed();
      Visible visible;
      load_words(visible, work_tile, keys);
      Base::template step<false>(work_tile, rank, p,
                                 [&](Scores& s) { running_softmax_step<false>(s, work_tile, keys, visible); });
      has_stabilisers |= keys.bitmap == ListedKeys::kFull;
      --rank;
    }
    this->add_values(p);
  }

  /// The metadata of the tile whose K has arrived.
  __device__ __forceinline__ ListedKeys listed() const {
    const int4 keys = *reinterpret_cast<const int4*>(&storage_.listed_keys[this->k_at_.stage()]);
    return {keys.x, keys.y, keys.z, keys.w};
  }

  /// Computes S and P of a tile with a running row max. kFirst: the first tile visited. kRounds: see exponentiate().
  template <bool kFirst, bool kRounds = false>
  __device__ __forceinline__ void softmax_tile(Weights& p, const WorkTile& work_tile, const ListedKeys& keys,
                                               int rank) {
    Visible visible;
    load_words(visible, work_tile, keys);
    Base::softmax_tile(work_tile, rank, p,
                       [&](Scores& s) { running_softmax_step<kFirst, kRounds>(s, work_tile, keys, visible); });
  }

  /// Turns S of a full tile into P; the row stabilisers stay fixed.
  __device__ __forceinline__ void fixed_softmax_step(Scores& s, const WorkTile& work_tile, int rank) {
    this->template softmax_step<RowMaxUpdate::kNone>(s, work_tile, rank);
  }

  /// Turns S of a tile into P with a running row max.
  template <bool kFirst, bool kRounds = false>
  __device__ __forceinline__ void running_softmax_step(Scores& s, const WorkTile& work_tile, const ListedKeys& keys,
                                                       const Visible& visible) {
    float sum[2];
    if (keys.bitmap >= 0) hide_by_words(s, visible);
    if ((keys.tile + 1) * kBlockN > work_tile.sequence.seqlen_k)
      hide_outside_window(s, this->coordinates(work_tile, keys.tile), work_tile.sequence);
    this->template update_row_max<kFirst>(s);
    exponentiate<false, kRounds>(s, this->scale_, stabiliser_, sum);
    this->add_to_row_sums(sum);
  }

  /// Issues the loads of the bitmap words of this lane's rows, ahead of S.
  __device__ __forceinline__ void load_words(Visible& visible, const WorkTile& work_tile,
                                             const ListedKeys& keys) const {
    if (keys.bitmap < 0) return;
    const BlockMaskParams& blocks = p_.blocks;
    const int block_m = static_cast<int>(blocks.block_m), words = static_cast<int>(blocks.block_n) / 32;
    const int row = (work_tile.first_query + warpgroup_ * kWarpgroupRows) % block_m + warp_ * 16 + lane_ / 4;
    const int32_t* const g_row = blocks.bitmaps + (int64_t{keys.bitmap} * block_m + row) * words + keys.offset / 32;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int w = 0; w < kWords; ++w) visible.words[r][w] = static_cast<uint32_t>(__ldg(g_row + 8 * r * words + w));
  }

  __device__ __forceinline__ void hide_by_words(Scores& s, const Visible& visible) const {
    const int first = 2 * (lane_ % 4);
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!(visible.words[e / 2][n / 4] >> first >> (8 * (n % 4) + e % 2) & 1u)) s[0][n][e] = -INFINITY;
  }

 protected:
  ForwardListedStorage<Config>& storage_;
};

}  // namespace flash_ext::sm90
