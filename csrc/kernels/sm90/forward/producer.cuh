// The producer warps: warp 0 loads K, and V unless warp 2 does; warp 1 loads Q and stores out; warp 2 sanitises V where
// Inf and NaN may be hidden from some rows.
#pragma once

#include "arguments.cuh"
#include "kernels/common/sanitise.cuh"
#include "kernels/ptx/tma.h"
#include "key_tiles.cuh"
#include "scheduler.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

template <class Config>
class ForwardProducer {
 public:
  using Storage = ForwardStorageOf<Config>;
  using WorkTile = ForwardWorkTile<Config>;
  using Tiles = std::conditional_t<Config::kListsBlocks, ListedTiles<Config>,
                                   std::conditional_t<Config::kReadsCache, CacheTiles<Config>, RangeTiles<Config>>>;
  static constexpr int kPanels = panels(Config::kHeadDim);
  static constexpr int kValuePanels = panels(Config::kHeadDimV);
  static constexpr bool kMayLoadValuesApart = Config::kReadsCache || Config::kLoadsValuesApart;

  __device__ __forceinline__ ForwardProducer(const ForwardArguments<Config>& arguments, Storage& storage, char* tiles,
                                             int lane)
      : call_(arguments.call),
        p_(arguments.call.p),
        maps_(arguments.maps),
        storage_(storage),
        s_q_(ptx::shared_address(tiles)),
        s_k_(s_q_ + Config::kKeysOffset),
        s_v_(s_q_ + Config::kValuesOffset),
        v_(reinterpret_cast<uint4*>(tiles + Config::kValuesOffset)),
        lane_(lane) {}

  /// Runs the role of one of the four producer warps. `producer` may be of a class derived from this one. Each role
  /// calls `start` first, except the scheduler, which makes the first work tile before.
  template <class Producer, class Schedule, class Start>
  __device__ __forceinline__ static void run(Producer&& producer, int warp, ForwardScheduler<Config>& scheduler,
                                             const Schedule& schedule, Start start) {
    if (warp == 0) {
      start();
      producer.run_keys();
    } else if (warp == 1) {
      start();
      producer.run_queries();
    } else if (warp == 2) {
      start();
      producer.run_values();
    } else {
      scheduler.run(schedule, producer.lane_, start);
    }
  }

 protected:
  /// Warp 1: loads Q of each warpgroup as soon as a slot is free, then stores out of the work tile before.
  __device__ __forceinline__ void run_queries() {
    WorkTileQueue<ForwardStorage<Config>> queue(storage_);
    uint32_t parities = 0;      // bit g: of q_empty[g]
    uint32_t query_slots = 0;   // bit g: of the next Q of warpgroup g
    uint32_t out_parities = 0;  // bit k: of out_full[k]
    int k_stage = 0, v_stage = 0;
    storage_.out = {};
    while (const WorkTile* const work_tile = queue.front()) {
      if (work_tile->sanitised) {  // a recomputation writes the same rows, so the first store must be complete
        store_out(out_parities);
        __syncwarp();
        storage_.out.exists = false;
        ptx::bulk_wait();
        __syncwarp();
      }
      const Sequence& s = work_tile->sequence;
      const int first_row = static_cast<int>(s.q_begin) + work_tile->first_query;
#pragma unroll 1
      for (int g = 0; g < Config::kWarpgroups; ++g) {
        if (!work_tile->has_rows(g)) continue;
        // With two slots this one is free: out of the work tile before the last has left it.
        if constexpr (Config::kQuerySlots == 1) {
          ptx::mbarrier_wait(address(storage_.q_empty[g]), (parities >> g & 1) ^ 1);
          parities ^= 1u << g;
        }
        load_query(*work_tile, g, first_row, query_slots);
      }
      store_out(out_parities);
      const int tiles = work_tile->tiles.end - work_tile->tiles.begin;
      if constexpr (Config::kOutInRings) {
        k_stage = (k_stage + tiles) % Config::kKeyStages;
        v_stage = (v_stage + tiles) % Config::kValueStages;
      }
      uint32_t groups = 0;
#pragma unroll 1
      for (int g = 0; g < Config::kWarpgroups; ++g) groups |= static_cast<uint32_t>(work_tile->publishes(g)) << g;
      __syncwarp();  // lane 0 has read what was there
      storage_.out = {true,    groups, query_slots, first_row, s.head, p_.seq.cu_seqlens_q ? 0 : s.batch,
                      k_stage, v_stage};
      __syncwarp();
      if constexpr (!Config::kOutInRings) query_slots ^= groups;
      if (work_tile->has_out_slots()) {
        k_stage = (k_stage + 1) % Config::kKeyStages;
        v_stage = (v_stage + 1) % Config::kValueStages;
      }
      queue.pop(lane_);
    }
    store_out(out_parities);
  }

