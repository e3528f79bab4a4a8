// What the warps of a CTA share: the tiles of queries that it works on, one after the other, and the barriers.
#pragma once

#include <algorithm>

#include "config.h"
#include "kernels/common/divisor.h"
#include "kernels/common/ring.cuh"
#include "kernels/common/scheduler/work_list.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/cp_async.h"
#include "kernels/ptx/grid.h"
#include "kernels/ptx/grid_dependency.h"
#include "kernels/ptx/mbarrier.h"
#include "split_kv.h"
#include "tile_order.h"

namespace flash_ext::sm90 {

/// Where a work tile leaves what it found, if it has only a part of the keys that its queries see (split_kv.cuh).
template <bool kSplitsKv>
struct WorkTileSplit {
  float4* part = nullptr;
};
template <>
struct WorkTileSplit<false> {
  static constexpr float4* part = nullptr;
};

/// Which entries of a block mask's lists a work tile has: [first_entry, first_entry + blocks).
template <bool kListsBlocks>
struct WorkTileBlocks {};
template <>
struct WorkTileBlocks<true> {
  int first_entry, blocks;
};

/// What score options add to a work tile. Without them, the tile that is visited first is the last one.
template <bool kScoreOptions>
struct WorkTileOptions {
  __device__ __forceinline__ void set(const AttentionParams&, const Sequence&, int) {}
  __device__ __forceinline__ int first_tile(const TileSpan& tiles) const { return tiles.end - 1; }
};

template <>
struct WorkTileOptions<true> {
  int tile;
  float slope;  // of ALiBi, base 2

