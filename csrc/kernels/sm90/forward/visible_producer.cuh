// The producer warps of the variants with bias, masks or dropout. A list of key tiles drives them; metadata with each
// tile says which warpgroups visit it.
#pragma once

#include "kernels/common/dropout/random_bits.cuh"
#include "kernels/ptx/bulk.h"
#include "producer.cuh"
#include "visible_tiles.cuh"

namespace flash_ext::sm90 {

template <class Config>
class ForwardVisibleProducer : public ForwardProducer<Config> {
  using Base = ForwardProducer<Config>;
  using Base::lane_, Base::p_;
  using WorkTile = ForwardWorkTile<Config>;
  using List = VisibleTiles<Config>;
  using ListOfBits = VisibleTiles<Config, true>;

 public:
  __device__ __forceinline__ ForwardVisibleProducer(const ForwardArguments<Config>& arguments,
                                                    ForwardVisibleStorage<Config>& storage, char* tiles, int lane)
      : Base(arguments, storage, tiles, lane),
        options_(arguments.call.options),
        bias_map_(arguments.maps.bias),
        storage_(storage),
        s_bias_(ptx::shared_address(tiles) + Config::kBiasOffset),
        s_bits_(ptx::shared_address(tiles) + Config::kBitsOffset) {}

 private:
  friend Base;

  /// Warp 0: loads K and mask bits of the listed tiles. It writes their metadata and, with dropout, the terms of random
  /// bits that depend on keys alone.
  __device__ __forceinline__ void run_keys() {
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
          if (lane_ < Config::kRandomKeyGroups)
            storage_.key_random_bits[at.stage()][lane_] = KeyRandomBits::of(
                {seeds, head_of(*work_tile)}, static_cast<uint32_t>(metadata.tile * Config::kRandomKeyGroups + lane_));
          __syncwarp();  // all writes come before the arrival
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

  /// Warp 2: loads V of the listed tiles and sanitises it where Inf and NaN may be hidden. When it has finished a tile,
  /// it arrives at v_empty as consumers do.
  __device__ __forceinline__ void run_values() {
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
        arrive_as_warp(storage_.v_empty[at.stage()], lane_);
        at.advance();
      } while (!(metadata.flags & TileMetadata::kLast));
      queue.pop(lane_);
    }
  }

  /// Warp 1: loads Q of each warpgroup once the warpgroup has computed its last S of the work tile before. Then it
  /// loads the parts of a bias.
  __device__ __forceinline__ void run_queries() {
    static_assert(Config::kQuerySlots == 1 && !Config::kOutInShared);
    WorkTileQueue<ForwardStorage<Config>> queue(storage_);
    uint32_t parities = 0;  // bit g: of q_empty[g]
    // Each lane loads one part of a tile for one warpgroup. Lanes test barriers side by side, because a test takes long
    // while products keep shared memory busy.
    const int group = min(lane_ / Config::kKeyParts, Config::kWarpgroups - 1), part = lane_ % Config::kKeyParts;
    RingPosition<Config::kBiasSlots> bias_at;
    for (int k = 0; k < part; ++k) bias_at.advance();
    while (const WorkTile* const work_tile = queue.front()) {
      load_queries(*work_tile, parities);
      if (options_.adds_bias) {
        List list(options_.visible, *work_tile, lane_);
        TileMetadata metadata;
        do {
          metadata = list.take();
          if (lane_ < Config::kWarpgroups * Config::kKeyParts && metadata.visible(group)) {
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

  __device__ __forceinline__ uint32_t head_of(const WorkTile& work_tile) const {
    return static_cast<uint32_t>(work_tile.sequence.batch * static_cast<int>(p_.heads_q) + work_tile.sequence.head);
  }

  __device__ __forceinline__ void load_queries(const WorkTile& work_tile, uint32_t& parities) const {
    const int first_row = static_cast<int>(work_tile.sequence.q_begin) + work_tile.first_query;
#pragma unroll
    for (int g = 0; g < Config::kWarpgroups; ++g) {
      if (!work_tile.has_rows(g)) continue;
      ptx::mbarrier_wait(address(storage_.q_empty[g]), (parities >> g & 1) ^ 1);
      parities ^= 1u << g;
      this->load_query(work_tile, g, first_row, 0);
    }
  }

  /// Loads a tile of K or V. For a tile that no warpgroup visits it only arrives at the barrier. Called by one lane.
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

  /// Loads mask bits, one part per lane. Their bytes count at the barrier of K, and are expected before its only
  /// arrival.
  __device__ __forceinline__ void load_bits(const TileMetadata& metadata, int entry, int stage) const {
    const int partly = __popc(metadata.flags >> TileMetadata::kMasked & TileMetadata::kAll);
    if (partly == 0) return;
    const uint32_t s_full = address(storage_.k_full[stage]);
    if (lane_ == 0) ptx::mbarrier_expect(s_full, partly * Config::kKeyParts * static_cast<int>(sizeof(PairBits)));
    __syncwarp();
    const int group = lane_ / Config::kKeyParts;
    if (group >= Config::kWarpgroups || !metadata.is_masked(group)) return;
    ptx::bulk_load(s_bits_ + stage * Config::kBitsBytes + lane_ * static_cast<int>(sizeof(PairBits)),
                   options_.visible.bits + entry, sizeof(PairBits), s_full);
  }

  /// Loads a part of the bias for a warpgroup. Called by one lane.
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
  ForwardVisibleStorage<Config>& storage_;
  const uint32_t s_bias_, s_bits_;
};

}  // namespace flash_ext::sm90