  /// Warp 0: loads K of all tiles, and V unless warp 2 does, in the order of the visits. With kOutInRings one more
  /// stage of K and one of V follow the last tile: out leaves through them. Warp 0 publishes the stage of K. Warp 2
  /// publishes the stage of V, which becomes free later: if warp 0 waited for it, the next K would come late. Where
  /// warp 0 loads V, it only marks and skips this stage. The wait for the next stage of V covers it, because stages
  /// become free in the order of the ring, and a tile lies between two stages for out.
  __device__ __forceinline__ void run_keys() {
    WorkTileQueue<ForwardStorage<Config>> queue(storage_);
    RingPosition<Config::kKeyStages> k_at;
    RingPosition<Config::kValueStages> v_at;
    OutSlots k_slots, v_slots;
    bool is_first = true;  // the next key tile is the CTA's first
    while (const WorkTile* const work_tile = queue.front()) {
      const Sequence& s = work_tile->sequence;
      Tiles tiles = tiles_of(*work_tile);
      const int begin = tiles.begin();
      const int announced = min(begin + Tiles::kTilesAhead, work_tile->tiles.end - 1);
      for (int rank = work_tile->tiles.end - 1; rank >= begin; --rank) {
        if (rank == announced && lane_ == 0) ptx::mbarrier_arrive(address(storage_.work_tile_loaded));
        const auto keys = tiles.take(rank);
        const int row = tiles.row(keys.tile);
        wait_for_stage(storage_.k_empty, storage_.out_left_keys, k_at, k_slots);
        if (lane_ == 0 || Config::kReadsCache) {
          if constexpr (Config::kListsBlocks) storage_.listed_keys[k_at.stage()] = keys;
          load_keys<kPanels>(maps_.k, address(storage_.k_full[k_at.stage()]), s_k_ + k_at.stage() * Config::kKeyBytes,
                             row, s, tiles);
        }
        k_at.advance();
        if constexpr (kMayLoadValuesApart) {
          if (loads_values_apart()) {
            __syncwarp();
            continue;
          }
        }
        delay_first_value(*work_tile, is_first);
        wait_for_stage(storage_.v_empty, storage_.out_left_values, v_at, v_slots);
        if (lane_ == 0 || Config::kReadsCache) {
          const uint64_t& full = (work_tile->is_sanitised(keys.tile) ? storage_.v_raw : storage_.v_full)[v_at.stage()];
          load_keys<kValuePanels>(maps_.v, address(full), s_v_ + v_at.stage() * Config::kValueBytes, row, s, tiles);
        }
        v_at.advance();
        __syncwarp();
      }
      if (announced < begin && lane_ == 0) ptx::mbarrier_arrive(address(storage_.work_tile_loaded));
      if (work_tile->has_out_slots()) {
        wait_for_stage(storage_.k_empty, storage_.out_left_keys, k_at, k_slots);
        if (lane_ == 0) ptx::mbarrier_arrive(address(storage_.k_full[k_at.stage()]));
        k_slots.mark(k_at.stage(), work_tile->copies_out(0));
        k_at.advance();
        v_slots.reclaim(v_at.stage());
        v_slots.mark(v_at.stage(), work_tile->copies_out(1));
        v_at.advance();
      }
      queue.pop(lane_);
    }
  }