  __device__ __forceinline__ void set(const AttentionParams& p, const Sequence& sequence, int first) {
    tile = first;
    slope = p.alibi_slopes ? p.alibi_slopes[sequence.batch * p.alibi_batch_stride + sequence.head] * kLog2E : 0.0f;
  }
  __device__ __forceinline__ int first_tile(const TileSpan&) const { return tile; }
};

/// A tile of queries of one head, and the tiles of keys that it sees. These are visited from the first one down to
/// `tiles.begin`, and then from the last one down to the one behind the first.
template <class Config>
struct ForwardWorkTile : WorkTileOptions<Config::kScoreOptions>,
                         WorkTileSplit<Config::kSplitsKv>,
                         WorkTileBlocks<Config::kListsBlocks> {
  Sequence sequence;
  int first_query, end_query;
  TileSpan tiles;                  // of all rows: these are loaded
  TileSpan rows[Config::kGroups];  // of the rows of each warpgroup, within `tiles`
  // Tiles before this one need no raising of stabilisers: every row has seen a key.
  int raised_begin[Config::kGroups];
  int plain_begin[Config::kGroups];  // nor do those from this one on
  int tail_tile;                     // whose memory holds rows of K and V that are not the sequence's; or -1
  // A work tile that failed comes again: with V sanitised, and else as before, so that what is hidden leaves no trace
  // in the bits; and if sums overflowed, or it fails once more, on the safe path, with the running maximum.
  bool sanitised, safe_path;
  bool failed, overflowed;  // some warp says
  bool met_non_finite;      // in V; written before its v_full

  __device__ __forceinline__ ForwardWorkTile(const AttentionParams& p, const Sequence& sequence, int first_query,
                                             int end_query, bool tail_in_memory)
      : sequence(sequence),
        first_query(first_query),
        end_query(end_query),
        tiles(span(first_query, end_query)),
        tail_tile(tail_in_memory && tiles.end * Config::kBlockN > sequence.seqlen_k ? tiles.end - 1 : -1),
        sanitised(false),
        safe_path(false),
        failed(false),
        overflowed(false),
        met_non_finite(false) {
#pragma unroll 1
    for (int g = 0; g < Config::kGroups; ++g) {
      const int first = first_query + g * kWarpgroupRows;
      rows[g] = span(first, min(first + kWarpgroupRows, end_query));
      if (rows[g].begin == rows[g].end) rows[g].begin = rows[g].end = tiles.begin;
      // Where the first row sees a key of the tile behind the full ones, so do all.
      const int full_end = rows[g].full_end;
      raised_begin[g] = sequence.keys_end(first) > full_end * Config::kBlockN ? full_end : full_end - 1;
      // ALiBi makes scores rise on the way to the diagonal of the first row.
      if (Config::kScoreOptions && p.alibi_slopes)
        raised_begin[g] = min(raised_begin[g], max(first + sequence.offset, 0) / Config::kBlockN);
      plain_begin[g] = max(rows[g].full_begin, rows[g].begin + (Config::kUpdatesRowMaxInLast ? 1 : 0));
    }
    // Where ALiBi is largest, so that stabilisers need not rise behind it: on the diagonal of the last row.
    const int diagonal = max(end_query - 1 + sequence.offset, 0) / Config::kBlockN;
    this->set(p, sequence, p.alibi_slopes ? min(max(diagonal, tiles.begin), tiles.end - 1) : tiles.end - 1);
  }

  __device__ __forceinline__ int first_tile() const {
    return WorkTileOptions<Config::kScoreOptions>::first_tile(tiles);
  }

  /// Of the slots [tiles.begin, tiles.end), which are visited from the last one down.
  __device__ __forceinline__ int tile_at(int rank) const {
    if (!Config::kScoreOptions) return rank;
    const int tile = rank - (tiles.end - 1 - first_tile());
    return tile < tiles.begin ? tile + tiles.end - tiles.begin : tile;
  }

  /// Of those that a warpgroup visits.
  __device__ __forceinline__ int last_tile(int group) const {
    const TileSpan& seen = rows[group];
    if (!Config::kScoreOptions || seen.end <= first_tile() + 1) return seen.begin;
    return max(seen.begin, first_tile() + 1);
  }

  /// The tiles from `tile` down to the one returned, but not beyond `stop`, raise no stabilisers of a warpgroup: all
  /// its rows see all of them, and have stabilisers. Behind the wrap they have if a full tile came before it. None:
  /// behind `tile`.
  __device__ __forceinline__ int fixed_max_from(int group, int tile, int stop) const {
    const TileSpan& seen = rows[group];
    const bool wrapped = tile > first_tile();
    const int end = wrapped ? (seen.full_begin <= first_tile() ? seen.full_end : 0) : raised_begin[group];
    const int begin = max(wrapped ? seen.full_begin : plain_begin[group], stop);
    return safe_path || tile >= end ? tile + 1 : min(begin, tile + 1);
  }

  /// With kListsBlocks: tiles are those of the list, counted along it. All of them are full, or are hidden by bits.
  __device__ __forceinline__ void list_blocks(int first_entry, int blocks, int tiles_of_block) {
    this->first_entry = first_entry;
    this->blocks = blocks;
    tiles = {0, blocks * tiles_of_block, 0, blocks * tiles_of_block};
#pragma unroll 1
    for (int g = 0; g < Config::kGroups; ++g)
      rows[g] = first_query + g * kWarpgroupRows < end_query ? tiles : TileSpan{0, 0, 0, 0};
  }

  /// Of all tiles, those of [begin, end).
  __device__ __forceinline__ void keep_tiles(int begin, int end) {
    const auto keep = [=](TileSpan& span) {
      span.begin = min(max(span.begin, begin), end);
      span.end = min(max(span.end, begin), end);
    };
    keep(tiles);
#pragma unroll 1
    for (int g = 0; g < Config::kGroups; ++g) keep(rows[g]);
  }

  __device__ __forceinline__ bool has_rows(int group) const { return rows[group].begin < rows[group].end; }

  /// Whether a warpgroup says so when it has done with its out.
  __device__ __forceinline__ bool publishes(int group) const {
    return Config::kQuerySlots == 1 ? copies_out(group) : has_rows(group);
  }

  /// Whether out of a warpgroup leaves through shared memory: where its rows are whole.
  __device__ __forceinline__ bool copies_out(int group) const {
    return Config::kOutInShared && !this->part && first_query + (group + 1) * kWarpgroupRows <= end_query &&
           has_rows(group);
  }

  /// Whether a stage of K and one of V for out follow the tiles.
  __device__ __forceinline__ bool has_out_slots() const { return Config::kOutInRings && tiles.begin < tiles.end; }

  /// Whether V of the tile is sanitised: after a failure where some row does not see all of the tile, else of the tail
  /// alone.
  __device__ __forceinline__ bool is_sanitised(int tile) const {
    if constexpr (Config::kListsBlocks) return sanitised;
    return sanitised ? tile < tiles.full_begin || tile >= tiles.full_end : tile == tail_tile;
  }

  /// Of one that failed: what is to be done again, and how.
  __device__ __forceinline__ void repeat() {
    safe_path = overflowed || sanitised;
    sanitised = true;
    failed = overflowed = met_non_finite = false;
  }

 private:
  __device__ __forceinline__ TileSpan span(int first, int end) const {
    return sequence.template key_tiles<Config::kBlockN>(first, end);
  }
};

/// In which order the CTAs acquire their work tiles: sections of heads whose keys stay in L2, in a section the tiles of
/// queries with the most keys first. Each CTA takes the next tile when it has loaded most of its last one: that
/// balances a causal mask, sequences of different lengths, and SMs of different speed. Or as a list says
/// (common/scheduler/work_list.cuh).
struct ForwardSchedule {
  int blocks_m;       // of the longest sequence
  int heads;          // of all batch entries
  int section_heads;  // of which so many run side by side
  int last_section;   // from this one on, all; a multiple of the above
  // Positions taken, besides the first of each CTA. Null where there are no more than those, or in_turn.
  unsigned long long* taken;
  // Of positions, and of those of a section, but the last.
  LongDivisor section_tiles = LongDivisor(int64_t{section_heads} * blocks_m);
  LongDivisor section_width = LongDivisor(section_heads), last_width = LongDivisor(heads - last_section);
  int64_t work_tiles = int64_t{heads} * blocks_m;  // with a list: at most
  LongDivisor heads_of_entry = LongDivisor(1);     // of a batch entry
  WorkList list = {};    // of packed sequences; then nothing above but `taken` and `work_tiles` counts
  bool in_turn = false;  // every so many positions, which nobody takes

