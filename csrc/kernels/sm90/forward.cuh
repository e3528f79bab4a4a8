// Attention forward on wgmma:   out_i = sum_j p_ij v_j / l_i,   p_ij = 2^(s_ij - r_i),   l_i = sum_j p_ij
//
// A block goes through tiles of kBlockM queries of one head, each from the last tile of keys that it sees to the first.
// Two or three warpgroups compute, 64 queries each, and wait for nobody but the loads; the warps of one more bring
// work, Q, K and V through the copy engine (forward_load.cuh). A warpgroup's step, for tile n of the keys:
//   wait for K(n); S = Q K(n)^T; P = 2^(S - r); K(n) is free
//   wait for V(n); O += P V(n); V(n) is free
// What one warpgroup does beside products hides behind the products of the others. So does the end of a tile of
// queries, as Q of the next one comes when the last S is computed, and out leaves from registers.
//
// The reference r_i need not be the running maximum (FlashAttention-2, algorithm 1) as long as nothing overflows. It is
// the maximum of the first tile in which the row sees a key, and stays, so that the loop has neither a maximum nor a
// rescaling of the output. The row sums keep watch: where a sum of a tile passes kSumLimit, the warpgroup computes S of
// this tile again, raises the references to the maximum so far, and rescales.
#pragma once

#include <algorithm>

#include "../common/scores.cuh"
#include "../launch.h"
#include "../ptx/barrier.h"
#include "../ptx/setmaxnreg.h"
#include "../ptx/wgmma.h"
#include "forward_load.cuh"
#include "tensor_map.h"

namespace flash_ext::sm90 {

/// What one warpgroup does. Barriers are arrived at by warps: wgmma's wait is one of each warp.
template <class Config>
class ForwardGroup {
 public:
  using Element = typename Config::Element;
  using State = ForwardState<Config>;
  using Work = ForwardWork<Config>;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kD = kHeadDim / 8;
  static constexpr int kN = kBlockN / 8;
  static constexpr int kSteps = kBlockN / 16;  // of P V
  using Scores = float[1][kN][4];
  using QueryTile = TileDescriptor<kGroupRows>;
  using KeyTile = TileDescriptor<kBlockN>;  // and of values

  __device__ __forceinline__ ForwardGroup(const ForwardParams& p, State& state, uint32_t s_tiles, int group, int lane)
      : p_(p),
        state_(state),
        group_(group),
        lane_(lane),
        warp_(static_cast<int>(threadIdx.x) / 32 % kGroupWarps),
        scale_(Config::kOptions ? 1.0f : static_cast<float>(p.softmax_scale) * kLog2E),
        query_(QueryTile::lower_half(s_tiles + group * Config::kQueryBytes)),
        keys_(KeyTile::lower_half(s_tiles + Config::kGroups * Config::kQueryBytes)) {}

  __device__ __forceinline__ void run() {
    WorkQueue<Config> queue(state_);
    while (const Work* const work = queue.front()) {
      clear();
      visit(*work);
      store(*work);
      queue.pop(lane_);
    }
  }

 private:
  __device__ __forceinline__ static uint32_t address(const uint64_t& barrier) { return ptx::shared_address(&barrier); }

  __device__ __forceinline__ void release(const uint64_t& barrier) const {
    if (lane_ == 0) ptx::mbarrier_arrive(address(barrier));
  }

  __device__ __forceinline__ void clear() {
    met_non_finite_ = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reference_[r] = -INFINITY;
      row_sum_[r] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) out_[d][e] = 0.0f;
  }

  __device__ __forceinline__ void visit(const Work& work) {
    const TileSpan rows = work.rows[group_];
    const int begin = work.tiles.begin;
    int tile = work.tiles.end - 1;
    if (rows.begin < rows.end) {
      ptx::mbarrier_wait(address(state_.q_full[group_]), query_parity_);
      query_parity_ ^= 1;
    }
    const int full_begin = work.tiles.full_begin, full_end = work.tiles.full_end;
    for (; tile >= rows.end; --tile) pass(work, tile);
    bool exact = true;
#pragma unroll 1
    for (; tile >= rows.begin; --tile) {
      if (!exact && tile >= full_begin && tile < full_end) {
        step<true>(work, tile, tile == rows.begin, false);
      } else {
        // To all warps the same: a product of the warpgroup has to be one instruction.
        const bool more = step<false>(work, tile, tile == rows.begin, exact);
        exact = exact && ptx::barrier_any<kGroupThreads>(1 + group_, more);
      }
    }
    for (; tile >= begin; --tile) pass(work, tile);
  }

