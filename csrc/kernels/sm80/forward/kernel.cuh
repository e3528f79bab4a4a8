// Attention forward on mma.sync:   out_i = sum_j p_ij v_j / l_i,   p_ij = 2^(s_ij - r_i),   l_i = sum_j p_ij
//
// A CTA owns kBlockM queries of one head; each of its warps owns kWarpRows of them and walks all keys that they see,
// so that warps share nothing but the loads. K and V tiles come through cp.async, one tile ahead.
//
// The stabiliser r_i need not be the running maximum (FlashAttention-2, algorithm 1) as long as nothing overflows. It
// is the maximum of the first tile in which the row sees a key, and stays, so that the loop has neither a maximum nor a
// rescaling of the output. The row sums keep watch: a tile whose sum passes kSumLimit raises the row stabiliser by the
// exponent of the sum, while P is still in float.
//
// What seldom happens is found out at the end, and the CTA then starts again: on the safe path, with the running
// maximum, when even a float overflowed, or a row's sum came to nothing beside its stabiliser; and with V sanitised
// when Inf or NaN in it met a hidden weight, for 0 * Inf is NaN.
//
// A step, for tile n of the keys, from the last to the first, with one stage of shared memory for K and one for V:
//   wait for K(n), barrier: everybody is done with V(n + 1); issue V(n)
//   S = Q K(n)^T
//   wait for V(n), barrier: everybody is done with K(n); issue K(n - 1)
//   P = 2^(S - r), O += P V(n)
// and with two stages, where one barrier is enough:
//   wait for K(n) and V(n), barrier: everybody is done with K(n + 1) and V(n + 1); issue K(n - 1) and V(n - 1)
//   S = Q K(n)^T, P = 2^(S - r), O += P V(n)
#pragma once

#include <new>

