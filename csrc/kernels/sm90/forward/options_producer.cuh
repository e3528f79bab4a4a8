// The warps that load, in the forward's variant with options: a list of tiles drives them, and says with each tile who
// visits it.
#pragma once

#include "kernels/ptx/bulk.h"
#include "options.cuh"
#include "producer.cuh"

namespace flash_ext::sm90 {

/// The tiles of a work tile that masks leave, from the last to the first. A warp looks at 32 at a time. Each warp that
/// loads has its own, so that none of them waits for another. kFindsBits: it says where the bits of a mask stand.
template <class Config, bool kFindsBits = false>
class TileList {
 public:
  static constexpr int kKeyParts = Config::kKeyParts, kEntries = Config::kGroups * kKeyParts;  // of a tile

  __device__ __forceinline__ TileList(const ForwardVisibility& visible, const ForwardWorkTile<Config>& work_tile,
                                      int lane)
      : visible_(visible), work_tile_(work_tile), lane_(lane), first_(work_tile.tiles.end - 1) {
    look();
    skip();
  }

  /// The next one. With no tile at all, one that nobody visits.
  __device__ __forceinline__ TileMetadata take() {
    if (!left_) return {0, TileMetadata::kLast};
    const int k = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    TileMetadata metadata = {first_ - k, __shfl_sync(~0u, mine_, k)};
    if (kFindsBits && visible_.entries) {
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        const int entry = __shfl_sync(~0u, entries_[i], k);
        if (lane_ == i) entry_ = entry;
      }
    }
    metadata.flags |= run() << TileMetadata::kRun;
    skip();
    if (!left_) metadata.flags |= TileMetadata::kLast;
    return metadata;
  }

  /// Of the tile taken last: lane g * kKeyParts + k has the place of part k for warpgroup g, if that visits the tile.
  __device__ __forceinline__ int entry() const { return entry_; }

 private:
  __device__ __forceinline__ void look() {
    mine_ = flags_of(first_ - lane_);
    left_ = __ballot_sync(~0u, mine_ != 0);
    full_lanes_ = __ballot_sync(~0u, is_full(mine_));
  }

  /// But for masks, and for every warpgroup that has rows.
  __device__ __forceinline__ bool is_full(uint32_t flags) const {
    if (flags & (TileMetadata::kAll << TileMetadata::kPartial)) return false;
    for (int g = 0; g < Config::kGroups; ++g)
      if (work_tile_.has_rows(g) && !(flags >> g & 1)) return false;
    return true;
  }

  /// TileMetadata::run() of the tile taken last.
  __device__ __forceinline__ uint32_t run() const {
    const uint32_t partial = left_ & ~full_lanes_;
    const uint32_t before_partial = partial ? left_ & ((partial & -partial) - 1) : left_;
    // The last one that was looked at may be the last of the work tile.
    return max(__popc(before_partial) - (partial ? 0 : 1), 0);
  }

  __device__ __forceinline__ void skip() {
    while (!left_ && first_ - 32 >= work_tile_.tiles.begin) {
      first_ -= 32;
      look();
    }
  }

  __device__ __forceinline__ uint32_t flags_of(int tile) {
    if (tile < work_tile_.tiles.begin) return 0;
    uint32_t flags = 0;
#pragma unroll
    for (int g = 0; g < Config::kGroups; ++g) {
      if (tile < work_tile_.rows[g].begin || tile >= work_tile_.rows[g].end) continue;
      const bool partial = tile < work_tile_.rows[g].full_begin || tile >= work_tile_.rows[g].full_end;
      flags |= (flag_of(g, tile) | static_cast<uint32_t>(partial) << TileMetadata::kPartial) << g;
    }
    if (!(flags & TileMetadata::kAll)) return 0;
    const bool may_be_masked = work_tile_.sanitised && visible_.entries;
    return may_be_masked || work_tile_.is_sanitised(tile) ? flags | TileMetadata::kSanitised : flags;
  }

  /// Those of a warpgroup 0.
  __device__ __forceinline__ uint32_t flag_of(int group, int tile) {
    constexpr uint32_t kSeen = 1, kSeenPartly = 1 | 1u << TileMetadata::kPartly;
    if (!visible_.entries) return kSeen;
    const int* const g_entries = visible_.row(work_tile_.sequence.batch, work_tile_.sequence.head,
                                              work_tile_.first_query / kWarpgroupRows + group) +
                                 tile * kKeyParts;
    bool none = true, all = true;
#pragma unroll
    for (int k = 0; k < kKeyParts; ++k) {
      const int entry = __ldg(g_entries + k);
      if constexpr (kFindsBits) entries_[group * kKeyParts + k] = entry;
      none &= entry == kNonePairs;
      all &= entry == kAllPairs;
    }
    return none ? 0 : all ? kSeen : kSeenPartly;
  }