  /// A tile that other warpgroups see. Their use of the barriers must not fall behind ours by a whole turn, so we wait.
  __device__ __forceinline__ void pass(const Work& work, int tile) {
    ptx::mbarrier_wait(address(state_.k_full[at_.stage]), at_.parity);
    release(state_.k_empty[at_.stage]);
    ptx::mbarrier_wait(address(state_.v_full[at_.stage]), at_.parity);
    release(state_.v_empty[at_.stage]);
    if (work.is_partial(tile)) clean_.advance();
    at_.advance();
  }

  /// kFull: every row of the block sees all of the tile, and every row of the warpgroup has a reference. Else with
  /// `exact` the references are raised to the maximum. Returns whether the next tile needs that too, as some row of the
  /// warp has none.
  template <bool kFull>
  __device__ __forceinline__ bool step(const Work& work, int tile, bool last, bool exact) {
    Scores s;
    float sum[2];
    ptx::mbarrier_wait(address(state_.k_full[at_.stage]), at_.parity);
    multiply_qk(s);
    apply_options(s, work, tile);
    if constexpr (!kFull) {
      hide(s, work, tile);
      if (exact) raise_reference(s);
    }
    exponentiate(s, sum);
    if (ptx::barrier_any<kGroupThreads>(1 + group_, fmaxf(sum[0], sum[1]) > Config::kSumLimit)) {
      multiply_qk(s);
      apply_options(s, work, tile);
      hide(s, work, tile);
      raise_reference(s);
      exponentiate(s, sum);
    }
    release(state_.k_empty[at_.stage]);
    if (last) release(state_.q_empty[group_]);
    row_sum_[0] += sum[0];
    row_sum_[1] += sum[1];
    ptx::mbarrier_wait(address(state_.v_full[at_.stage]), at_.parity);
    if (!kFull && work.is_partial(tile)) wait_for_clean_value();
    multiply_pv(s);
    release(state_.v_empty[at_.stage]);
    at_.advance();
    return exact && some_row_without_reference();
  }

  __device__ __forceinline__ void hide(Scores& s, const Work& work, int tile) const {
    const TileSpan& rows = work.rows[group_];
    if (tile >= rows.full_begin && tile < rows.full_end) return;
    hide_outside_window(s, coordinates(work, tile), work.sequence);
  }

  /// Products to base-2 scores; hiding comes after.
  __device__ __forceinline__ void apply_options(Scores& s, const Work& work, int tile) const {
    if constexpr (Config::kOptions) {
      const ScoreRules<Element> rules(p_, work.sequence);
      rules.scale_and_cap(s);
      rules.add_alibi(s, coordinates(work, tile));
    }
  }

  __device__ __forceinline__ TileCoordinates<false> coordinates(const Work& work, int tile) const {
    const int row = work.first_query + group_ * kGroupRows + warp_ * 16;
    return TileCoordinates<false>::of_lane(row, tile * kBlockN, lane_);
  }

  __device__ __forceinline__ void wait_for_clean_value() {
    ptx::mbarrier_wait(address(state_.v_clean[clean_.stage]), clean_.parity);
    met_non_finite_ |= state_.met_non_finite[clean_.stage] != 0;
    clean_.advance();
  }

  /// S = Q K^T
  __device__ __forceinline__ void multiply_qk(Scores& s) const {
    using Product = ptx::Wgmma<Element, kBlockN>;
    const uint32_t key = keys_ + at_.stage * (Config::kTileBytes / 16);
    ptx::wgmma_fence();
    Product::template multiply<false>(s[0], QueryTile::at(query_, 0), KeyTile::at(key, 0));
#pragma unroll
    for (int step = 1; step < kHeadDim / 16; ++step)
      Product::template multiply<true>(s[0], QueryTile::at(query_, QueryTile::along_row(step)),
                                       KeyTile::at(key, KeyTile::along_row(step)));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    for_each_score(s, [](float& x, int, int, int) { ptx::pin(x); });
  }