#include "kernels/common/mask/tile_range.h"
#include "kernels/common/mask/visibility.cuh"
#include "kernels/common/sanitise_tile.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/common/warp_products.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/lane.h"
#include "kernels/ptx/reread.h"
#include "kernels/sm80/common/config.h"
#include "launch.cuh"
#include "options.cuh"
#include "rows.cuh"
#include "storage.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct ForwardBlock {
  using Element = typename Config::Element;
  using Unit = ScoreUnit<Element>;
  using Products = flash_ext::Products<Element, Config::kHeadDim>;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kBlockM = Config::kBlockM;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kM = Config::kWarpRows / 16;
  static constexpr int kN = kBlockN / 8;
  static constexpr int kD = kHeadDim / 8;
  static constexpr int kSteps = kHeadDim / Products::kDepth;
  static constexpr int kUnroll = Config::kUnroll;
  using Scores = typename ForwardRows<Config>::Scores;
  using Visibility = typename OptionTiles<Config>::Visibility;
  using RandomBits = WarpRandomBits<Config>;
  using KeptWeights = std::conditional_t<Config::kOneDropout, typename RandomBits::Kept, NoRandomBits>;

  const ForwardParams& p;
  const ForwardSchedule& schedule;
  ForwardWorkTile<Config>& work_tile;
  int warp_row, lane;
  const uint32_t s_q, s_k, s_v;
  int phase = 0;          // which stage the K of this step is in
  uint32_t seen = 0;      // of the mask: visible_tiles of the next tile to visit
  const PhiloxKey seeds;  // of dropout

  ForwardRows<Config> rows;
  typename Products::A r_q[Config::kQueryInRegisters ? kSteps : 1][kM];

  __device__ __forceinline__ ForwardBlock(const ForwardParams& p, const ForwardSchedule& schedule,
                                          ForwardWorkTile<Config>& work_tile, char* shared)
      : p(p),
        schedule(schedule),
        work_tile(work_tile),
        warp_row(threadIdx.x / 32 * Config::kWarpRows),
        lane(threadIdx.x % 32),
        s_q(ptx::shared_address(shared)),
        s_k(s_q + Config::kQueryBytes),
        s_v(s_k + Config::kStages * Config::kTileBytes),
        seeds(seeds_of(p)) {}

  /// Only where they stand in uniform registers, which other classes do without.
  __device__ __forceinline__ static PhiloxKey seeds_of(const ForwardParams& p) {
    if constexpr (!Config::kOneDropout) return {};
    return uniform_seeds(p.dropout);
  }
  __device__ __forceinline__ OptionTiles<Config> options() const {
    return {p, schedule, work_tile, s_q, warp_row, lane};
  }
  /// K or V of the current step, or of the one after it.
  __device__ __forceinline__ uint32_t stage(uint32_t s_ring, int steps_ahead) const {
    return s_ring + (Config::kStages == 1 ? 0u : static_cast<uint32_t>((phase + steps_ahead) & 1)) * Config::kTileBytes;
  }

  __device__ __forceinline__ void load_query(const ForwardWorkTile<Config>& work_tile, int thread) const {
    load_tile<Element, kHeadDim, kThreads, kBlockM>(s_q, query_rows<Element>(p.q, work_tile.sequence),
                                                    work_tile.first_query, work_tile.sequence.seqlen_q,
                                                    static_cast<int>(p.head_dim), thread);
  }
  /// What the copies of a step ask of shared memory: asked for before a wait, which then hides how long that takes.
  struct Source {
    RowSource<Element, Config::kReads> rows;
    int seqlen_k;
  };
  __device__ __forceinline__ Source keys_of(const ForwardWorkTile<Config>& work_tile) const {
    return {with_known(work_tile.keys, p.k), work_tile.sequence.seqlen_k};
  }
  __device__ __forceinline__ Source values_of(const ForwardWorkTile<Config>& work_tile) const {
    return {with_known(work_tile.values, p.v), work_tile.sequence.seqlen_k};
  }
  /// What constant memory knows need not be asked for.
  template <class Rows>
  __device__ __forceinline__ Rows with_known(Rows rows, const TensorView& view) const {
    rows.row_stride = view.row_stride;
    if constexpr (Config::kReads) {
      if (!p.seq.block_table) rows.pages = nullptr;
    }
    return rows;
  }
  /// threadIdx.x; where registers are short, so that its addresses are not kept from step to step. On sm_80 ptxas finds
  /// room for them, but with a mask.
  __device__ __forceinline__ static int copying_thread() {
    const int thread = static_cast<int>(threadIdx.x);
#if __CUDA_ARCH__ >= 900
    constexpr bool kForgets = Config::kRematerialisesThread;
#else
    constexpr bool kForgets = Config::kRematerialisesThread && Config::kOneMask;
#endif
    if constexpr (kForgets) return ptx::reread(thread);
    return thread;
  }
  __device__ __forceinline__ void forget_lane() {
#if __CUDA_ARCH__ >= 900
    constexpr bool kForgets =
        Config::kRematerialisesLane || (kHeadDim == 128 && (Config::kOneBias || Config::kComputes));
#else
    constexpr bool kForgets = Config::kRematerialisesLane;
#endif
    if constexpr (!kForgets) return;
    lane = ptx::reread(lane);
    warp_row = ptx::reread(warp_row);
  }
  __device__ __forceinline__ void load_key(const Source& source, int tile, int steps_ahead, int thread) const {
    load_tile<Element, kHeadDim, kThreads, kBlockN>(stage(s_k, steps_ahead), source.rows, tile * kBlockN,
                                                    source.seqlen_k, static_cast<int>(p.head_dim), thread);
  }
  __device__ __forceinline__ void load_value(const Source& source, int tile, int steps_ahead, int thread) const {
    load_tile<Element, kHeadDim, kThreads, kBlockN>(stage(s_v, steps_ahead), source.rows, tile * kBlockN,
                                                    source.seqlen_k, static_cast<int>(p.head_dim_v), thread);
  }

  __device__ __forceinline__ void query_fragments(int step, typename Products::A (&a)[kM]) const {
    const uint32_t s_lane = s_q + Products::lane_a(lane);
#pragma unroll
    for (int m = 0; m < kM; ++m) Products::load_a(a[m], s_lane, warp_row + 16 * m, step);
  }

  /// S = Q K^T. Beside it dropout draws what it keeps.
  __device__ __forceinline__ void multiply_qk(Scores& s, KeptWeights& kept, int tile) const {
    const uint32_t s_lane = stage(s_k, 0) + Products::lane_b(lane);
    options().start(s);
#pragma unroll kUnroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (Config::kOneDropout) {
        constexpr int kEvery = kSteps / RandomBits::kCalls;
        if (step % kEvery == 0) options().random_bits(seeds, tile).draw(kept, p.dropout.rule, step / kEvery);
      }
      typename Products::A loaded[kM];
      if constexpr (!Config::kQueryInRegisters) query_fragments(step, loaded);
      const auto& a = Config::kQueryInRegisters ? r_q[Config::kQueryInRegisters ? step : 0] : loaded;
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        typename Products::B b;
        Products::load_b(b, s_lane, 8 * n, step);
