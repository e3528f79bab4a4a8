// Tiles, registers and shared memory of the float32 forward, and what a block of it works on.
#pragma once

#include <algorithm>
#include <new>

#include "../common/ring.cuh"
#include "../common/sequence.cuh"
#include "../launch.h"
#include "../ptx/cp_async.h"
#include "../ptx/mbarrier.h"
#include "float_parts.cuh"
#include "forward_f32_shape.h"
#include "forward_shape.h"

namespace flash_ext::sm90 {

template <int kHeadDim_>
struct ForwardF32Config {
  static constexpr int kHeadDim = kHeadDim_;  // of q, k and v
  static constexpr ForwardF32Shape kShape = forward_f32_shape(kHeadDim);
  static constexpr int kGroups = kShape.groups;
  static constexpr int kBlockM = kGroups * kGroupRows;
  static constexpr int kBlockN = kForwardF32Keys;
  static constexpr int kStages = kShape.stages;
  static constexpr int kRegisters = kShape.registers, kLoaderRegisters = kShape.loader_registers;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  static constexpr int kPanels = panels(kHeadDim);  // pieces of a tile

  static constexpr int kQueryBytes = kPanels * kPieceBytes;  // of a warpgroup
  static constexpr int kRingOffset = kGroups * kQueryBytes;
  static constexpr int kTilesBytes = kRingOffset + kStages * kPieceBytes;
  static_assert(kBlockN == kPieceRows && kGroupRows == kPieceRows);
  static_assert(kGroups * kRegisters + kLoaderRegisters <= 65536 / kThreads / 8 * 8 * (kGroups + 1),
                "no more registers than the launch allocates, else setmaxnreg waits for ever");
};

/// In which order blocks are started: sections of heads whose keys stay in L2, in a section the tiles of queries with
/// the most keys first, which balances a causal mask.
struct ForwardF32Schedule {
  int blocks_m;  // of the longest sequence
  int heads;     // of all batch entries
  int section_heads;

  __device__ __forceinline__ void locate(int position, int& head, int& block) const {
    const int section_size = section_heads * blocks_m, section = position / section_size;
    const int width = min(section_heads, heads - section * section_heads), rest = position % section_size;
    block = blocks_m - 1 - rest / width;
    head = section * section_heads + rest % width;
  }
};

template <class Config>
ForwardF32Schedule schedule_forward_f32(const AttentionParams& p) {
  constexpr int64_t kKeyBytesInL2 = 32 << 20;
  const int64_t key_bytes = std::max<int64_t>(1, p.seqlen_k * (p.head_dim + p.head_dim_v) * 4);
  const int64_t ratio = p.heads_q / p.heads_kv, heads = p.batch * p.heads_q;
  const int64_t blocks_m = (p.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
  const int64_t fitting = std::clamp<int64_t>(kKeyBytesInL2 / key_bytes * ratio, std::min(ratio, heads), heads);
  return {static_cast<int>(blocks_m), static_cast<int>(grid_size(heads)), static_cast<int>(fitting)};
}

/// A tile of queries of one head, and the tiles of keys that it sees.
template <class Config>
struct ForwardF32Work {
  Sequence sequence;
  int first_query, end_query;
  TileSpan tiles;                  // of all rows: these are loaded
  TileSpan rows[Config::kGroups];  // of the rows of each warpgroup, within `tiles`
  bool exists;

  /// The tile that is no whole one stands first, where a causal mask leaves the fewest keys.
  __device__ __forceinline__ ForwardF32Work(const Sequence& sequence, int block) : sequence(sequence) {
    const int blocks = (sequence.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
    exists = block < blocks;
    end_query = sequence.seqlen_q - (blocks - 1 - block) * Config::kBlockM;
    first_query = max(end_query - Config::kBlockM, 0);
    tiles = span(first_query, end_query);
    for (int g = 0; g < Config::kGroups; ++g) {
      const int first = first_query + g * kGroupRows;
      rows[g] = span(first, min(first + kGroupRows, end_query));
      if (rows[g].begin == rows[g].end) rows[g].begin = rows[g].end = tiles.begin;
    }
  }

  __device__ __forceinline__ static ForwardF32Work find(const AttentionParams& p, const ForwardF32Schedule& schedule,
                                                        int position) {
    int head, block;
    schedule.locate(position, head, block);
    const int heads_q = static_cast<int>(p.heads_q);
    return ForwardF32Work(Sequence(p, head / heads_q, head % heads_q), block);
  }

  /// Warpgroups that have rows: the first ones.
  __device__ __forceinline__ int groups() const {
    return (end_query - first_query + kGroupRows - 1) / kGroupRows;
  }

 private:
  __device__ __forceinline__ TileSpan span(int first, int end) const {
    return sequence.template key_tiles<Config::kBlockN>(first, end);
  }
};

/// Behind the pieces in shared memory.
template <class Config>
struct ForwardF32State {
  uint64_t full[Config::kStages], empty[Config::kStages];
  bool met_non_finite;  // in V of a tile that not all rows see in full; written before `full`
  ForwardF32Work<Config> work;

  /// By one thread.
  __device__ __forceinline__ ForwardF32State(const AttentionParams& p, const ForwardF32Schedule& schedule, int position)
      : met_non_finite(false), work(ForwardF32Work<Config>::find(p, schedule, position)) {
    for (int k = 0; k < Config::kStages; ++k) {
      ptx::mbarrier_init(ptx::shared_address(&full[k]), kGroupWarps);
      ptx::mbarrier_init(ptx::shared_address(&empty[k]), max(1, work.groups() * kGroupWarps));
    }
  }
};

}  // namespace flash_ext::sm90