  /// O += P V
  __device__ __forceinline__ void multiply_pv(const Scores& s) {
    using Product = ptx::Wgmma<Element, kHeadDim>;
    const uint32_t value = keys_ + (Config::kStages + at_.stage) * (Config::kTileBytes / 16);
    uint32_t p[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        p[step][e] = ptx::pack2<Element>(s[0][2 * step + e / 2][e % 2 * 2], s[0][2 * step + e / 2][e % 2 * 2 + 1]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      Product::accumulate_transposed(out_, p[step], KeyTile::at(value, KeyTile::down_rows(step)));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) ptx::pin(out_[d][e]);
  }

  /// Makes the maximum so far the reference of each row.
  __device__ __forceinline__ void raise_reference(const Scores& s) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = -INFINITY;
#pragma unroll
      for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(s[0][n][2 * r], s[0][n][2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const float raised = fmaxf(reference_[r], largest * scale_);
      const float factor = raised == -INFINITY ? 1.0f : ptx::exp2_approx(reference_[r] - raised);
      reference_[r] = raised;
      row_sum_[r] *= factor;
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        out_[d][2 * r] *= factor;
        out_[d][2 * r + 1] *= factor;
      }
    }
  }

  __device__ __forceinline__ bool some_row_without_reference() const {
    return __any_sync(~0u, reference_[0] == -INFINITY || reference_[1] == -INFINITY);
  }

  /// P in place of S, and this thread's share of the row sums.
  __device__ __forceinline__ void exponentiate(Scores& s, float (&sum)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float shift = reference_[r] == -INFINITY ? 0.0f : reference_[r];
      sum[r] = 0.0f;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float x = ptx::exp2_approx(fmaf(s[0][n][2 * r + c], scale_, -shift));
          s[0][n][2 * r + c] = x;
          sum[r] += x;
        }
    }
  }

  /// Normalises the rows and writes them from registers, in 16-byte pieces.
  __device__ __forceinline__ void store(const Work& work) const {
    const Sequence& sequence = work.sequence;
    const int first_row = work.first_query + group_ * kGroupRows;
    if (first_row >= work.end_query) return;
    const float sink = p_.sink ? static_cast<const float*>(p_.sink)[sequence.head] : -INFINITY;
    float* g_lse = static_cast<float*>(p_.lse.data) + sequence.lse_offset(p_.lse);
    const auto rows = query_rows<Element>(p_.out, sequence);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = row_sum_[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const RowEnd end = finish_row(reference_[r], sum, sink);
      const int row = first_row + warp_ * 16 + 8 * r + lane_ / 4;
      const bool exists = row < work.end_query;
      if (lane_ % 4 == 0 && exists) g_lse[row] = end.lse;
      store_row(exists ? rows.row(row) : nullptr, r, end.scale);
    }
    if (met_non_finite_) add_hidden_non_finite(work, rows);
  }

  /// A quad of lanes holds a row, each of them two columns of eight. They exchange what they have of 32 columns, so
  /// that each has eight of them.
  __device__ __forceinline__ void store_row(Element* g_row, int r, float factor) const {
    const bool odd = lane_ & 1, upper = lane_ & 2;
#pragma unroll
    for (int d = 0; d < kD; d += 4) {
      uint32_t w[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        w[k] = ptx::pack2<Element>(out_[d + k][2 * r] * factor, out_[d + k][2 * r + 1] * factor);
      exchange(w[0], w[1], odd, 1);
      exchange(w[2], w[3], odd, 1);
      exchange(w[0], w[2], upper, 2);
      exchange(w[1], w[3], upper, 2);
      const int column = 8 * (d + lane_ % 4);
      if (g_row && column < p_.head_dim_v) *reinterpret_cast<uint4*>(g_row + column) = uint4{w[0], w[1], w[2], w[3]};
    }
  }

  /// The lower of two lanes gets both their a, the upper one both their b.
  __device__ __forceinline__ static void exchange(uint32_t& a, uint32_t& b, bool upper, int distance) {
    const uint32_t theirs = __shfl_xor_sync(~0u, upper ? a : b, distance);
    (upper ? a : b) = theirs;
  }

  /// Non-finite values of keys that only some rows see were taken out of V; these rows get them here.
  template <class Rows>
  __device__ __forceinline__ void add_hidden_non_finite(const Work& work, const Rows& rows) const {
    const Sequence& sequence = work.sequence;
    const TileSpan tiles = work.rows[group_];
    const int first_row = work.first_query + group_ * kGroupRows;
    ptx::barrier_any<kGroupThreads>(1 + group_, false);  // out is written
    add_non_finite<Element, kGroupThreads>(p_, sequence, rows, key_rows<Element, false>(p_, p_.v, sequence), first_row,
                                           min(first_row + kGroupRows, work.end_query), tiles.begin * kBlockN,
                                           min(tiles.end * kBlockN, sequence.seqlen_k),
                                           static_cast<int>(threadIdx.x) % kGroupThreads);
  }

  const ForwardParams& p_;
  State& state_;
  const int group_, lane_, warp_;
  const float scale_;            // of scores, to base 2; kOptions has applied it already
  const uint32_t query_, keys_;  // lower halves of descriptors
  RingPosition<Config::kStages> at_, clean_;
  uint32_t query_parity_ = 0;
  bool met_non_finite_ = false;

  float out_[kD][4];
  float reference_[2];  // base 2; -inf while the row has seen no key
  float row_sum_[2];
};