  __device__ __forceinline__ int64_t take() const {
    if (!taken) return size();
    ptx::wait_for_previous_grid();  // it clears the counter
    return static_cast<int64_t>(ptx::grid_blocks() + atomicAdd(taken, 1ull));
  }

  /// The position of a CTA that comes after `position`.
  __device__ __forceinline__ int64_t next(int64_t position) const { return in_turn ? turn_after(position) : take(); }

  FLASH_EXT_HOST_DEVICE int64_t size() const { return work_tiles; }

  template <class WorkTile>
  __device__ __forceinline__ void trim(int64_t, WorkTile&) const {}

  /// Position in the order -> tile of queries.
  __device__ __forceinline__ TileIndex locate(int64_t position) const {
    if (list) return list.locate(static_cast<int>(position));
    int head, block;
    locate_in_sections(position, head, block);
    return of_entry(head, block);
  }

 protected:
  /// To and fro over the CTAs, so that who has a long tile now has a short one then.
  __device__ __forceinline__ static int64_t turn_after(int64_t position) {
    const uint32_t ctas = ptx::grid_blocks();
    return position + 2 * (ctas - 1 - static_cast<uint32_t>(position) % ctas) + 1;
  }

  /// Head of all batch entries -> of its entry.
  __device__ __forceinline__ TileIndex of_entry(int head, int block) const {
    const int batch = static_cast<int>(heads_of_entry.quotient(head));
    return {batch, head - batch * static_cast<int>(heads_of_entry.value), block};
  }

