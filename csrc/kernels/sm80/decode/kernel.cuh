// Attention over a key-value cache on mma.sync:
//
//   out_r = sum_j p_rj v_j / l_r,   p_rj = e^(s_rj - m_r),   l_r = sum_j p_rj
//
// Decoding reads each key and value once and computes little with it, so the kernel is built to keep reads under way.
// The heads that share a key head are rows of one tile (scheduler.cuh), and the keys of a tile are divided into splits,
// one CTA each.
//
// Few rows (kRowWarps = 1): every warp (with float heads of 256: every two) visits key tiles of its own, with its own
// ring of stages, m, l and out. Warps meet only at the end, when their results are combined in shared memory. Many rows
// (kRowWarps = 4): the warps share the key tiles and own 16 rows each.
//
// A step, for tile n:
//   wait for K(n) and V(n), barrier of those who share it     all warps have read tile n - 1
//   issue K and V of tile n + kStages - 1 into the stage of tile n - 1
//   S = Q K^T, m updated where a score exceeds it by far, P = e^(S - m), O += P V
#pragma once

#include <new>

#include "consumer.cuh"
#include "epilogue.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/grid_dependency.h"
#include "kernels/ptx/shared_address.h"
#include "producer.cuh"
#include "scheduler.cuh"

namespace flash_ext::sm80 {

/// Loops over the keys of a split. `load_rows` loads what belongs to the rows, once the first keys are under way.
template <class Config, class LoadRows>
__device__ __forceinline__ void visit_keys(DecodeWarp<Config>& warp, const ForwardParams& p, const DecodeGrid& grid,
                                           const DecodeTile& tile, int split, uint32_t s_rings, LoadRows load_rows) {
  constexpr int kStep = Config::kKeyWarps * Config::kBlockN, kAhead = Config::kStages - 1;
  const uint32_t s_ring = s_rings + warp.key_warp * Config::kStages * Config::kStageBytes;
  int first_key = tile.split_begin(split) + warp.key_warp * Config::kBlockN;
  const int end_key = tile.split_end(split);
  KeyProducer<Config> producer(p, tile.sequence, first_key, end_key, warp.warp % Config::kTeam, warp.lane);
#pragma unroll 1
  for (int stage = 0; stage < kAhead; ++stage) {
    if (first_key + stage * kStep < end_key) producer.load_next(s_ring + stage * Config::kStageBytes, kStep);
    if (stage == 0) load_rows();
    ptx::cp_async_commit();
  }
  const bool any_mixed = tile.is_mixed(grid);
  const int common_begin = any_mixed ? tile.common_begin(grid) : 0;
  const int common_end = any_mixed ? tile.common_end(grid) : end_key;
  ptx::cp_async_wait<kAhead - 1>();
  __syncthreads();
  warp.keep_query();
  if constexpr (Config::kQueryInRegisters) __syncthreads();

  int stage = 0;
#pragma unroll 1
  for (; first_key < end_key; first_key += kStep) {
    ptx::cp_async_wait<kAhead - 1>();
    DecodeWarp<Config>::meet();
    const int free_stage = stage == 0 ? kAhead : stage - 1;
    if (first_key + kAhead * kStep < end_key) producer.load_next(s_ring + free_stage * Config::kStageBytes, kStep);
    ptx::cp_async_commit();
    const bool mixed = first_key < common_begin || min(first_key + Config::kBlockN, end_key) > common_end;
    warp.visit(s_ring + stage * Config::kStageBytes, first_key, end_key, mixed);
    stage = stage == kAhead ? 0 : stage + 1;
  }
}

/// Computes one split of a tile, from its keys to its result. `shared`: the CTA's shared memory, which begins with the
/// tile.
template <class Config>
__device__ __forceinline__ void run_split(unsigned char* shared, const ForwardParams& p, const DecodeGrid& grid,
                                          const DecodePartials& partials, const DecodeTile& tile, int split) {
  DecodeRowRules* s_rules = reinterpret_cast<DecodeRowRules*>(shared + Config::kRulesOffset);
  const uint32_t s_q = ptx::shared_address(shared) + Config::kQueryOffset;
  DecodeWarp<Config> warp(p, grid, s_rules, s_q);
  visit_keys(warp, p, grid, tile, split, ptx::shared_address(shared) + Config::kRingOffset, [&] {
    load_query<Config>(s_q, p, grid, tile);
    if (p.alibi_slopes || tile.is_mixed(grid)) write_rules<Config>(s_rules, p, grid, tile);
  });

  ptx::cp_async_wait<0>();
  const bool patch = __syncthreads_or(warp.met_non_finite) != 0;
  float* s_out = reinterpret_cast<float*>(shared + Config::kLoopOffset);
  float2* s_softmax_state = reinterpret_cast<float2*>(shared + Config::kStorageOffset);
  warp.publish(s_out, s_softmax_state, tile.rows);
  __syncthreads();
  if (patch) {
    add_non_finite<Config>(s_out, p, grid, tile, split);
    __syncthreads();
  }
  finish<Config>(s_out, s_softmax_state, p, grid, partials, tile, split);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 2)
    decode_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ DecodeGrid grid,
                  const __grid_constant__ DecodePartials partials) {
  extern __shared__ __align__(128) unsigned char shared[];
  // This order lets the combination read, before it waits for this kernel, what the append wrote.
  ptx::wait_for_previous_grid();
  ptx::launch_dependents();
  // Neighbouring CTAs read neighbouring heads of the same keys, then tiles of queries that see the same keys.
  const uint32_t range = grid.groups.quotient(blockIdx.x), part = grid.row_tiles.quotient(range);
  const int group = static_cast<int>(blockIdx.x - range * grid.groups.value);
  int row_tile = static_cast<int>(range - part * grid.row_tiles.value), batch, first;
  if (grid.tiles.by_rows) {
    first = static_cast<int>(part);
    if (threadIdx.x < 32) grid.tiles.find(p, row_tile, batch, row_tile);
  } else {
    batch = static_cast<int>(grid.ctas.quotient(part));
    first = static_cast<int>(part) - batch * static_cast<int>(grid.ctas.value);
  }
  DecodeTile& tile = *reinterpret_cast<DecodeTile*>(shared);
  if (threadIdx.x == 0) {
    new (&tile) DecodeTile(p, grid, batch, group, row_tile);
    if (row_tile < 0) tile.rows = 0;
  }
  __syncthreads();
  if (tile.rows <= 0) return;
  if (tile.begin == tile.end && first == 0) write_nothing<Config>(p, grid, tile);
#pragma unroll 1
  for (int split = tile.first_split + first; tile.split_begin(split) < tile.split_end(split);
       split += static_cast<int>(grid.ctas.value)) {
    run_split<Config>(shared, p, grid, partials, tile, split);
    __syncthreads();  // out has been read
  }
}

template <class Config>
void launch_decode(const ForwardParams& params, const DecodeGrid& grid, const DecodePartials& partials,
                   bool after_append, cudaStream_t stream) {
  const int64_t ctas = grid.all_tiles() * grid.ctas.value;
  LaunchShape shape{grid_of(ctas), dim3(Config::kThreads), Config::kSharedBytes};
  shape.overlaps_previous = after_append;
  launch("decode", decode_kernel<Config>, shape, stream, params, grid, partials);
}

/// Launches all of decoding but the combination of the splits.
template <class Element, int kHeadDim>
void run_decode(const ForwardParams& params, const DecodeGrid& grid, const DecodePartials& partials, bool after_append,
                cudaStream_t stream) {
  if constexpr (sizeof(Element) == 2) {
    if (grid.block_m > 16)
      return launch_decode<DecodeConfig<Element, kHeadDim, 4>>(params, grid, partials, after_append, stream);
  }
  launch_decode<DecodeConfig<Element, kHeadDim, 1>>(params, grid, partials, after_append, stream);
}

}  // namespace flash_ext::sm80
