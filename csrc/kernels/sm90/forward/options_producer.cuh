// The warps that load, in the forward's variant with options: a list of tiles drives them, and says with each tile who
// visits it.
#pragma once

#include "kernels/ptx/bulk.h"
#include "options.cuh"
#include "producer.cuh"

namespace flash_ext::sm90 {

/// The tiles of a work that masks leave, from the last to the first. A warp looks at 32 at a time. Each warp that loads
/// has its own, so that none of them waits for another. kFindsBits: it says where the bits of a mask stand.
template <class Config, bool kFindsBits = false>
class TileList {
 public:
  static constexpr int kParts = Config::kParts, kPlaces = Config::kGroups * kParts;  // of a tile

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
    if (kFindsBits && visible_.places) {
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        const int place = __shfl_sync(~0u, places_[i], k);
        if (lane_ == i) place_ = place;
      }
    }
    note.flags |= run() << TileNote::kRun;
    skip();
    if (!left_) note.flags |= TileNote::kLast;
    return note;
  }

  /// Of the tile taken last: lane g * kParts + k has the place of part k for warpgroup g, if that visits the tile.
  __device__ __forceinline__ int place() const { return place_; }

 private:
  __device__ __forceinline__ void look() {
    mine_ = flags_of(first_ - lane_);
    left_ = __ballot_sync(~0u, mine_ != 0);
    whole_ = __ballot_sync(~0u, is_whole(mine_));
  }

  /// But for masks, and for every warpgroup that has rows.
  __device__ __forceinline__ bool is_whole(uint32_t flags) const {
    if (flags & (TileNote::kAll << TileNote::kCut)) return false;
    for (int g = 0; g < Config::kGroups; ++g)
      if (work_.has_rows(g) && !(flags >> g & 1)) return false;
    return true;
  }

  /// TileNote::run() of the tile taken last.
  __device__ __forceinline__ uint32_t run() const {
    const uint32_t cut = left_ & ~whole_;
    const uint32_t before_cut = cut ? left_ & ((cut & -cut) - 1) : left_;
    // The last one that was looked at may be the last of the work.
    return max(__popc(before_cut) - (cut ? 0 : 1), 0);
  }

  __device__ __forceinline__ void skip() {
    while (!left_ && first_ - 32 >= work_.tiles.begin) {
      first_ -= 32;
      look();
    }
  }

  __device__ __forceinline__ uint32_t flags_of(int tile) {
    if (tile < work_.tiles.begin) return 0;
    uint32_t flags = 0;
#pragma unroll
    for (int g = 0; g < Config::kGroups; ++g) {
      if (tile < work_.rows[g].begin || tile >= work_.rows[g].end) continue;
      const bool cut = tile < work_.rows[g].full_begin || tile >= work_.rows[g].full_end;
      flags |= (flag_of(g, tile) | static_cast<uint32_t>(cut) << TileNote::kCut) << g;
    }
    if (!(flags & TileNote::kAll)) return 0;
    const bool may_be_masked = work_.sanitised && visible_.places;
    return may_be_masked || work_.is_sanitised(tile) ? flags | TileNote::kSanitised : flags;
  }

  /// Those of a warpgroup 0.
  __device__ __forceinline__ uint32_t flag_of(int group, int tile) {
    constexpr uint32_t kSeen = 1, kSeenPartly = 1 | 1u << TileNote::kPartly;
    if (!visible_.places) return kSeen;
    const int* const g_places =
        visible_.row(work_.sequence.batch, work_.sequence.head, work_.first_query / kGroupRows + group) + tile * kParts;
    bool none = true, all = true;
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      const int place = __ldg(g_places + k);
      if constexpr (kFindsBits) places_[group * kParts + k] = place;
      none &= place == kNonePairs;
      all &= place == kAllPairs;
    }
    return none ? 0 : all ? kSeen : kSeenPartly;
  }

  const ForwardVisibility& visible_;
  const ForwardWork<Config>& work_;
  const int lane_;
  int first_;                                  // the tile of lane 0; that of the next lane is before it
  uint32_t mine_, left_;                       // flags of this lane's; lanes whose tiles are to be visited
  uint32_t whole_;                             // lanes whose tiles need no note but for masks
  int places_[kFindsBits ? kPlaces : 1] = {};  // of this lane's tile
  int place_ = 0;
};