  /// Head of all batch entries, tile of queries.
  __device__ __forceinline__ void locate_in_sections(int64_t position, int& head, int& block) const {
    const int section = static_cast<int>(section_tiles.quotient(position));
    const int first_head = min(section * section_heads, last_section);
    const LongDivisor& width = first_head < last_section ? section_width : last_width;
    const uint64_t rest = position - uint64_t{static_cast<uint32_t>(first_head)} * static_cast<uint32_t>(blocks_m);
    const uint32_t row = static_cast<uint32_t>(width.quotient(rest));
    block = blocks_m - 1 - static_cast<int>(row);
    head = first_head + static_cast<int>(rest - row * width.value);
  }
};

/// What a schedule becomes where tiles are listed, in its workspace.
inline void use_list(ForwardSchedule& schedule, const WorkListPlan& plan, void* workspace) {
  if (!plan.listed) return;
  schedule.list = plan.view(workspace);
  schedule.taken = &schedule.list.head->taken;
  schedule.work_tiles = grid_size(plan.max_work_tiles());
}

/// Where all sequences have the same lengths, the tiles of queries of one key head stand side by side: CTAs that
/// start together then read the same keys, and memory is asked for as much at one time as at another. What balances the
/// end is the order of the last turns: the tiles with the most keys first or, where all see all keys, those that are no
/// whole ones last. Else, and in the variant with options with a window, sections of heads whose keys fit into L2,
/// equally large, so that the last one is no small one.
template <class Config>
ForwardSchedule schedule_forward(const AttentionParams& p, void* workspace) {
  constexpr int64_t kKeyBytesInL2 = 32 << 20;
  const int64_t key_bytes = std::max<int64_t>(1, p.seqlen_k * (p.head_dim + p.head_dim_v) * 2);
  const int64_t ratio = p.heads_q / p.heads_kv, heads = p.batch * p.heads_q;
  const int64_t fitting = std::clamp<int64_t>(kKeyBytesInL2 / key_bytes * ratio, ratio, heads);
  const int64_t sections = (heads + fitting - 1) / fitting;
  const int64_t even = ((heads + sections - 1) / sections + ratio - 1) / ratio * ratio;
  const bool equal_lengths = has_equal_lengths(p);
  const bool equal_tiles = equal_lengths && p.window.left < 0 && p.window.right < 0;
  const int64_t blocks_m = (p.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
  const int64_t section = equal_tiles || (equal_lengths && !Config::kGeneral) ? ratio : even;
  int64_t last = (heads - 1) / section * section;
  if (equal_lengths && !Config::kGeneral && !(equal_tiles && p.seqlen_q % Config::kBlockM == 0))
    last = last_section(heads, section, blocks_m, ctas_at_a_time(Config::kShape), equal_tiles);
  ForwardSchedule schedule = {static_cast<int>(blocks_m), static_cast<int>(grid_size(heads)), static_cast<int>(section),
                              static_cast<int>(last), static_cast<unsigned long long*>(workspace)};
  schedule.heads_of_entry = LongDivisor(p.heads_q);
  return schedule;
}

/// Where out of a work tile goes. Those of its warpgroups that are bits of `groups` say when they have done with it.
struct OutTiles {
  bool exists;
  uint32_t groups;
  uint32_t query_slots;  // bit g: of Q of warpgroup g, and of its out
  int first_row, head, batch;
  int k_stage, v_stage;  // kOutInRings: of the slots
};

/// Behind the tiles in shared memory. A barrier's name says what the end of its phase means.
template <class Config>
struct ForwardStorage {
  using WorkTile = ForwardWorkTile<Config>;
  static constexpr int kKeyStages = Config::kKeyStages, kValueStages = Config::kValueStages;
  static constexpr int kSlots = Config::kSlots, kGroups = Config::kGroups;
  static constexpr int kTiles = Config::kQuerySlots * kGroups;  // of Q, those of a slot side by side

  uint64_t q_full[kTiles];
  uint64_t out_full[kTiles];
  uint64_t q_empty[kGroups];  // with one place; else who stores out knows
  uint64_t k_full[kKeyStages], k_empty[kKeyStages];
  uint64_t v_full[kValueStages], v_empty[kValueStages];
  uint64_t v_raw[kValueStages];  // of tiles that are to be sanitised: they came, and are `full` when that is done
  // kOutInRings: out has left this stage. Of each stage, as two slots may follow each other, and a phase must be waited
  // for before the next one ends.
  uint64_t out_left_keys[kKeyStages], out_left_values[kValueStages];
  uint64_t work_tile_full[kSlots], work_tile_empty[kSlots];
  uint64_t work_tile_loaded;     // most of K and V of it
  OutTiles out;                  // of the warp that stores it
  uint32_t out_is_here[kTiles];  // beside out_full: it has not been written by other ways
  int has_work_tile[kSlots];
  __align__(8) unsigned char work_tile[kSlots][sizeof(ForwardWorkTile<Config>)];

  __device__ __forceinline__ ForwardWorkTile<Config>& work_tile_in(int slot) {
    return *reinterpret_cast<ForwardWorkTile<Config>*>(work_tile[slot]);
  }

  /// By one thread.
  __device__ __forceinline__ void init() {
    init_barriers();
    zero_slots();
  }
  __device__ __forceinline__ void zero_slots() {
    for (int slot = 0; slot < kSlots; ++slot) work_tile_in(slot).failed = false;
  }

  /// By one thread, whose addresses are constants: lanes that share the work take turns at it.
  __device__ __forceinline__ void init_barriers() {
    constexpr int kConsumers = kGroups * kWarpgroupWarps, kLoaders = 3;
    init_all(q_full, 1);
    init_all(q_empty, kWarpgroupWarps);
    init_all(out_full, kWarpgroupThreads);
    init_all(k_full, 1);
    init_all(k_empty, kConsumers);
    init_all(v_full, 1);
    init_all(v_empty, kConsumers + 1);
    init_all(v_raw, 1);
    init_all(out_left_keys, 1);
    init_all(out_left_values, 1);
    ptx::mbarrier_init(ptx::shared_address(&work_tile_loaded), 1);
    init_all(work_tile_full, 1);
    init_all(work_tile_empty, kConsumers + kLoaders);
    ptx::mbarrier_init_fence();
  }

 private:
  template <int kCount>
  __device__ __forceinline__ static void init_all(uint64_t (&barriers)[kCount], uint32_t arrivals) {
    for (int k = 0; k < kCount; ++k) ptx::mbarrier_init(ptx::shared_address(&barriers[k]), arrivals);
  }
};

/// The work tiles of a CTA as one of its warps goes through it.
template <class Storage>
class WorkTileQueue {
 public:
  using WorkTile = typename Storage::WorkTile;

  __device__ __forceinline__ explicit WorkTileQueue(Storage& storage) : storage_(storage) {}

  /// The next work tile, or null after the last.
  __device__ __forceinline__ WorkTile* front() {
    ptx::mbarrier_wait(ptx::shared_address(&storage_.work_tile_full[at_.stage()]), at_.parity());
    return storage_.has_work_tile[at_.stage()] ? &storage_.work_tile_in(at_.stage()) : nullptr;
  }

  /// The warp is done with it.
  __device__ __forceinline__ void pop(int lane) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&storage_.work_tile_empty[at_.stage()]));
    at_.advance();
  }

 protected:
  Storage& storage_;
  RingPosition<Storage::kSlots> at_;
};

}  // namespace flash_ext::sm90