#pragma unroll
        for (int m = 0; m < kM; ++m) Products::multiply(s[m][n], s[m][n + 1], a[m], b);
      }
    }
  }

  /// Loads do not move up past it: ptxas would load more fragments ahead than it has registers for.
  __device__ __forceinline__ static void fence_loads(int d) {
#if __CUDA_ARCH__ >= 900
    constexpr int kEvery = 8;
#else
    constexpr int kEvery = 16;
#endif
    if (d % kEvery == kEvery - 2) __syncwarp();
  }

  /// O += P V. A step takes the first two tiles of P and moves up the others: registers cannot be indexed in a loop.
  __device__ __forceinline__ void multiply_pv(Scores& s) {
    const uint32_t s_lane = stage(s_v, 0) + Products::lane_b_transposed(lane);
#pragma unroll kUnroll
    for (int step = 0; step < kBlockN / Products::kDepth; ++step) {
      typename Products::A a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) Products::a_from_accumulators(a[m], s[m], 0);
      for_each_score(s, [&](float& x, int m, int n, int e) { x = n + 2 < kN ? s[m][(n + 2) % kN][e] : x; });
#pragma unroll
      for (int d = 0; d < kD; d += 2) {
        typename Products::B b;
        Products::load_b_transposed(b, s_lane, d / 2, step);
#pragma unroll
        for (int m = 0; m < kM; ++m) Products::multiply(rows.out[m][d], rows.out[m][d + 1], a[m], b);
        if constexpr (Config::kFenced) fence_loads(d);
      }
    }
  }

  /// The same with dropout, on packed P.
  __device__ __forceinline__ void multiply_pv(const Scores& s, const KeptWeights& kept) {
    constexpr int kPairSteps = kBlockN / Products::kDepth;
    const uint32_t s_lane = stage(s_v, 0) + Products::lane_b_transposed(lane);
    typename Products::A a[kPairSteps][kM];
#pragma unroll
    for (int step = 0; step < kPairSteps; ++step)
#pragma unroll
      for (int m = 0; m < kM; ++m) Products::a_from_accumulators(a[step][m], s[m], step);
    RandomBits::drop(a, kept);
#pragma unroll
    for (int step = 0; step < kPairSteps; ++step)
#pragma unroll
      for (int d = 0; d < kD; d += 2) {
        typename Products::B b;
        Products::load_b_transposed(b, s_lane, d / 2, step);
#pragma unroll
        for (int m = 0; m < kM; ++m) Products::multiply(rows.out[m][d], rows.out[m][d + 1], a[step][m], b);
        // As in fence_loads().
        if (kHeadDim == 128 && d % 4 == 2) __syncwarp();
      }
  }

  /// What is under way arrives, and the next tile to visit is found.
  __device__ __forceinline__ MaskedTile begin_step(int tile, bool first, int last_tile) {
    const Source keys = keys_of(work_tile), values = values_of(work_tile);
    options().share_random_bits(seeds, tile);
    if (!Config::kMasks && first) {
      ptx::cp_async_wait<1>();  // for Q and K
    } else {
      ptx::cp_async_wait<0>();
    }
    const MaskedTile next = options().find(tile - 1, last_tile, phase + 1, seen);
    if constexpr (Config::kStages == 1) {
      if (!first) load_value(values, tile, 0, copying_thread());
    } else if (next.tile >= last_tile) {
      load_key(keys, next.tile, 1, copying_thread());
      load_value(values, next.tile, 1, copying_thread());
    }
    ptx::cp_async_commit();
    return next;
  }

  /// Q K(n)^T is done. Warps come to the barrier from either kind of step, which __syncthreads does not allow.
  __device__ __forceinline__ void release_key(MaskedTile next) const {
    if constexpr (Config::kStages == 1) {
      ptx::cp_async_wait<0>();
      ptx::barrier_sync<1, kThreads>();
      if (next.tile >= work_tile.tiles.begin) load_key(keys_of(work_tile), next.tile, 1, copying_thread());
      ptx::cp_async_commit();
    }
  }

  __device__ __forceinline__ void finish_step(Scores& s, const KeptWeights& kept, int tile, int next) {
    if (Config::kOneBias || (Config::kReads && schedule.stages_bias)) {
      __syncwarp();  // all lanes have read their part of this tile's bias
      options().load_bias(work_tile, next);
      ptx::cp_async_commit();
    }
    if constexpr (Config::kOneDropout) {
      multiply_pv(s, kept);
    } else {
      options().drop(s, tile);
      multiply_pv(s);
    }
    phase ^= 1;
  }

  template <bool kRounds>
  __device__ __forceinline__ void exponentiate(Scores& s, const RowTerms& terms) {
    const auto hide = [&](Scores& weights) { return options().hide_by_bias(weights); };
    rows.template exponentiate<kRounds>(s, schedule.scale, terms, hide);
  }

  /// V of this step, which has arrived. All warps come here or none, from either kind of step.
  __device__ __forceinline__ void sanitise_value() const {
    const int thread = Config::kMasks ? copying_thread() : static_cast<int>(threadIdx.x);
    if (remove_non_finite<Element, kHeadDim, kThreads, kBlockN>(stage(s_v, 0), thread)) work_tile.met_non_finite = true;
    ptx::barrier_sync<1, kThreads>();
  }

  /// A tile that no window cuts, and whose scores the stabilisers are good for.
  __device__ __forceinline__ void full_step(MaskedTile at, MaskedTile next, const Visibility& visible) {
    Scores s;
    KeptWeights kept;
    multiply_qk(s, kept, at.tile);
    release_key(next);
    const RowTerms terms = options().apply(s, at, visible, phase);
    if (Config::kMasks && work_tile.sanitised) sanitise_value();
    exponentiate<false>(s, terms);
    finish_step(s, kept, at.tile, next.tile);
  }

  /// Any tile. True if the next step has to update the row stabilisers too, as some row has none.
  __device__ __forceinline__ bool partial_step(MaskedTile at, MaskedTile next, const Visibility& visible, bool first) {
    if (Config::kBiases && work_tile.safe_path) options().saturate_bias();
    Scores s;
    KeptWeights kept;
    multiply_qk(s, kept, at.tile);
    release_key(next);
    const RowTerms terms = options().apply(s, at, visible, phase);
    const bool outside_window = at.tile < work_tile.tiles.full_begin || at.tile >= work_tile.tiles.full_end;
    if (outside_window) hide_outside_window(s, options().coordinates(at.tile), work_tile.sequence);
    const auto lift = [&](int m, int r) { return options().alibi_to_come(at.tile, m, r); };
    rows.update_row_max(s, schedule.scale, terms, lift, first);
    const bool exact = rows.some_without_stabiliser(rows_left());
    exponentiate<true>(s, terms);
    if (!Config::kMasks && Config::kStages > 1 && first) {
      ptx::cp_async_wait<1>();  // for V
      __syncthreads();
    }
    if (work_tile.sanitised && (Config::kMasks || outside_window)) sanitise_value();
    finish_step(s, kept, at.tile, next.tile);
    return exact;
  }

  /// Rows of the sequence from this lane's first one on. Seldom: what follows from the lane is not kept for it.
  __device__ __forceinline__ int rows_left() const {
    return work_tile.sequence.seqlen_q - (work_tile.first_query + ptx::reread(warp_row) + ptx::reread(lane) / 4);
  }

  /// Q, and the first tiles of K, V and the bias, which do not have to wait for anybody: `work_tile` need not be what
  /// lies in shared memory.
  __device__ __forceinline__ void begin(const ForwardWorkTile<Config>& work_tile, int tile) {
    if (tile < work_tile.tiles.begin) return;
    const int thread = ptx::reread(static_cast<int>(threadIdx.x));
    load_query(work_tile, thread);
    load_key(keys_of(work_tile), tile, 0, thread);
    options().load_bias(work_tile, tile);
    ptx::cp_async_commit();
    load_value(values_of(work_tile), tile, 0, thread);
    ptx::cp_async_commit();
    if constexpr (Config::kQueryInRegisters) {
      ptx::cp_async_wait<1>();
      __syncthreads();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) query_fragments(step, r_q[step]);
    }
  }

  /// All tiles, from the start. Warps may differ in what step they take: either has the same barriers.
  __device__ __forceinline__ void visit() {
    MaskedTile at = options().find_first(phase, seen);
    if (Config::kMasks || work_tile.sanitised) begin(work_tile, at.tile);
    rows.clear();
    bool exact = true;
#pragma unroll 1
    while (at.tile >= work_tile.tiles.begin) {
      const TileSpan tiles = work_tile.tiles;
      const bool first = at.tile == tiles.end - 1;
      const bool full = !Config::kRunningMaximum && !exact && at.tile >= tiles.full_begin && at.tile < tiles.full_end;
      forget_lane();
      Visibility visible;
      if constexpr (Config::kLooksEarly) options().look_at_mask(visible, at);
      const MaskedTile next = begin_step(at.tile, first, tiles.begin);
      if constexpr (!Config::kLooksEarly) options().look_at_mask(visible, at);
      if (full) {
        full_step(at, next, visible);
      } else {
        exact = partial_step(at, next, visible, first) || work_tile.safe_path;
      }
      at = next;
    }
  }

  /// Also when Inf or NaN came into out where something is hidden: a hidden weight is 0, and 0 * Inf is NaN.
  __device__ __forceinline__ bool needs_recompute() const {
    const TileSpan& tiles = work_tile.tiles;
    const bool hides = options().masked() || tiles.full_begin > tiles.begin || tiles.full_end < tiles.end;
    const bool lost = __syncthreads_or(rows.lost(rows_left(), options().stages_bias()));
    if (!lost && !__syncthreads_or(!work_tile.sanitised && hides && !rows.out_is_finite())) return false;
    const int thread = static_cast<int>(threadIdx.x);
    if ((Config::kFullPrecision ? ptx::reread(thread) : thread) == 0)
      work_tile.sanitised = true, work_tile.safe_path = lost;
    __syncthreads();
    return true;
  }

  __device__ __forceinline__ void run() {
    bool repeat;
#pragma unroll 1
    do {
      visit();
      repeat = !work_tile.safe_path && needs_recompute();
      phase = 0;
    } while (repeat);
    store();
  }

  /// Normalises the rows; out goes through the warp's own rows of Q in shared memory, so that it leaves in 16-byte
  /// pieces.
  __device__ __forceinline__ void store() {
    const Sequence& sequence = work_tile.sequence;
    const int first_query = work_tile.first_query;
    __syncwarp();
    const float sink = p.sink ? static_cast<const float*>(p.sink)[sequence.head] : -INFINITY;
    float keep_scale = 1.0f;
    if constexpr (Config::kDropout) keep_scale = work_tile.options.dropout.keep_scale;
    float* g_lse = static_cast<float*>(p.lse.data) + sequence.lse_offset(p.lse);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scale = Unit::kNatural ? schedule.scale : 1.0f;
        const RowEnd end = finish_row<Unit>(rows.stabiliser[m][r], rows.row_sum(m, r), sink, scale);
        const int row = warp_row + 16 * m + 8 * r + lane / 4;
        if (lane % 4 == 0 && first_query + row < sequence.seqlen_q) g_lse[first_query + row] = end.lse;
        const float factor = end.scale * keep_scale;
#pragma unroll
        for (int d = 0; d < kD; ++d)
          Products::store_pair(s_q + Products::pair_at(row, d, lane), rows.out[m][d][2 * r] * factor,
                               rows.out[m][d][2 * r + 1] * factor);
      }
    __syncwarp();
    const auto g_rows = query_rows<Element>(p.out, sequence);
    store_rows<Element, kHeadDim>(s_q, g_rows, warp_row, Config::kWarpRows, first_query, sequence.seqlen_q,
                                  static_cast<int>(p.head_dim_v), lane);
    __syncthreads();  // out is written
    if (work_tile.met_non_finite) {
      add_non_finite<Element, kThreads>(p, sequence, g_rows, work_tile.values, first_query,
                                        min(first_query + kBlockM, sequence.seqlen_q), work_tile.tiles.begin * kBlockN,
                                        min(work_tile.tiles.end * kBlockN, sequence.seqlen_k));
    }
  }
};

