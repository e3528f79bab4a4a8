// What the warps of a CTA of the short backward share: Q, K, V and dO of a head, whole, and the terms of its rows.
#pragma once

#include <cstdint>

#include "config.cuh"
#include "kernels/common/backward/row_terms.cuh"
#include "kernels/common/barriers.h"
#include "kernels/common/sequence.cuh"
#include "kernels/ptx/tma.h"

namespace flash_ext::sm90 {

struct BackwardShortMaps {
  CUtensorMap q, k, v, grad_out;
};

template <class Config>
struct BackwardShortStorage {
  float lse[Config::kRows];          // in units of scores; inf where a row has no weights
  float minus_delta[Config::kRows];  // dlse - rowsum(dO * O)
  uint64_t scores_full;              // arrives: the loading thread (1 + bytes); orders: Q and K before their use
  uint64_t grads_full;               // the same for V and dO
  alignas(Sequence) char sequence_memory[sizeof(Sequence)];

  /// The sequence of the CTA, which loops have no registers to keep.
  __device__ __forceinline__ Sequence& sequence() { return *reinterpret_cast<Sequence*>(sequence_memory); }
  __device__ __forceinline__ const Sequence& sequence() const {
    return *reinterpret_cast<const Sequence*>(sequence_memory);
  }

  /// Loads all tiles. Called by one thread. Rows past the tensors become 0.
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
