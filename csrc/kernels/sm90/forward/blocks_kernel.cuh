// The forward's variant of block masks: the lists say which tiles of keys a tile of queries visits.
//
// The loop is that of the plain kernel (kernel.cuh). It differs in what drives it: a tile of queries lies within a row
// of blocks, and the producer walks the row's list, so that K and V of the next blocks, and of the next tile of
// queries, are under way while one is computed. A block of which all pairs are visible is a step with a fixed row max,
// as soon as one such block has made the row stabilisers; one with a bitmap updates the row max. Tiles of queries come
// longest first (common/scheduler/longest_first.h).
#pragma once

#include "blocks.h"
#include "blocks_producer.cuh"
#include "kernel.cuh"

namespace flash_ext::sm90 {

template <class Config>
class ForwardBlocksConsumer : public ForwardConsumer<Config> {
  using Base = ForwardConsumer<Config>;
  using Base::fence_operand;
  using Base::fence_out;
  using Base::k_at_;
  using Base::lane_;
  using Base::out_;
  using Base::p_;
  using Base::row_sum_;
  using Base::stabiliser_;
  using Base::start_pv;
  using Base::start_qk;
  using Base::wait_for_keys;
  using Base::wait_for_values;
  using Base::warp_;
  using Base::warpgroup_;
  using typename Base::Element;
  using typename Base::Scores;
  using typename Base::Weights;
  using typename Base::WorkTile;
  static constexpr int kBlockN = Config::kBlockN, kN = Base::kN, kWords = kBlockN / 32;
  // Tiles before this one update the row max: see kUpdatesRowMaxInLast.
  static constexpr int kFixedBegin = Config::kUpdatesRowMaxInLast ? 1 : 0;

  /// Keys that a lane's two rows see, as words of a bitmap.
  struct Visible {
    uint32_t words[2][kWords];
  };

 public:
  __device__ __forceinline__ ForwardBlocksConsumer(const ForwardParams& p, const ScoreTerms& terms,
                                                   ForwardBlocksStorage<Config>& storage, uint32_t s_tiles, int group,
                                                   int lane, float scale)
      : Base(p, terms, storage, s_tiles, group, lane, scale), storage_(storage) {}

  __device__ __forceinline__ void run() {
    WorkTileQueue<ForwardStorage<Config>> queue(storage_);
    while (WorkTile* const work_tile = queue.front()) {
      this->clear();
      visit(*work_tile);
      if (!work_tile->safe_path) look_for_failure(*work_tile);
      this->store(*work_tile);
      if (work_tile->met_non_finite) add_hidden_non_finite(*work_tile);
      queue.pop(lane_);
    }
  }

 private:
  __device__ __forceinline__ void visit(const WorkTile& work_tile) {
    int rank = work_tile.tiles.end - 1;
    this->wait_for_query(work_tile);
    if (!work_tile.has_rows(warpgroup_)) {
      for (; rank >= 0; --rank) this->pass();
    } else if (work_tile.safe_path) {
#pragma unroll 1
      for (; rank >= 0; --rank) {
        Weights p;
        wait_for_keys();
        softmax_tile<false, true>(p, work_tile, listed(), rank);
        this->add_values(p);
      }
    } else if constexpr (Config::kOverlaps) {
      visit_pipelined(work_tile, rank);
    } else {
      visit_sequentially(work_tile, rank);
    }
  }

  /// The products of a tile, one after the other: other warpgroups fill the waits.
  __device__ __forceinline__ void visit_sequentially(const WorkTile& work_tile, int rank) {
    bool has_stabilisers = false;
    while (rank >= 0) {
      Weights p;
      wait_for_keys();
      const ListedKeys keys = listed();
      softmax_tile<false>(p, work_tile, keys, rank);
      this->add_values(p);
      has_stabilisers |= keys.bitmap == ListedKeys::kFull;
      const int end = max(--rank - keys.run, kFixedBegin - 1);
      if (!has_stabilisers) continue;
#pragma unroll 1
      for (; rank > end; --rank) {
        Base::template softmax_tile<RowMaxUpdate::kNone>(work_tile, rank, p);
        this->add_values(p);
      }
    }
  }

  __device__ __forceinline__ void visit_pipelined(const WorkTile& work_tile, int rank) {
    Weights p;
    wait_for_keys();
    ListedKeys keys = listed();
    softmax_tile<true>(p, work_tile, keys, rank);
    bool has_stabilisers = keys.bitmap == ListedKeys::kFull;
    for (--rank; rank >= 0;) {
      // Full tiles of a run do not ask what they are.
      if (has_stabilisers && keys.run > 0 && rank >= kFixedBegin) {
        const int end = max(rank - keys.run, kFixedBegin - 1);
#pragma unroll 1
        for (; rank > end; --rank) {
          wait_for_keys();
          step<true>(p, work_tile, keys, rank);
        }
        keys.run = 0;
        continue;
      }
      wait_for_keys();
      keys = listed();
      step<false>(p, work_tile, keys, rank);
      has_stabilisers |= keys.bitmap == ListedKeys::kFull;
      --rank;
    }
    this->add_values(p);
  }