/// A grid of (heads of a group x batch entries that share a bias, CTAs of queries, groups of both), scheduled in this
/// order: the blocks with the most keys first, which balances a causal mask, of no more heads than whose keys stay in
/// L2, and what reads the same bias side by side. Or a list, and a grid of as many CTAs as it may have work tiles.
template <class Config>
__device__ __forceinline__ TileIndex tile_of_block(const ForwardParams& p, const ForwardSchedule& schedule) {
  if (schedule.list) return schedule.list.locate(static_cast<int>(blockIdx.x));
  int batch = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.x);
  int tile = static_cast<int>(gridDim.y - 1 - blockIdx.y);
  if (Config::kBiases && schedule.batches > 1) {
    const int group = batch / schedule.batch_groups;
    batch = batch % schedule.batch_groups * schedule.batches + head % schedule.batches;
    head = group * schedule.heads + head / schedule.batches;
    if (head >= static_cast<int>(p.heads_q) || batch >= static_cast<int>(p.batch)) tile = kNoTile;
  } else if (schedule.groups > 1) {
    head += batch % schedule.groups * schedule.heads;
    batch /= schedule.groups;
    if (head >= static_cast<int>(p.heads_q)) tile = kNoTile;
  }
  return {batch, head, tile};
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardSchedule schedule) {
  extern __shared__ __align__(128) char shared[];
  const TileIndex tile = tile_of_block<Config>(p, schedule);
  if (tile.tile == kNoTile) return;
  const int batch = tile.sequence, head = tile.head, first_query = tile.tile * Config::kBlockM;
  ForwardWorkTile<Config> work_tile(p, batch, head, first_query);
  work_tile.mask.find(schedule.mask, batch, head, first_query);
  if (first_query >= work_tile.sequence.seqlen_q) return;
  auto* const s_work_tile = reinterpret_cast<ForwardWorkTile<Config>*>(shared + Config::kTilesBytes);
  if (threadIdx.x == 0) new (s_work_tile) ForwardWorkTile<Config>(work_tile);
  ForwardBlock<Config> block(p, schedule, *s_work_tile, shared);
  // A mask may leave nothing of the first tiles.
  if constexpr (!Config::kMasks) block.begin(work_tile, work_tile.tiles.end - 1);
  __syncthreads();
  block.run();
}

