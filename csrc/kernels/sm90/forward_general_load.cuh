// The warps that load, in the general class of the forward: a list of tiles drives them, and says with each tile who
// visits it.
#pragma once

#include "../ptx/bulk.h"
#include "forward_load.cuh"
#include "forward_options.cuh"

namespace flash_ext::sm90 {

/// The tiles of a work that masks leave, from the last to the first. A warp looks at 32 at a time.
template <class Config>
class TileList {
 public:
  static constexpr int kParts = Config::kBlockN / kKeyGroup;  // of a tile

  __device__ __forceinline__ TileList(const ForwardVisibility& visible, const ForwardWork<Config>& work, int lane)
      : visible_(visible), work_(work), lane_(lane), first_(work.tiles.end - 1) {
    look();
    skip();
  }

  /// The next one. With no tile at all, one that nobody visits.
  __device__ __forceinline__ TileNote take() {
    if (!left_) return {0, TileNote::kLast};
    const int k = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    TileNote note = {first_ - k, __shfl_sync(~0u, mine_, k)};
    skip();
    if (!left_) note.flags |= TileNote::kLast;
    return note;
  }

  /// Places of a tile's parts, for a warpgroup's queries.
  __device__ __forceinline__ const int* places(int group, int tile) const {
    return visible_.row(work_.sequence.batch, work_.sequence.head, work_.first_query / kGroupRows + group) +
           tile * kParts;
  }

 private:
  __device__ __forceinline__ void look() {
    mine_ = flags_of(first_ - lane_);
    left_ = __ballot_sync(~0u, mine_ != 0);
  }

  __device__ __forceinline__ void skip() {
    while (!left_ && first_ - 32 >= work_.tiles.begin) {
      first_ -= 32;
      look();
    }
  }

  __device__ __forceinline__ uint32_t flags_of(int tile) const {
    if (tile < work_.tiles.begin) return 0;
    uint32_t flags = 0;
#pragma unroll
    for (int g = 0; g < Config::kGroups; ++g) {
      if (tile < work_.rows[g].begin || tile >= work_.rows[g].end) continue;
      const bool cut = tile < work_.rows[g].full_begin || tile >= work_.rows[g].full_end;
      flags |= (flag_of(g, tile) | static_cast<uint32_t>(cut) << TileNote::kCut) << g;
    }
    if (!(flags & TileNote::kAll)) return 0;
    const bool masked_carefully = work_.careful && visible_.places;
    if (!masked_carefully && !work_.is_cleaned(tile)) return flags;
    return flags | TileNote::kClean | TileNote::kAll << TileNote::kCut;
  }

  /// Those of a warpgroup 0.
  __device__ __forceinline__ uint32_t flag_of(int group, int tile) const {
    constexpr uint32_t kSeen = 1, kSeenPartly = 1 | 1u << TileNote::kPartly;
    if (!visible_.places) return kSeen;
    const int* const g_places = places(group, tile);
    bool none = true, all = true;
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      const int place = __ldg(g_places + k);
      none &= place == kNonePairs;
      all &= place == kAllPairs;
    }
    return none ? 0 : all ? kSeen : kSeenPartly;
  }

  const ForwardVisibility& visible_;
  const ForwardWork<Config>& work_;
  const int lane_;
  int first_;             // the tile of lane 0; that of the next lane is before it
  uint32_t mine_, left_;  // flags of this lane's; lanes whose tiles are to be visited
};

template <class Config>
class GeneralLoader : public ForwardLoader<Config> {
  using Base = ForwardLoader<Config>;
  using Base::address;
  using Base::lane_;
  using Base::p_;
  using Work = ForwardWork<Config>;
  using BiasRing = RingPosition<Config::kBiasSlots>[Config::kGroups];

 public:
  __device__ __forceinline__ GeneralLoader(const ForwardParams& p, const GeneralOptions& options,
                                           const ForwardMaps& maps, const CUtensorMap& bias_map,
                                           GeneralState<Config>& state, char* tiles, int lane)
      : Base(p, maps, state, tiles, lane),
        options_(options),
        bias_map_(bias_map),
        state_(state),
        s_bias_(ptx::shared_address(tiles) + Config::kBiasOffset),
        s_bits_(ptx::shared_address(tiles) + Config::kBitsOffset) {}