  /// Warp 2: removes Inf and NaN from V where they may be hidden: a hidden weight is 0, and 0 * Inf is NaN. It waits
  /// for and releases every tile, also tiles that it does not sanitise: parities repeat every second phase.
  __device__ __forceinline__ void run_values() {
    if constexpr (kMayLoadValuesApart)
      if (loads_values_apart()) return load_values();
    WorkTileQueue<ForwardStorage<Config>> queue(storage_);
    RingPosition<Config::kValueStages> at;
    OutSlots slots;
    while (WorkTile* const work_tile = queue.front()) {
      const int begin = work_tile->tiles.begin;
      for (int rank = work_tile->tiles.end - 1; rank >= begin; --rank, at.advance()) {
        const int tile = work_tile->tile_at(rank);
        slots.reclaim(at.stage());
        if (work_tile->is_sanitised(tile)) {
          sanitise_tile(*work_tile, tile, at.stage());
        } else {
          ptx::mbarrier_wait(address(storage_.v_full[at.stage()]), at.parity());
        }
        arrive_as_warp(storage_.v_empty[at.stage()], lane_);
      }
      publish_out_stage(*work_tile, at, slots);
      queue.pop(lane_);
    }
  }

  /// Whether warp 2 loads V. A tile of pages takes so many copies that one warp does not start all of K and V in time.
  __device__ __forceinline__ bool loads_values_apart() const {
    if constexpr (Config::kLoadsValuesApart) {
      return true;
    } else if constexpr (Config::kReadsCache) {
      return call_.copies > 1;
    } else {
      return false;
    }
  }

  /// Warp 2, where it also loads V. When it has started a tile's copies, and sanitised a tile that needs it, it arrives
  /// at v_empty as in run_values().
  __device__ __forceinline__ void load_values() {
    WorkTileQueue<ForwardStorage<Config>> queue(storage_);
    RingPosition<Config::kValueStages> at;
    OutSlots slots;
    bool is_first = true;  // the next key tile is the CTA's first
    while (WorkTile* const work_tile = queue.front()) {
      Tiles tiles = tiles_of(*work_tile);
      const int begin = work_tile->tiles.begin;
      for (int rank = work_tile->tiles.end - 1; rank >= begin; --rank, at.advance()) {
        const int tile = tiles.take(rank).tile;
        const bool sanitised = work_tile->is_sanitised(tile);
        delay_first_value(*work_tile, is_first);
        wait_for_stage(storage_.v_empty, storage_.out_left_values, at, slots);
        if (lane_ == 0 || Config::kReadsCache)
          load_keys<kValuePanels>(maps_.v, address((sanitised ? storage_.v_raw : storage_.v_full)[at.stage()]),
                                  s_v_ + at.stage() * Config::kValueBytes, tiles.row(tile), work_tile->sequence, tiles);
        __syncwarp();
        if (sanitised) sanitise_tile(*work_tile, tile, at.stage());
        arrive_as_warp(storage_.v_empty[at.stage()], lane_);
      }
      publish_out_stage(*work_tile, at, slots);
      queue.pop(lane_);
    }
  }

  /// Sanitises a tile of V in `stage` once it has arrived, and then arrives at v_full.
  __device__ __forceinline__ void sanitise_tile(WorkTile& work_tile, int tile, int stage) {
    ptx::mbarrier_wait(address(storage_.v_raw[stage]), raw_parities_ >> stage & 1);
    raw_parities_ ^= 1u << stage;
    uint4* const s_tile = v_ + stage * (Config::kValueBytes / 16);
    if (tile == work_tile.tail_tile) zero_rows(s_tile, work_tile.sequence.seqlen_k - tile * Config::kBlockN);
    const bool any = __any_sync(~0u, work_tile.sanitised && remove_non_finite(s_tile));
    ptx::fence_proxy_async_shared();
    __syncwarp();  // what all lanes wrote comes before the arrival
    if (lane_ != 0) return;
    if (any) work_tile.met_non_finite = true;
    ptx::mbarrier_arrive(address(storage_.v_full[stage]));
  }

  /// The stages of a ring that hold out: bit s of `used`. Bit s of `parities` is the parity of the barrier that says
  /// that out has left stage s.
  struct OutSlots {
    uint32_t used = 0, parities = 0;

