// The backward's variant of block masks: the pipelined loop, driven by lists.
//
// A tile of 128 keys lies within a column of blocks. The tiles of queries that see it are listed on the device from the
// mask's rows (common/backward/query_lists.h); tiles of keys come longest first (common/scheduler/longest_first.h). The
// producer tells of a step beside Q. A step of which nothing is hidden is that of the plain loop; where the mask has a
// bitmap, each lane reads the bits of its pairs, 8 bytes, beside the products.
#pragma once

#include "blocks.h"
#include "blocks_producer_dq.cuh"
#include "kernel.cuh"

namespace flash_ext::sm90 {

template <class Config_>
struct BackwardBlocksRoles {
  using Config = Config_;
  using Storage = BackwardPipelinedStorage<Config>;
  using Maps = BackwardMaps;
  using Dq = BackwardBlocksDq<Config>;
  using Consumer = BackwardPipelinedConsumer<Config>;
};

template <class Element, int kHeadDim>
void run_backward_blocks(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Config = BackwardPipelinedConfig<Element, kHeadDim, true>;
  using Roles = BackwardBlocksRoles<Config>;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(typename Roles::Storage);
  static_assert(kSharedBytes <= 227 * 1024);
  const BackwardBlocksWorkspace all(p, kBlockM, kBlockN, kHeadDim, memory);
  const BackwardWorkspace& workspace = all.rows;
  const LaunchShape rows{grid_of(RowTileOfBlock::blocks(p, kBlockM)), dim3(kRowTermThreads)};
  LaunchShape overlapping = rows;
  overlapping.overlaps_previous = true;
  make_query_lists(p, workspace.query_lists, kBlockN, stream);
  list_longest_first(all.order, all.schedule.list, stream);
  launch("sm90/backward rows", backward_row_terms_kernel<Element, kHeadDim, kBlockM, true>, rows, stream, p, workspace);
  if (p.dq.data || p.dk.data || p.dv.data) {
    const BackwardMaps maps = {encode_tensor_map(p.q, query_shape(p, p.head_dim), p.dtype, kBlockM),
                               encode_tensor_map(p.k, key_shape(p, p.head_dim), p.dtype, Config::kLoadedKeys),
                               encode_tensor_map(p.v, key_shape(p, p.head_dim_v), p.dtype, Config::kLoadedKeys),
                               encode_tensor_map(p.grad_out, query_shape(p, p.head_dim_v), p.dtype, kBlockM)};
    const LaunchShape keys{grid_of(all.order.positions()), dim3(Config::kThreads), kSharedBytes, true};
    launch("sm90/backward", backward_kernel<Roles>, keys, stream, p, maps, workspace, all.schedule,
           static_cast<float>(p.softmax_scale) * kLog2E);
  }
  if (p.dq.data)
    launch("sm90/backward dq", store_dq_kernel<Element, BackwardDqLayout<kHeadDim>, kBlockM, kHeadDim>, overlapping,
           stream, p, workspace);
  if (p.dsink) {
    const LaunchShape heads{grid_of(p.heads_q), dim3(kRowTermThreads)};
    launch("sm90/backward sink", sink_gradient_kernel<kBlockM, true>, heads, stream, p, workspace);
  }
}

}  // namespace flash_ext::sm90