  /// Of the tile whose K has come.
  __device__ __forceinline__ ListedKeys listed() const {
    const int4 keys = *reinterpret_cast<const int4*>(&storage_.listed_keys[k_at_.stage()]);
    return {keys.x, keys.y, keys.z, keys.w};
  }

  /// S and P of a tile, with a running row max. kFirst: of the work tile. kRounds: see exponentiate().
  template <bool kFirst, bool kRounds = false>
  __device__ __forceinline__ void softmax_tile(Weights& p, const WorkTile& work_tile, const ListedKeys& keys,
                                               int rank) {
    Scores s;
    Visible visible;
    ask_for_bits(visible, work_tile, keys);
    start_qk(s);
    ptx::wgmma_wait<0>();
    fence_operand(s);
    this->release_keys(work_tile, rank);
    running_softmax_step<kFirst, kRounds>(s, work_tile, keys, visible);
    this->pack(p, s);
  }

  /// P V of the tile before, S and P of this one. kFixed: it is full, and row stabilisers stay.
  template <bool kFixed>
  __device__ __forceinline__ void step(Weights& p, const WorkTile& work_tile, const ListedKeys& keys, int rank) {
    Scores s;
    Visible visible;
    if constexpr (!kFixed) ask_for_bits(visible, work_tile, keys);
    start_qk(s);
    wait_for_values();
    start_pv(p);
    ptx::wgmma_wait<1>();
    fence_operand(s);
    this->release_keys(work_tile, rank);
    if constexpr (kFixed) Base::template softmax_step<RowMaxUpdate::kNone>(s, work_tile, rank);
    ptx::wgmma_wait<0>();
    fence_out();
    this->release_values();
    if constexpr (!kFixed) running_softmax_step<false>(s, work_tile, keys, visible);  // which scales out
    this->pack(p, s);
  }

  /// With a running row max.
  template <bool kFirst, bool kRounds = false>
  __device__ __forceinline__ void running_softmax_step(Scores& s, const WorkTile& work_tile, const ListedKeys& keys,
                                                       const Visible& visible) {
    float sum[2];
    if (keys.bitmap >= 0) hide_by_words(s, visible);
    if ((keys.tile + 1) * kBlockN > work_tile.sequence.seqlen_k)
      hide_outside_window(s, this->coordinates(work_tile, keys.tile), work_tile.sequence);
    this->template update_row_max<kFirst>(s);
    exponentiate<false, kRounds>(s, this->scale_, stabiliser_, sum);
    row_sum_[0] += sum[0];
    row_sum_[1] += sum[1];
  }

  /// Of this lane's rows: asked for ahead of S.
  __device__ __forceinline__ void ask_for_bits(Visible& visible, const WorkTile& work_tile,
                                               const ListedKeys& keys) const {
    if (keys.bitmap < 0) return;
    const BlockMaskParams& blocks = p_.blocks;
    const int block_m = static_cast<int>(blocks.block_m), words = static_cast<int>(blocks.block_n) / 32;
    const int row = (work_tile.first_query + warpgroup_ * kWarpgroupRows) % block_m + warp_ * 16 + lane_ / 4;
    const int32_t* const g_row = blocks.bitmaps + (int64_t{keys.bitmap} * block_m + row) * words + keys.offset / 32;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int w = 0; w < kWords; ++w) visible.words[r][w] = static_cast<uint32_t>(__ldg(g_row + 8 * r * words + w));
  }