/// Warpgroup 0 loads, the others compute.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardMaps maps,
                   const ForwardSchedule schedule) {
  extern __shared__ __align__(1024) char shared[];
  auto& state = *reinterpret_cast<ForwardState<Config>*>(shared + Config::kTilesBytes);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) state.init();
  __syncthreads();
  if (warp < kGroupWarps) {
    ptx::give_up_registers<Config::kLoaderRegisters>();
    ForwardLoader<Config> loader(p, maps, state, shared, lane);
    if (warp == 0) loader.load_keys();
    if (warp == 1) loader.load_queries();
    if (warp == 2) loader.clean_values();
    if (warp == 3 && lane == 0) loader.schedule_work(schedule);
  } else {
    ptx::take_registers<Config::kRegisters>();
    ForwardGroup<Config>(p, state, ptx::shared_address(shared), warp / kGroupWarps - 1, lane).run();
  }
}

/// Sections of heads that share their way through the keys are equally large, so that the last one is no small one.
template <class Config>
ForwardSchedule schedule_forward(const AttentionParams& p, void* workspace) {
  constexpr int64_t kKeyBytesInL2 = 32 << 20;
  const int64_t key_bytes = std::max<int64_t>(1, p.seqlen_k * (p.head_dim + p.head_dim_v) * 2);
  const int64_t ratio = p.heads_q / p.heads_kv, heads = p.batch * p.heads_q;
  const int64_t fitting = std::clamp<int64_t>(kKeyBytesInL2 / key_bytes * ratio, ratio, heads);
  const int64_t sections = (heads + fitting - 1) / fitting;
  const int64_t even = ((heads + sections - 1) / sections + ratio - 1) / ratio * ratio;
  return {static_cast<int>((p.seqlen_q + Config::kBlockM - 1) / Config::kBlockM), static_cast<int>(grid_size(heads)),
          static_cast<int>(even), static_cast<unsigned long long*>(workspace)};
}

template <class Config>
void launch_forward(const ForwardParams& p, void* workspace, cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(ForwardState<Config>);
  static_assert(kSharedBytes <= 227 * 1024, "a block can have no more");
  const ForwardSchedule schedule = schedule_forward<Config>(p, workspace);
  // Before the maps: it makes the device's context that of the thread, which the driver's function asks for.
  check_cuda(cudaMemsetAsync(workspace, 0, sizeof(*schedule.taken), stream), "sm90/forward");
  const ForwardMaps maps = {encode_tensor_map(p.q, query_shape(p), p.dtype, kGroupRows),
                            encode_tensor_map(p.k, key_shape(p, p.head_dim), p.dtype, Config::kBlockN),
                            encode_tensor_map(p.v, key_shape(p, p.head_dim_v), p.dtype, Config::kBlockN)};
  const int64_t works = static_cast<int64_t>(schedule.heads) * schedule.blocks_m;
  const int64_t blocks = std::min<int64_t>(works, device_attribute(cudaDevAttrMultiProcessorCount));
  launch("sm90/forward", forward_kernel<Config>, {dim3(grid_size(blocks)), dim3(Config::kThreads), kSharedBytes},
         stream, p, maps, schedule);
}

template <class Element, int kHeadDim>
void run_forward(const ForwardParams& p, void* workspace, cudaStream_t stream) {
  const bool options = p.softcap > 0.0 || p.alibi_slopes || static_cast<float>(p.softmax_scale) <= 0.0f;
  options ? launch_forward<ForwardConfig<Element, kHeadDim, true>>(p, workspace, stream)
          : launch_forward<ForwardConfig<Element, kHeadDim, false>>(p, workspace, stream);
}

}  // namespace flash_ext::sm90