template <class Config>
void launch_forward(const ForwardParams& p, const MaskBits& mask, void* list, cudaStream_t stream) {
  ForwardSchedule schedule = schedule_heads(p, sizeof(typename Config::Element));
  const int64_t shared_bytes = plan_options<Config>(schedule, p);
  if constexpr (Config::kMasks) schedule.mask = mask;
  const WorkListPlan plan = forward_work_list(p, Config::kBlockM);
  schedule.list = plan.view(list);
  fill_work_list(p, plan, schedule.list, stream);
  const dim3 grid =
      plan.listed ? grid_of(plan.max_work_tiles())
                  : grid_of(int64_t{schedule.heads} * schedule.batches, tiles_of_rows(p.seqlen_q, Config::kBlockM),
                            int64_t{schedule.batch_groups} * schedule.groups);
  launch("sm80/forward", forward_kernel<Config>, {grid, dim3(Config::kThreads), static_cast<size_t>(shared_bytes)},
         stream, p, schedule);
}

template <class Element, int kHeadDim, bool kSmall>
void run_forward_as(const ForwardParams& p, const MaskBits& mask, void* list, cudaStream_t stream) {
  const auto run = [&](auto wanted) {
    constexpr ForwardVariant kVariant = available_variant(decltype(wanted)::value, sizeof(Element) == 4, kHeadDim);
    launch_forward<ForwardConfig<Element, kHeadDim, kVariant, kSmall>>(p, mask, list, stream);
  };
  switch (variant_of(p)) {
    case ForwardVariant::kPlain:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kPlain>());
    case ForwardVariant::kComputes:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kComputes>());
    case ForwardVariant::kReads:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kReads>());
    case ForwardVariant::kBias:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kBias>());
    case ForwardVariant::kFloatBias:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kFloatBias>());
    case ForwardVariant::kMask:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kMask>());
    case ForwardVariant::kDrops:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kDrops>());
  }
}

/// `list`: memory for the work list.
template <class Element, int kHeadDim>
void run_forward(const ForwardParams& p, const MaskBits& mask, void* list, cudaStream_t stream) {
  constexpr bool kFloat = sizeof(Element) == 4;
  if constexpr (has_small_forward(kHeadDim, kFloat)) {
    if (takes_small_forward(kHeadDim, kFloat, shared_bytes_per_block(), shared_bytes_per_sm()))
      return run_forward_as<Element, kHeadDim, true>(p, mask, list, stream);
  }
  run_forward_as<Element, kHeadDim, false>(p, mask, list, stream);
}

}  // namespace flash_ext::sm80