  const ForwardVisibility& visible_;
  const ForwardWorkTile<Config>& work_tile_;
  const int lane_;
  int first_;                                    // the tile of lane 0; that of the next lane is before it
  uint32_t mine_, left_;                         // flags of this lane's; lanes whose tiles are to be visited
  uint32_t full_lanes_;                          // lanes whose tiles need no note but for masks
  int entries_[kFindsBits ? kEntries : 1] = {};  // of this lane's tile
  int entry_ = 0;
};

template <class Config>
class ForwardOptionsProducer : public ForwardProducer<Config> {
  using Base = ForwardProducer<Config>;
  using Base::address;
  using Base::lane_;
  using Base::p_;
  using WorkTile = ForwardWorkTile<Config>;
  using List = TileList<Config>;
  using ListOfBits = TileList<Config, true>;

 public:
  __device__ __forceinline__ ForwardOptionsProducer(const ForwardParams& p, const ForwardOptionsTerms& options,
                                                    const ForwardMaps& maps, const CUtensorMap& bias_map,
                                                    ForwardOptionsStorage<Config>& storage, char* tiles, int lane)
      : Base(p, maps, storage, tiles, lane),
        options_(options),
        bias_map_(bias_map),
        storage_(storage),
        s_bias_(ptx::shared_address(tiles) + Config::kBiasOffset),
        s_bits_(ptx::shared_address(tiles) + Config::kBitsOffset) {}

  /// K of the tiles in the list, what masks leave of them, what their draws share, and the metadata.
  __device__ __forceinline__ void load_keys() {
    WorkTileQueue<ForwardStorage<Config>> queue(storage_);
    RingPosition<Config::kKeyStages> at;
    PhiloxKey seeds = {};
    if constexpr (Config::kDrops) seeds = uniform_seeds(p_.dropout);
    while (const WorkTile* const work_tile = queue.front()) {
      ListOfBits list(options_.visible, *work_tile, lane_);
      TileMetadata metadata;
      do {
        metadata = list.take();
        ptx::mbarrier_wait(address(storage_.k_empty[at.stage()]), at.parity() ^ 1);
        load_bits(metadata, list.entry(), at.stage());
        if constexpr (Config::kDrops) {
          if (lane_ < Config::kDrawsBits)
            storage_.key_random_bits[at.stage()][lane_] = KeyRandomBits::of(
                {seeds, head_of(*work_tile)}, static_cast<uint32_t>(metadata.tile * Config::kDrawsBits + lane_));
          __syncwarp();  // all of them come before the arrival
        }
        if (lane_ == 0) {
          storage_.k_metadata[at.stage()] = metadata;
          load_tile<Base::kPanels>(metadata, this->maps_.k, storage_.k_full[at.stage()],
                                   this->s_k_ + at.stage() * Config::kKeyBytes, work_tile->sequence);
        }
        __syncwarp();
        at.advance();
      } while (!(metadata.flags & TileMetadata::kLast));
      if (lane_ == 0) ptx::mbarrier_arrive(address(storage_.work_tile_loaded));
      queue.pop(lane_);
    }
  }

  /// V of the tiles in the list, which this warp sanitises where Inf and NaN may be hidden. Its own arrival says that
  /// it has done with a tile.
  __device__ __forceinline__ void load_values() {
    WorkTileQueue<ForwardStorage<Config>> queue(storage_);
    RingPosition<Config::kValueStages> at;
    while (WorkTile* const work_tile = queue.front()) {
      List list(options_.visible, *work_tile, lane_);
      TileMetadata metadata;
      do {
        metadata = list.take();
        const bool sanitised = metadata.flags & TileMetadata::kSanitised;
        ptx::mbarrier_wait(address(storage_.v_empty[at.stage()]), at.parity() ^ 1);
        if (lane_ == 0)
          load_tile<Base::kValuePanels>(metadata, this->maps_.v,
                                        (sanitised ? storage_.v_raw : storage_.v_full)[at.stage()],
                                        this->s_v_ + at.stage() * Config::kValueBytes, work_tile->sequence);
        __syncwarp();
        if (sanitised) this->sanitise_tile(*work_tile, metadata.tile, at.stage());
        __syncwarp();
        if (lane_ == 0) ptx::mbarrier_arrive(address(storage_.v_empty[at.stage()]));
        at.advance();
      } while (!(metadata.flags & TileMetadata::kLast));
      queue.pop(lane_);
    }
  }