    /// Returns whether the stage held out since its last tile, and clears its mark.
    __device__ __forceinline__ bool reclaim(int stage) {
      const bool was_used = used >> stage & 1;
      used &= ~(1u << stage);
      parities ^= static_cast<uint32_t>(was_used) << stage;
      return was_used;
    }
    __device__ __forceinline__ void mark(int stage, bool is_used) { used |= static_cast<uint32_t>(is_used) << stage; }
    __device__ __forceinline__ uint32_t last_parity(int stage) const { return parities >> stage & 1 ^ 1; }
  };

  template <int kStages>
  __device__ __forceinline__ void wait_for_stage(const uint64_t (&empty)[kStages], const uint64_t (&out_left)[kStages],
                                                 const RingPosition<kStages>& at, OutSlots& slots) const {
    ptx::mbarrier_wait(address(empty[at.stage()]), at.parity() ^ 1);
    if (!Config::kOutInRings || !slots.reclaim(at.stage())) return;
    ptx::mbarrier_wait(address(out_left[at.stage()]), slots.last_parity(at.stage()));
  }

  /// Warp 2: publishes the stage of V that out leaves through, if there is one.
  __device__ __forceinline__ void publish_out_stage(const WorkTile& work_tile, RingPosition<Config::kValueStages>& at,
                                                    OutSlots& slots) const {
    if (!work_tile.has_out_slots()) return;
    wait_for_stage(storage_.v_empty, storage_.out_left_values, at, slots);
    slots.mark(at.stage(), work_tile.copies_out(1));
    __syncwarp();
    if (lane_ == 0) {
      ptx::mbarrier_arrive(address(storage_.v_full[at.stage()]));
      ptx::mbarrier_arrive(address(storage_.v_empty[at.stage()]));
    }
    at.advance();
  }

  /// Loads Q of a warpgroup into the slot that its bit of `query_slots` names.
  __device__ __forceinline__ void load_query(const WorkTile& work_tile, int g, int first_row,
                                             uint32_t query_slots) const {
    const Sequence& s = work_tile.sequence;
    if (lane_ == 0) {
      const int tile = tile_of(query_slots, g);
      load<kPanels>(maps_.q, address(storage_.q_full[tile]), s_q_ + tile * Config::kQueryBytes, kWarpgroupRows,
                    first_row + g * kWarpgroupRows, s.head, s.batch, p_.seq.cu_seqlens_q);
    }
    __syncwarp();  // no lane falls behind by phases, whose parity repeats
  }

  __device__ __forceinline__ static int tile_of(uint32_t query_slots, int g) {
    return static_cast<int>(query_slots >> g & 1) * Config::kWarpgroups + g;
  }