  __device__ __forceinline__ void hide_by_words(Scores& s, const Visible& visible) const {
    const int first = 2 * (lane_ % 4);
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!(visible.words[e / 2][n / 4] >> first >> (8 * (n % 4) + e % 2) & 1u)) s[0][n][e] = -INFINITY;
  }

  /// As the plain kernel's; rows that the mask leaves nothing of have no stabiliser.
  __device__ __forceinline__ void look_for_failure(WorkTile& work_tile) const {
    const TileCoordinates<false> at = this->coordinates(work_tile, 0);
    bool failed = false, overflowed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (at.row(0, 2 * r) >= work_tile.end_query) continue;
      const bool met = trace_of_row(out_, r) != 0.0f;
      failed |= met;
      overflowed |= Base::has_overflowed(row_sum_[r], met) || !FixedStabiliser<Element>::serves(stabiliser_[r]);
    }
    Base::record_failure(work_tile, failed, overflowed);
  }

  /// Among all keys: the lists say who sees them.
  __device__ __forceinline__ void add_hidden_non_finite(const WorkTile& work_tile) const {
    const Sequence& sequence = work_tile.sequence;
    const int first_row = work_tile.first_query + warpgroup_ * kWarpgroupRows;
    ptx::barrier_any<kWarpgroupThreads>(1 + warpgroup_, false);  // out is written
    add_non_finite<Element, kWarpgroupThreads>(p_, sequence, query_rows<Element>(p_.out, sequence),
                                               key_rows<Element, false>(p_, p_.v, sequence), first_row,
                                               min(first_row + kWarpgroupRows, work_tile.end_query), 0,
                                               sequence.seqlen_k, static_cast<int>(threadIdx.x) % kWarpgroupThreads);
  }

  ForwardBlocksStorage<Config>& storage_;
};

/// A list of tiles of queries, and where the blocks of each begin.
struct ForwardBlocksSchedule : ForwardSchedule {
  const int32_t* offsets;
  int64_t batch_stride, head_stride;
  int block_m, tiles_of_block, most_blocks;

  /// Leaves a work tile that was made for a position what the mask lists for it.
  template <class WorkTile>
  __device__ __forceinline__ void trim(int64_t, WorkTile& work_tile) const {
    const int32_t* const row = offsets + work_tile.sequence.batch * batch_stride +
                               work_tile.sequence.head * head_stride + work_tile.first_query / block_m;
    const int begin = min(max(row[0], 0), most_blocks), end = min(max(row[1], begin), most_blocks);
    work_tile.list_blocks(begin, end - begin, tiles_of_block);
  }
};

/// Warpgroup 0 loads, the others compute.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    forward_blocks_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardMaps maps,
                          const __grid_constant__ ForwardBlocksSchedule schedule,
                          const __grid_constant__ ScoreTerms terms) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<ForwardBlocksStorage<Config>*>(shared + Config::kTilesBytes);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ForwardBlocksProducer<Config> producer(p, maps, storage, shared, lane);
  if (threadIdx.x == 0) storage.init_barriers();
  if (warp == 1 && lane == 0) producer.prefetch_maps();
  if (warp == 3 && lane == 0) producer.make_first_work_tile(schedule);
  __syncthreads();
  if (warp < kWarpgroupWarps) {
    ptx::release_registers<Config::kProducerRegisters>();
    if (warp == 0) producer.load_keys();
    if (warp == 1) producer.load_queries_and_store_out();
    if (warp == 2) producer.sanitise_values();
    if (warp == 3 && lane == 0) producer.schedule_work_tiles(schedule);
  } else {
    ptx::acquire_registers<Config::kRegisters>();
    ForwardBlocksConsumer<Config>(p, terms, storage, ptx::shared_address(shared), warp / kWarpgroupWarps - 1, lane,
                                  static_cast<float>(p.softmax_scale) * kLog2E)
        .run();
  }
}

template <class Config>
void launch_forward_blocks(const ForwardParams& p, void* workspace, cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(ForwardBlocksStorage<Config>);
  static_assert(Config::kCtasPerSm * (kSharedBytes + kReservedSharedBytes) <= 228 * 1024, "what an SM has");
  const LongestFirst order = forward_blocks_order(p, Config::kBlockM);
  const WorkList list = order.view(workspace);
  list_longest_first(order, list, stream);
  ForwardBlocksSchedule schedule = {
      schedule_forward<Config>(p, workspace), p.blocks.offsets,
      p.blocks.offsets_batch_stride,          p.blocks.offsets_head_stride,
      static_cast<int>(p.blocks.block_m),     static_cast<int>(p.blocks.block_n) / Config::kBlockN,
      static_cast<int>(p.blocks.num_blocks)};
  schedule.list = list;
  schedule.taken = &list.head->taken;
  schedule.work_tiles = order.positions();
  const LaunchShape shape = {dim3(forward_ctas<Config>(schedule)), dim3(Config::kThreads), kSharedBytes, true};
  launch("sm90/forward", forward_blocks_kernel<Config>, shape, stream, p, encode_maps<Config>(p), schedule,
         ScoreTerms(p));
}

template <class Element, int kHeadDim>
void run_forward_blocks(const ForwardParams& p, void* workspace, cudaStream_t stream) {
  launch_forward_blocks<ForwardConfig<Element, kHeadDim, kHeadDim, ForwardVariant::kBlocks>>(p, workspace, stream);
}

}  // namespace flash_ext::sm90