template <class Config>
class GeneralLoader : public ForwardLoader<Config> {
  using Base = ForwardLoader<Config>;
  using Base::address;
  using Base::lane_;
  using Base::p_;
  using Work = ForwardWork<Config>;
  using List = TileList<Config>;
  using ListOfBits = TileList<Config, true>;

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

  /// K of the tiles in the list, what masks leave of them, what their draws share, and the notes.
  __device__ __forceinline__ void load_keys() {
    WorkQueue<ForwardState<Config>> queue(state_);
    RingPosition<Config::kKeyStages> at;
    PhiloxKey seeds = {};
    if constexpr (Config::kDrops) seeds = uniform_seeds(p_.dropout);
    while (const Work* const work = queue.front()) {
      ListOfBits list(options_.visible, *work, lane_);
      TileNote note;
      do {
        note = list.take();
        ptx::mbarrier_wait(address(state_.k_empty[at.stage()]), at.parity() ^ 1);
        load_bits(note, list.place(), at.stage());
        if constexpr (Config::kDrops) {
          if (lane_ < Config::kDraws)
            state_.key_draws[at.stage()][lane_] =
                KeyDraws::of({seeds, head_of(*work)}, static_cast<uint32_t>(note.tile * Config::kDraws + lane_));
          __syncwarp();  // all of them come before the arrival
        }
        if (lane_ == 0) {
          state_.k_notes[at.stage()] = note;
          load_tile<Base::kPanels>(note, this->maps_.k, state_.k_full[at.stage()],
                                   this->s_k_ + at.stage() * Config::kKeyBytes, work->sequence);
        }
        __syncwarp();
        at.advance();
      } while (!(note.flags & TileNote::kLast));
      if (lane_ == 0) ptx::mbarrier_arrive(address(state_.work_loaded));
      queue.pop(lane_);
    }
  }

  /// V of the tiles in the list, which this warp sanitises where Inf and NaN may be hidden. Its own arrival says that
  /// it has done with a tile.
  __device__ __forceinline__ void load_values() {
    WorkQueue<ForwardState<Config>> queue(state_);
    RingPosition<Config::kValueStages> at;
    while (Work* const work = queue.front()) {
      List list(options_.visible, *work, lane_);
      TileNote note;
      do {
        note = list.take();
        const bool sanitised = note.flags & TileNote::kSanitised;
        ptx::mbarrier_wait(address(state_.v_empty[at.stage()]), at.parity() ^ 1);
        if (lane_ == 0)
          load_tile<Base::kValuePanels>(note, this->maps_.v, (sanitised ? state_.v_raw : state_.v_full)[at.stage()],
                                        this->s_v_ + at.stage() * Config::kValueBytes, work->sequence);
        __syncwarp();
        if (sanitised) this->sanitise_tile(*work, note.tile, at.stage());
        __syncwarp();
        if (lane_ == 0) ptx::mbarrier_arrive(address(state_.v_empty[at.stage()]));
        at.advance();
      } while (!(note.flags & TileNote::kLast));
      queue.pop(lane_);
    }
  }

  /// Q of each warpgroup when it has computed its last S, and then the parts of a bias.
  __device__ __forceinline__ void load_queries_and_bias() {
    static_assert(Config::kPlaces == 1 && !Config::kOutInShared);
    WorkQueue<ForwardState<Config>> queue(state_);
    uint32_t parities = 0;  // bit g: of q_empty[g]
    // A lane brings a part of a tile for a warpgroup. They wait side by side: each look at a barrier takes as long as
    // products of others hold up shared memory.
    const int group = min(lane_ / Config::kParts, Config::kGroups - 1), part = lane_ % Config::kParts;
    RingPosition<Config::kBiasSlots> bias_at;
    for (int k = 0; k < part; ++k) bias_at.advance();
    while (const Work* const work = queue.front()) {
      load_queries(*work, parities);
      if (options_.adds_bias) {
        List list(options_.visible, *work, lane_);
        TileNote note;
        do {
          note = list.take();
          if (lane_ < Config::kGroups * Config::kParts && note.visible(group)) {
            load_bias(*work, group, note.tile * Config::kBlockN + part * kKeyGroup, bias_at);
#pragma unroll
            for (int k = 0; k < Config::kParts; ++k) bias_at.advance();
          }
          __syncwarp();
        } while (!(note.flags & TileNote::kLast));
      }
      queue.pop(lane_);
    }
  }