  /// Q of each warpgroup when it has computed its last S, and then the parts of a bias.
  __device__ __forceinline__ void load_queries_and_bias() {
    static_assert(Config::kQuerySlots == 1 && !Config::kOutInShared);
    WorkTileQueue<ForwardStorage<Config>> queue(storage_);
    uint32_t parities = 0;  // bit g: of q_empty[g]
    // A lane loads a part of a tile for a warpgroup. They wait side by side: each look at a barrier takes as long as
    // products of others hold up shared memory.
    const int group = min(lane_ / Config::kKeyParts, Config::kGroups - 1), part = lane_ % Config::kKeyParts;
    RingPosition<Config::kBiasSlots> bias_at;
    for (int k = 0; k < part; ++k) bias_at.advance();
    while (const WorkTile* const work_tile = queue.front()) {
      load_queries(*work_tile, parities);
      if (options_.adds_bias) {
        List list(options_.visible, *work_tile, lane_);
        TileMetadata metadata;
        do {
          metadata = list.take();
          if (lane_ < Config::kGroups * Config::kKeyParts && metadata.visible(group)) {
            load_bias(*work_tile, group, metadata.tile * Config::kBlockN + part * kKeyGroup, bias_at);
#pragma unroll
            for (int k = 0; k < Config::kKeyParts; ++k) bias_at.advance();
          }
          __syncwarp();
        } while (!(metadata.flags & TileMetadata::kLast));
      }
      queue.pop(lane_);
    }
  }

 private:
  __device__ __forceinline__ uint32_t head_of(const WorkTile& work_tile) const {
    return static_cast<uint32_t>(work_tile.sequence.batch * static_cast<int>(p_.heads_q) + work_tile.sequence.head);
  }

  __device__ __forceinline__ void load_queries(const WorkTile& work_tile, uint32_t& parities) const {
    const Sequence& s = work_tile.sequence;
    const int first_row = static_cast<int>(s.q_begin) + work_tile.first_query;
#pragma unroll
    for (int g = 0; g < Config::kGroups; ++g) {
      if (!work_tile.has_rows(g)) continue;
      ptx::mbarrier_wait(address(storage_.q_empty[g]), (parities >> g & 1) ^ 1);
      parities ^= 1u << g;
      if (lane_ == 0) {
        this->template load<Base::kPanels>(this->maps_.q, address(storage_.q_full[g]),
                                           this->s_q_ + g * Config::kQueryBytes, kWarpgroupRows,
                                           first_row + g * kWarpgroupRows, s.head, s.batch, p_.seq.cu_seqlens_q);
      }
      __syncwarp();  // no lane falls behind by phases, whose parity repeats
    }
  }

  /// By one lane. Of a tile that nobody visits, the barrier alone.
  template <int kCount>
  __device__ __forceinline__ void load_tile(const TileMetadata& metadata, const CUtensorMap& map, const uint64_t& full,
                                            uint32_t s_tile, const Sequence& s) const {
    if (metadata.any()) {
      this->template load<kCount>(map, address(full), s_tile, Config::kBlockN,
                                  static_cast<int>(s.k_begin) + metadata.tile * Config::kBlockN, s.head_kv, s.batch,
                                  p_.seq.cu_seqlens_k);
    } else {
      ptx::mbarrier_arrive(address(full));
    }
  }

  /// Beside K: a lane loads a part. They are expected before the barrier's only arrival.
  __device__ __forceinline__ void load_bits(const TileMetadata& metadata, int entry, int stage) const {
    const int partly = __popc(metadata.flags >> TileMetadata::kPartly & TileMetadata::kAll);
    if (partly == 0) return;
    const uint32_t s_full = address(storage_.k_full[stage]);
    if (lane_ == 0) ptx::mbarrier_expect(s_full, partly * Config::kKeyParts * static_cast<int>(sizeof(PairBits)));
    __syncwarp();
    const int group = lane_ / Config::kKeyParts;
    if (group >= Config::kGroups || !metadata.partly(group)) return;
    ptx::bulk_load(s_bits_ + stage * Config::kBitsBytes + lane_ * static_cast<int>(sizeof(PairBits)),
                   options_.visible.bits + entry, sizeof(PairBits), s_full);
  }

  /// By one lane.
  __device__ __forceinline__ void load_bias(const WorkTile& work_tile, int group, int key,
                                            const RingPosition<Config::kBiasSlots>& at) const {
    const ScoreView& bias = p_.bias;
    const bool one_row = bias.row_stride == 0;
    const int slot = at.stage();
    const uint32_t s_full = address(storage_.bias_full[group][slot]);
    ptx::mbarrier_wait(address(storage_.bias_empty[group][slot]), at.parity() ^ 1);
    ptx::mbarrier_arrive_expect(s_full, one_row ? kPanelRowBytes : Config::kBiasPartBytes);
    ptx::tma_load(s_bias_ + (group * Config::kBiasSlots + slot) * Config::kBiasPartBytes, &bias_map_, s_full,
                  bias.col_stride ? key : 0, one_row ? 0 : work_tile.first_query + group * kWarpgroupRows,
                  bias.head_stride ? work_tile.sequence.head : 0, bias.batch_stride ? work_tile.sequence.batch : 0);
  }

  const ForwardOptionsTerms& options_;
  const CUtensorMap& bias_map_;
  ForwardOptionsStorage<Config>& storage_;
  const uint32_t s_bias_, s_bits_;
};

}  // namespace flash_ext::sm90