  /// Stores storage_.out. Returns when TMA has read all of it.
  __device__ __forceinline__ void store_out(uint32_t& parities) const {
    if (!storage_.out.exists) return;
#pragma unroll 1
    for (int g = 0; g < Config::kWarpgroups; ++g) {
      if (!(storage_.out.groups >> g & 1)) continue;
      const int tile = tile_of(storage_.out.query_slots, g);
      ptx::mbarrier_wait(address(storage_.out_full[tile]), parities >> tile & 1);
      parities ^= 1u << tile;
      if (lane_ == 0) {
        if (storage_.out_is_here[tile]) store_tile(g);
        if constexpr (Config::kOutInRings) {
          const OutTiles& out = storage_.out;
          ptx::mbarrier_arrive(
              address(g == 0 ? storage_.out_left_keys[out.k_stage] : storage_.out_left_values[out.v_stage]));
        }
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void store_tile(int g) const {
    const OutTiles& out = storage_.out;
    // This fence also covers what consumers wrote before they arrived at out_full, so they need no fence themselves.
    ptx::fence_proxy_async_shared();
    const uint32_t s_tile = s_q_ + out_offset<Config>(g, out.query_slots >> g & 1, out.k_stage, out.v_stage);
#pragma unroll
    for (int panel = 0; panel < kValuePanels; ++panel)
      ptx::tma_store(&maps_.out, s_tile + panel * panel_bytes(kWarpgroupRows), panel * kPanelColumns,
                     out.first_row + g * kWarpgroupRows, out.head, out.batch);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }

  /// Called before each load of V. With kValuesWait the CTA's first V comes after its first Q and K, because all CTAs
  /// start at once.
  __device__ __forceinline__ void delay_first_value(const WorkTile& work_tile, bool& is_first) const {
    if (Config::kValuesWait && is_first) {
#pragma unroll
      for (int g = 0; g < Config::kWarpgroups; ++g)
        if (work_tile.has_rows(g)) ptx::mbarrier_wait(address(storage_.q_full[g]), 0);
    }
    is_first = false;
  }

  /// Loads kCount panels of rows, from `row` on, of a head. Packed sequences are one batch entry.
  template <int kCount>
  __device__ __forceinline__ void load(const CUtensorMap& map, uint32_t s_barrier, uint32_t s_tile, int rows, int row,
                                       int head, int batch, bool packed) const {
    ptx::mbarrier_arrive_expect(s_barrier, kCount * panel_bytes(rows));
#pragma unroll
    for (int panel = 0; panel < kCount; ++panel)
      ptx::tma_load(s_tile + panel * panel_bytes(rows), &map, s_barrier, panel * kPanelColumns, row, head,
                    packed ? 0 : batch);
  }

  __device__ __forceinline__ Tiles tiles_of(const WorkTile& work_tile) const {
    if constexpr (Config::kReadsCache) {
      return Tiles(call_, work_tile, lane_);
    } else {
      return Tiles(p_, work_tile, lane_);
    }
  }

  /// Loads kCount panels of a tile of K or V, from `row` on. Lane 0 calls it, or all lanes where K and V are a cache.
  template <int kCount>
  __device__ __forceinline__ void load_keys(const CUtensorMap& map, uint32_t s_barrier, uint32_t s_tile, int row,
                                            const Sequence& s, const Tiles& tiles) const {
    if constexpr (Config::kReadsCache) {
      load_copies<kCount>(map, s_barrier, s_tile, row, tiles);
    } else {
      load<kCount>(map, s_barrier, s_tile, Config::kBlockN, row, s.head_kv, s.batch, tiles.packed());
    }
  }

  /// Loads kCount panels of a tile of a cache, each lane one copy. `row`: the first row of this lane's copy.
  template <int kCount>
  __device__ __forceinline__ void load_copies(const CUtensorMap& map, uint32_t s_barrier, uint32_t s_tile, int row,
                                              const Tiles& tiles) const {
    if (lane_ == 0) ptx::mbarrier_arrive_expect(s_barrier, kCount * panel_bytes(Config::kBlockN));
    __syncwarp();  // the bytes are expected before copies complete
    if (lane_ >= tiles.copies()) return;
    const uint32_t s_copy = s_tile + lane_ * panel_bytes(tiles.copy_rows());
#pragma unroll
    for (int panel = 0; panel < kCount; ++panel)
      ptx::tma_load(s_copy + panel * panel_bytes(Config::kBlockN), &map, s_barrier, panel * kPanelColumns, row,
                    tiles.head(), tiles.batch());
  }

  /// Zeroes Inf and NaN of a tile of V. Returns whether this lane found any.
  __device__ __forceinline__ bool remove_non_finite(uint4* s_tile) const {
    const auto chunk = [&](int k) -> uint4& { return s_tile[k]; };
    return sanitise_chunks<typename Config::Element, false, Config::kValueBytes / 16, 32, 2>(lane_, chunk);
  }

  /// Zeroes rows from `first` on. They lie after the end of the sequence, so no query sees them.
  __device__ __forceinline__ void zero_rows(uint4* s_tile, int first) const {
    constexpr int kChunks = kPanelRowBytes / 16;
#pragma unroll 1
    for (int panel = 0; panel < kValuePanels; ++panel)
#pragma unroll 1
      for (int at = first * kChunks + lane_; at < Config::kBlockN * kChunks; at += 32)
        s_tile[panel * Config::kBlockN * kChunks + at] = uint4{0, 0, 0, 0};
    __syncwarp();
  }

  const typename ForwardParameters<Config>::Call& call_;
  const ForwardParams& p_;
  const ForwardMaps& maps_;
  Storage& storage_;
  const uint32_t s_q_, s_k_, s_v_;
  uint4* const v_;
  const int lane_;
  uint32_t raw_parities_ = 0;  // bit s: of v_raw[s]
};

}  // namespace flash_ext::sm90