 private:
  __device__ __forceinline__ uint32_t head_of(const Work& work) const {
    return static_cast<uint32_t>(work.sequence.batch * static_cast<int>(p_.heads_q) + work.sequence.head);
  }

  __device__ __forceinline__ void load_queries(const Work& work, uint32_t& parities) const {
    const Sequence& s = work.sequence;
    const int first_row = static_cast<int>(s.q_begin) + work.first_query;
#pragma unroll
    for (int g = 0; g < Config::kGroups; ++g) {
      if (!work.has_rows(g)) continue;
      ptx::mbarrier_wait(address(state_.q_empty[g]), (parities >> g & 1) ^ 1);
      parities ^= 1u << g;
      if (lane_ == 0) {
        this->template load<Base::kPanels>(this->maps_.q, address(state_.q_full[g]),
                                           this->s_q_ + g * Config::kQueryBytes, kGroupRows, first_row + g * kGroupRows,
                                           s.head, s.batch, p_.seq.cu_seqlens_q);
      }
      __syncwarp();  // no lane falls behind by phases, whose parity repeats
    }
  }

  /// By one lane. Of a tile that nobody visits, the barrier alone.
  template <int kCount>
  __device__ __forceinline__ void load_tile(const TileNote& note, const CUtensorMap& map, const uint64_t& full,
                                            uint32_t s_tile, const Sequence& s) const {
    if (note.any()) {
      this->template load<kCount>(map, address(full), s_tile, Config::kBlockN,
                                  static_cast<int>(s.k_begin) + note.tile * Config::kBlockN, s.head_kv, s.batch,
                                  p_.seq.cu_seqlens_k);
    } else {
      ptx::mbarrier_arrive(address(full));
    }
  }

  /// Beside K: a lane brings a part. They are expected before the barrier's only arrival.
  __device__ __forceinline__ void load_bits(const TileNote& note, int place, int stage) const {
    const int partly = __popc(note.flags >> TileNote::kPartly & TileNote::kAll);
    if (partly == 0) return;
    const uint32_t s_full = address(state_.k_full[stage]);
    if (lane_ == 0) ptx::mbarrier_expect(s_full, partly * Config::kParts * static_cast<int>(sizeof(PairBits)));
    __syncwarp();
    const int group = lane_ / Config::kParts;
    if (group >= Config::kGroups || !note.partly(group)) return;
    ptx::bulk_load(s_bits_ + stage * Config::kBitsBytes + lane_ * static_cast<int>(sizeof(PairBits)),
                   options_.visible.bits + place, sizeof(PairBits), s_full);
  }

  /// By one lane.
  __device__ __forceinline__ void load_bias(const Work& work, int group, int key,
                                            const RingPosition<Config::kBiasSlots>& at) const {
    const ScoreView& bias = p_.bias;
    const bool one_row = bias.row_stride == 0;
    const int slot = at.stage();
    const uint32_t s_full = address(state_.bias_full[group][slot]);
    ptx::mbarrier_wait(address(state_.bias_empty[group][slot]), at.parity() ^ 1);
    ptx::mbarrier_arrive_expect(s_full, one_row ? kPanelRowBytes : Config::kBiasPartBytes);
    ptx::tma_load(s_bias_ + (group * Config::kBiasSlots + slot) * Config::kBiasPartBytes, &bias_map_, s_full,
                  bias.col_stride ? key : 0, one_row ? 0 : work.first_query + group * kGroupRows,
                  bias.head_stride ? work.sequence.head : 0, bias.batch_stride ? work.sequence.batch : 0);
  }

  const GeneralOptions& options_;
  const CUtensorMap& bias_map_;
  GeneralState<Config>& state_;
  const uint32_t s_bias_, s_bits_;
};

}  // namespace flash_ext::sm90