  /// K, bias and V of the tiles in the list.
  __device__ __forceinline__ void load_keys() {
    WorkQueue<ForwardState<Config>> queue(state_);
    RingPosition<Config::kKeyStages> at;  // of V too
    BiasRing bias_at;
    while (const Work* const work = queue.front()) {
      const Sequence& s = work->sequence;
      TileList<Config> list(options_.visible, *work, lane_);
      TileNote note;
      do {
        note = list.take();
        const int row = static_cast<int>(s.k_begin) + note.tile * Config::kBlockN;
        ptx::mbarrier_wait(address(state_.k_empty[at.stage()]), at.parity() ^ 1);
        load_bits(list, note, at.stage());
        if (lane_ == 0) {
          state_.k_notes[at.stage()] = note;
          load_tile<Base::kPanels>(note, this->maps_.k, state_.k_full[at.stage()],
                                   this->s_k_ + at.stage() * Config::kKeyBytes, row, s);
        }
        __syncwarp();
        if (options_.adds_bias) load_bias(*work, note, bias_at);
        ptx::mbarrier_wait(address(state_.v_empty[at.stage()]), at.parity() ^ 1);
        if (lane_ == 0) {
          state_.v_notes[at.stage()] = note;
          load_tile<Base::kValuePanels>(note, this->maps_.v, state_.v_full[at.stage()],
                                        this->s_v_ + at.stage() * Config::kValueBytes, row, s);
        }
        __syncwarp();
        at.advance();
      } while (!(note.flags & TileNote::kLast));
      if (lane_ == 0) ptx::mbarrier_arrive(address(state_.work_loaded));
      queue.pop(lane_);
    }
  }

  /// As ForwardLoader's, of the tiles in the list.
  __device__ __forceinline__ void clean_values() {
    WorkQueue<ForwardState<Config>> queue(state_);
    RingPosition<Config::kKeyStages> at;  // of V too
    while (const Work* const work = queue.front()) {
      uint32_t flags;
      do {
        ptx::mbarrier_wait(address(state_.v_full[at.stage()]), at.parity());
        const TileNote note = state_.v_notes[at.stage()];
        flags = note.flags;
        if (flags & TileNote::kClean) this->clean_tile(*work, note.tile, at.stage());
        __syncwarp();
        if (lane_ == 0) ptx::mbarrier_arrive(address(state_.v_empty[at.stage()]));
        at.advance();
      } while (!(flags & TileNote::kLast));
      queue.pop(lane_);
    }
  }

 private:
  /// By one lane. Of a tile that nobody visits, the barrier alone.
  template <int kCount>
  __device__ __forceinline__ void load_tile(const TileNote& note, const CUtensorMap& map, const uint64_t& full,
                                            uint32_t s_tile, int row, const Sequence& s) const {
    if (note.any()) {
      this->template load<kCount>(map, address(full), s_tile, Config::kBlockN, row, s.head_kv, s.batch,
                                  p_.seq.cu_seqlens_k);
    } else {
      ptx::mbarrier_arrive(address(full));
    }
  }

  /// Beside K: a lane brings a part. They are expected before the barrier's only arrival.
  __device__ __forceinline__ void load_bits(const TileList<Config>& list, const TileNote& note, int stage) const {
    constexpr int kParts = TileList<Config>::kParts;
    const int partly = __popc(note.flags >> TileNote::kPartly & TileNote::kAll);
    if (partly == 0) return;
    const uint32_t s_full = address(state_.k_full[stage]);
    if (lane_ == 0) ptx::mbarrier_expect(s_full, partly * kParts * static_cast<int>(sizeof(PairBits)));
    __syncwarp();
    const int group = lane_ / kParts;
    if (group >= Config::kGroups || !note.partly(group)) return;
    const int place = __ldg(list.places(group, note.tile) + lane_ % kParts);
    ptx::bulk_load(s_bits_ + stage * Config::kBitsBytes + lane_ * static_cast<int>(sizeof(PairBits)),
                   options_.visible.bits + place, sizeof(PairBits), s_full);
  }

  /// Of each warpgroup that visits the tile.
  __device__ __forceinline__ void load_bias(const Work& work, const TileNote& note, BiasRing& at) const {
    const ScoreView& bias = p_.bias;
    const bool one_row = bias.row_stride == 0;
    const int first_key = note.tile * Config::kBlockN;
    const int head = bias.head_stride ? work.sequence.head : 0, batch = bias.batch_stride ? work.sequence.batch : 0;
#pragma unroll
    for (int g = 0; g < Config::kGroups; ++g) {
      if (!note.visible(g)) continue;
      const int row = one_row ? 0 : work.first_query + g * kGroupRows;
#pragma unroll 1
      for (int key = first_key; key < first_key + Config::kBlockN; key += kPanelColumns) {
        const int slot = at[g].stage();
        ptx::mbarrier_wait(address(state_.bias_empty[g][slot]), at[g].parity() ^ 1);
        if (lane_ == 0) {
          const uint32_t s_full = address(state_.bias_full[g][slot]);
          ptx::mbarrier_arrive_expect(s_full, one_row ? kPanelRowBytes : Config::kBiasPartBytes);
          ptx::tma_load(s_bias_ + (g * Config::kBiasSlots + slot) * Config::kBiasPartBytes, &bias_map_, s_full,
                        bias.col_stride ? key : 0, row, head, batch);
        }
        __syncwarp();
        at[g].advance();
      }
    }
  }

  const GeneralOptions& options_;
  const CUtensorMap& bias_map_;
  GeneralState<Config>& state_;
  const uint32_t s_bias_, s_bits_;
};

}  // namespace flash_ext::sm90
