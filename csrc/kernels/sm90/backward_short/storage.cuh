// What the warps of a CTA of the short backward share: Q, K, V and dO of a head, whole, and the terms of its rows.
#pragma once

#include <cstdint>

#include "kernels/common/backward/row_terms.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/ptx/tma.h"
#include "kernels/sm90/common/barriers.h"
#include "kernels/sm90/common/matrix_descriptor.h"
#include "shape.h"

namespace flash_ext::sm90 {

template <class Element_, int kHeadDim_, int kGroups_>
struct BackwardShortConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kRows = kGroups * kWarpgroupRows;
  static constexpr int kThreads = kGroups * kWarpgroupThreads;
  // An SM has registers for four warpgroups of 128 registers a thread, or for two of twice as many: what one loads,
  // others compute meanwhile.
  static constexpr int kWarpgroupsPerSm = kHeadDim == 64 ? 4 : 2;
  static constexpr int kCtasPerSm = kGroups < kWarpgroupsPerSm ? kWarpgroupsPerSm / kGroups : 1;
  static constexpr int kQueriesOfStep = kHeadDim == 64 ? 32 : 64;  // where dK and dV are summed up

  // The panels of a block of 64 rows follow each other; a copy by TMA brings one. A single panel comes whole.
  static constexpr int kPanels = panels(kHeadDim);
  static constexpr int kBlockBytes = tile_bytes(kWarpgroupRows, kHeadDim);
  static constexpr int kRowsOfCopy = kPanels == 1 ? kRows : kWarpgroupRows;
  static constexpr int kTileBytes = kGroups * kBlockBytes;
  static constexpr int kKeysOffset = 0;
  static constexpr int kValuesOffset = kTileBytes;
  static constexpr int kQueriesOffset = 2 * kTileBytes;
  static constexpr int kGradsOffset = 3 * kTileBytes;
  // Whether dS passes from the warpgroups that have the keys to those that have the queries. A block of queries has a
  // panel of it, whose rows are keys.
  static constexpr bool kExchangesDs = kHeadDim > 64;
  static constexpr int kDsOffset = 4 * kTileBytes;
  static constexpr int kDsBytes = kExchangesDs ? kGroups * panel_bytes(kRows) : 0;
  static constexpr int kTilesBytes = kDsOffset + kDsBytes;

  /// Where a row of a tile begins.
  static constexpr int row_offset(int row) {
    return kPanels == 1 ? panel_bytes(row) : row / kWarpgroupRows * kBlockBytes + panel_bytes(row % kWarpgroupRows);
  }

  static_assert(kPanels == 1 || kQueriesOfStep == kWarpgroupRows, "descriptors count panels of whole blocks");
  static_assert(!kExchangesDs || kQueriesOfStep == kWarpgroupRows, "a step fills a panel of dS");
};

struct BackwardShortMaps {
  CUtensorMap q, k, v, grad_out;
};

template <class Config>
struct BackwardShortStorage {
  float lse[Config::kRows];          // in units of scores; inf where a row has no weights
  float minus_delta[Config::kRows];  // dlse - rowsum(dO * O)
  uint64_t scores_full;              // arrives: the loading thread (1 + bytes); orders: Q and K before their use
  uint64_t grads_full;               // the same of V and dO
  alignas(Sequence) char sequence_memory[sizeof(Sequence)];

  /// The sequence of the CTA, which loops have no registers to keep.
  __device__ __forceinline__ Sequence& sequence() { return *reinterpret_cast<Sequence*>(sequence_memory); }
  __device__ __forceinline__ const Sequence& sequence() const {
    return *reinterpret_cast<const Sequence*>(sequence_memory);
  }

  /// Called by one thread. Rows behind the tensors become 0.
  __device__ __forceinline__ void load(const BackwardShortMaps& maps, const Sequence& sequence, uint32_t s_tiles) {
    init_barrier(scores_full, 1);
    init_barrier(grads_full, 1);
    ptx::mbarrier_init_fence();
    const int first_key = sequence.leftpad;
    ptx::mbarrier_arrive_expect(address(scores_full), 2 * Config::kTileBytes);
    load_tile(maps.k, scores_full, s_tiles + Config::kKeysOffset, first_key, sequence.head_kv, sequence.cache_row);
    load_tile(maps.q, scores_full, s_tiles + Config::kQueriesOffset, 0, sequence.head, sequence.batch);
    ptx::mbarrier_arrive_expect(address(grads_full), 2 * Config::kTileBytes);
    load_tile(maps.v, grads_full, s_tiles + Config::kValuesOffset, first_key, sequence.head_kv, sequence.cache_row);
    load_tile(maps.grad_out, grads_full, s_tiles + Config::kGradsOffset, 0, sequence.head, sequence.batch);
  }

 private:
  __device__ __forceinline__ static void load_tile(const CUtensorMap& map, const uint64_t& barrier, uint32_t s_tile,
                                                   int row, int head, int batch) {
#pragma unroll
    for (int first = 0; first < Config::kRows; first += Config::kRowsOfCopy)
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel)
        ptx::tma_load(s_tile + Config::row_offset(first) + panel * panel_bytes(Config::kRowsOfCopy), &map,
                      address(barrier), panel * kPanelColumns, row + first, head, batch);
  }
};

}  // namespace flash_ext::sm90
