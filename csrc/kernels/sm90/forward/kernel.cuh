// Attention forward on wgmma:   out_i = sum_j p_ij v_j / l_i,   p_ij = 2^(s_ij - r_i),   l_i = sum_j p_ij
//
// A CTA goes through tiles of kBlockM queries of one head, each from the last tile of keys that it sees to the first.
// Two to four warpgroups compute, 64 queries each, and wait for nobody but the loads; the warps of one more load
// work, Q, K and V through TMA, and take out away by it (producer.cuh). A warpgroup's step, for tile n
// of the keys, with P of tile n + 1 in registers:
//   wait for K(n); start S = Q K(n)^T; wait for V(n + 1); start O += P V(n + 1)
//   S is there: K(n) is free; 2^(S - r); O is there: V(n + 1) is free; P = 2^(S - r)
// The exponentials hide behind the products of this warpgroup and of the others. So does the end of a tile of queries,
// as Q of the next one is there by then.
//
// The stabiliser r_i need not be the running maximum (FlashAttention-2, algorithm 1) as long as nothing overflows. It
// is the maximum of the first tile in which the row sees a key, and stays, so that the loop has neither a maximum nor a
// rescaling of the output. What overflows leaves an Inf or NaN, or a huge sum, whatever comes after it: sum and out are
// looked at once, at the end, and the CTA then acquires the tile of queries again: with V sanitised, as a weight of 0
// does not hide Inf and NaN; and where that is not all, on the safe path, with the running maximum.
#pragma once

#include "kernels/common/score/scores.cuh"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/lane.h"
#include "kernels/ptx/reread.h"
#include "kernels/ptx/setmaxnreg.h"
#include "kernels/ptx/wgmma.h"
#include "kernels/sm90/common/score_operand.cuh"
#include "kernels/sm90/common/softmax.cuh"
#include "kernels/sm90/common/store_rows.cuh"
#include "launch.cuh"
#include "producer.cuh"
#include "split_kv.cuh"

namespace flash_ext::sm90 {

/// Whether a tile updates the row stabilisers: the first one of a work tile makes them. None: every row of the
/// warpgroup sees all of the tile, and has a stabiliser.
enum class RowMaxUpdate { kFirst, kMore, kNone };

/// What one warpgroup does. Barriers are arrived at by warps: wgmma's wait is one of each warp.
template <class Config>
class ForwardConsumer {
 public:
  using Element = typename Config::Element;
  using Storage = ForwardStorage<Config>;
  using WorkTile = ForwardWorkTile<Config>;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kD = Config::kHeadDimV / 8;
  static constexpr int kN = kBlockN / 8;
  static constexpr int kSteps = kBlockN / 16;  // of P V
  using Scores = float[1][kN][4];
  using Weights = uint32_t[kSteps][4];  // P as an operand
  using QueryTile = TileDescriptor<kWarpgroupRows>;
  using KeyTile = TileDescriptor<kBlockN>;  // and of values

  __device__ __forceinline__ ForwardConsumer(const ForwardParams& p, const ScoreTerms& terms, Storage& storage,
                                             uint32_t s_tiles, int group, int lane, float scale)
      : p_(p),
        terms_(terms),
        storage_(storage),
        warpgroup_(group),
        lane_(lane),
        warp_(static_cast<int>(threadIdx.x) / 32 % kWarpgroupWarps),
        scale_(scale),
        keys_(KeyTile::lower_half(s_tiles + Config::kKeysOffset)),
        s_tiles_(s_tiles) {}

  __device__ __forceinline__ void run() {
    WorkTileQueue<ForwardStorage<Config>> queue(storage_);
    while (WorkTile* const work_tile = queue.front()) {
      clear();
      visit(*work_tile);
      if (!work_tile->safe_path) look_for_failure(*work_tile);
      store(*work_tile);
      if (work_tile->met_non_finite && !work_tile->part) add_hidden_non_finite(*work_tile, p_);
      queue.pop(lane_);
    }
  }

 protected:
  __device__ __forceinline__ static uint32_t address(const uint64_t& barrier) { return ptx::shared_address(&barrier); }

  __device__ __forceinline__ void release(const uint64_t& barrier) const {
    if (lane_ == 0) ptx::mbarrier_arrive(address(barrier));
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      stabiliser_[r] = -INFINITY;
      row_sum_[r] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) out_[d][e] = 0.0f;
  }

  __device__ __forceinline__ void wait_for_query(const WorkTile& work_tile) {
    if (!work_tile.has_rows(warpgroup_)) return;
    ptx::mbarrier_wait(address(storage_.q_full[query_tile()]), q_at_.parity());
    query_ = QueryTile::lower_half(s_tiles_ + query_tile() * Config::kQueryBytes);
    if constexpr (Config::kScoreOptions || Config::kGeneral) {
      const int rows = work_tile.end_query - (work_tile.first_query + warpgroup_ * kWarpgroupRows);
      if (terms_.cap > 0.0f && rows < kWarpgroupRows) clear_query_rows(rows);
    }
  }

  /// Rows of Q from `first` on, which are not the sequence's. By which way scores are capped is a vote of all rows.
  __device__ __forceinline__ void clear_query_rows(int first) const {
    constexpr int kPieces = kPanelRowBytes / 16;
    auto* const s_query = static_cast<uint4*>(__cvta_shared_to_generic(s_tiles_ + query_tile() * Config::kQueryBytes));
#pragma unroll 1
    for (int panel = 0; panel < panels(kHeadDim); ++panel)
#pragma unroll 1
      for (int at = first * kPieces + warp_ * 32 + lane_; at < kWarpgroupRows * kPieces; at += kWarpgroupThreads)
        s_query[panel * kWarpgroupRows * kPieces + at] = uint4{0, 0, 0, 0};
    ptx::fence_proxy_async_shared();
    ptx::barrier_any<kWarpgroupThreads>(1 + warpgroup_, false);
  }

  /// Of all slots and warpgroups.
  __device__ __forceinline__ int query_tile() const { return q_at_.stage() * Config::kGroups + warpgroup_; }

  __device__ __forceinline__ void visit(const WorkTile& work_tile) {
    const TileSpan& rows = work_tile.rows[warpgroup_];
    int tile = work_tile.tiles.end - 1;
    wait_for_query(work_tile);
    for (; tile >= rows.end; --tile) pass();
    if (!Config::kOverlaps && !work_tile.safe_path) {
      visit_without_overlap(work_tile, tile);
    } else if (work_tile.safe_path) {
#pragma unroll 1
      for (; tile >= rows.begin; --tile) {
        Weights p;
        softmax_tile<RowMaxUpdate::kMore, true>(work_tile, tile, p);
        add_values(p);
      }
    } else if (tile >= rows.begin) {
      Weights p;
      softmax_tile<RowMaxUpdate::kFirst>(work_tile, tile, p);
#pragma unroll 1
      for (--tile; tile >= rows.begin; --tile) {
        if (tile < work_tile.raised_begin[warpgroup_] && tile >= work_tile.plain_begin[warpgroup_]) {
          step<RowMaxUpdate::kNone>(work_tile, tile, p);
        } else {
          step<RowMaxUpdate::kMore>(work_tile, tile, p);
        }
      }
      add_values(p);
    }
    for (; tile >= work_tile.tiles.begin; --tile) pass();
  }

  /// The products of a tile, one after the other: other warpgroups fill the waits.
  __device__ __forceinline__ void visit_without_overlap(const WorkTile& work_tile, int& tile) {
    const TileSpan& rows = work_tile.rows[warpgroup_];
#pragma unroll 1
    for (; tile >= rows.begin; --tile) {
      Weights p;
      const bool has_stabilisers = tile < rows.end - 1 && tile < work_tile.raised_begin[warpgroup_];
      if (has_stabilisers && tile >= work_tile.plain_begin[warpgroup_]) {
        softmax_tile<RowMaxUpdate::kNone>(work_tile, tile, p);
      } else {
        softmax_tile<RowMaxUpdate::kMore>(work_tile, tile, p);
      }
      add_values(p);
    }
  }

  __device__ __forceinline__ void wait_for_keys() const {
    ptx::mbarrier_wait(address(storage_.k_full[k_at_.stage()]), k_at_.parity());
  }

  /// S of the tile is computed, for the last time.
  __device__ __forceinline__ void release_keys(const WorkTile& work_tile, int tile) {
    release(storage_.k_empty[k_at_.stage()]);
    k_at_.advance();
    if (Config::kOutInRings && tile == work_tile.last_tile(warpgroup_)) release(storage_.q_empty[warpgroup_]);
  }

  __device__ __forceinline__ void wait_for_values() const {
    ptx::mbarrier_wait(address(storage_.v_full[v_at_.stage()]), v_at_.parity());
  }

  __device__ __forceinline__ void release_values() {
    release(storage_.v_empty[v_at_.stage()]);
    v_at_.advance();
  }

  /// S and P of a tile. kRounds: on the safe path, which serves scores of any size.
  template <RowMaxUpdate kRowMaxUpdate, bool kRounds = false>
  __device__ __forceinline__ void softmax_tile(const WorkTile& work_tile, int tile, Weights& p) {
    Scores s;
    wait_for_keys();
    start_qk(s);
    ptx::wgmma_wait<0>();
    fence_operand(s);
    release_keys(work_tile, tile);
    softmax_step<kRowMaxUpdate, kRounds>(s, work_tile, tile);
    pack(p, s);
  }

  /// P V of a tile.
  __device__ __forceinline__ void add_values(const Weights& p) {
    wait_for_values();
    start_pv(p);
    ptx::wgmma_wait<0>();
    fence_out();
    release_values();
  }

  /// P V of the tile before, S and P of this one.
  template <RowMaxUpdate kRowMaxUpdate>
  __device__ __forceinline__ void step(const WorkTile& work_tile, int tile, Weights& p) {
    Scores s;
    wait_for_keys();
    start_qk(s);
    wait_for_values();
    start_pv(p);
    ptx::wgmma_wait<1>();
    fence_operand(s);
    release_keys(work_tile, tile);
    if constexpr (kRowMaxUpdate == RowMaxUpdate::kNone) softmax_step<kRowMaxUpdate>(s, work_tile, tile);
    ptx::wgmma_wait<0>();
    fence_out();
    release_values();
    if constexpr (kRowMaxUpdate != RowMaxUpdate::kNone)
      softmax_step<kRowMaxUpdate>(s, work_tile, tile);  // which scales out
    pack(p, s);
  }

  /// S to P, whose sums are added up.
  template <RowMaxUpdate kRowMaxUpdate, bool kRounds = false>
  __device__ __forceinline__ void softmax_step(Scores& s, const WorkTile& work_tile, int tile) {
    constexpr bool kPlain = kRowMaxUpdate == RowMaxUpdate::kNone;
    float sum[2];
    apply_options(s, work_tile, tile);
    if constexpr (!kPlain) {
      hide(s, work_tile, tile);
      update_row_max<kRowMaxUpdate == RowMaxUpdate::kFirst>(s);
    }
    exponentiate<kPlain, kRounds>(s, scale_, stabiliser_, sum);
    row_sum_[0] += sum[0];
    row_sum_[1] += sum[1];
  }

  /// A tile that other warpgroups see. Their use of the barriers must not fall behind ours by a whole turn, so we wait.
  __device__ __forceinline__ void pass() {
    wait_for_keys();
    release(storage_.k_empty[k_at_.stage()]);
    k_at_.advance();
    wait_for_values();
    release_values();
  }

  /// Whether something overflowed or met Inf or NaN, or a row that sees keys found no stabiliser, or one that is too
  /// large, in this warp's rows.
  __device__ __forceinline__ void look_for_failure(WorkTile& work_tile) const {
    const TileCoordinates<false> at = coordinates(work_tile, 0);
    bool failed = false, overflowed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = at.row(0, 2 * r);
      if (row >= work_tile.end_query) continue;
      const bool met = trace_of_row(out_, r) != 0.0f;
      failed |= met;
      const bool too_large = !FixedStabiliser<Element>::serves(stabiliser_[r]);
      overflowed |= has_overflowed(row_sum_[r], met);
      overflowed |= sees_keys(work_tile, row) && (stabiliser_[r] == -INFINITY || too_large);
    }
    record_failure(work_tile, failed, overflowed);
  }

  /// As far as the window goes.
  __device__ __forceinline__ static bool sees_keys(const WorkTile& work_tile, int row) {
    return max(work_tile.sequence.keys_begin(row), work_tile.tiles.begin * kBlockN) <
           min(work_tile.sequence.keys_end(row), work_tile.tiles.end * kBlockN);
  }

  /// By a lane's share of a row's sum. A quad of lanes shares a row: the limit leaves room for theirs, and for a
  /// sink's. `met`: out is not finite; so weights may have been too large for an Element.
  __device__ __forceinline__ static bool has_overflowed(float sum, bool met) {
    constexpr float kMostSum = 0x1p100f, kMostWeight = std::is_same_v<Element, __half> ? 65504.0f : kMostSum;
    return !(sum <= (met ? kMostWeight : kMostSum));
  }

  __device__ __forceinline__ static void record_failure(WorkTile& work_tile, bool failed, bool overflowed) {
    if (__any_sync(~0u, failed | overflowed)) work_tile.failed = true;
    if (__any_sync(~0u, overflowed)) work_tile.overflowed = true;
  }

  /// Whether window and lengths hide nothing of a tile.
  __device__ __forceinline__ bool is_full(const WorkTile& work_tile, int tile) const {
    const TileSpan& rows = work_tile.rows[warpgroup_];
    return tile >= rows.full_begin && tile < rows.full_end;
  }

  __device__ __forceinline__ void hide(Scores& s, const WorkTile& work_tile, int tile) const {
    if (!is_full(work_tile, tile)) hide_outside_window(s, coordinates(work_tile, tile), work_tile.sequence);
  }

  /// Products to base-2 scores; hiding comes after.
  __device__ __forceinline__ void apply_options(Scores& s, const WorkTile& work_tile, int tile) const {
    if constexpr (Config::kScoreOptions) {
      const ScoreRules<Element> rules = this->rules(work_tile);
      scale_and_cap<Config::kCapsByProducts>(s, rules, terms_.softcap, is_full(work_tile, tile));
      rules.add_alibi(s, coordinates(work_tile, tile));
    }
  }

  __device__ __forceinline__ ScoreRules<Element> rules(const WorkTile& work_tile) const {
    ScoreRules<Element> rules(p_, work_tile.sequence);
    rules.scale = terms_.scale, rules.cap = terms_.cap;  // or doubles are divided here
    if constexpr (Config::kScoreOptions) rules.slope = work_tile.slope;
    return rules;
  }

  __device__ __forceinline__ TileCoordinates<false> coordinates(const WorkTile& work_tile, int tile) const {
    const int row = work_tile.first_query + warpgroup_ * kWarpgroupRows + warp_ * 16;
    return TileCoordinates<false>::of_lane(row, tile * kBlockN, lane_);
  }

  __device__ __forceinline__ static void fence_operand(Scores& s) {
    for_each_score(s, [](float& x, int, int, int) { ptx::fence_operand(x); });
  }

  /// S = Q K^T
  __device__ __forceinline__ void start_qk(Scores& s) const {
    using Product = ptx::Wgmma<Element, kBlockN>;
    const uint32_t key = keys_ + k_at_.stage() * (Config::kKeyBytes / 16);
    ptx::wgmma_fence();
    Product::template multiply<false>(s[0], QueryTile::at(query_, 0), KeyTile::at(key, 0));
#pragma unroll
    for (int step = 1; step < kHeadDim / 16; ++step)
      Product::template multiply<true>(s[0], QueryTile::at(query_, QueryTile::along_row(step)),
                                       KeyTile::at(key, KeyTile::along_row(step)));
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ static void pack(Weights& p, const Scores& s) { pack_operand<Element>(p, s); }

  /// O += P V
  __device__ __forceinline__ void start_pv(const Weights& p) {
    using Product = ptx::Wgmma<Element, Config::kHeadDimV>;
    const uint32_t value =
        keys_ + (v_at_.stage() * (Config::kValueBytes / 16) + Config::kKeyStages * (Config::kKeyBytes / 16));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      Product::accumulate_transposed(out_, p[step], KeyTile::at(value, KeyTile::down_rows(step)));
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void fence_out() {
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) ptx::fence_operand(out_[d][e]);
  }

  /// Makes the maximum so far the stabiliser of each row. kFirst: there is none yet, and out is 0.
  template <bool kFirst = false>
  __device__ __forceinline__ void update_row_max(const Scores& s) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = -INFINITY;
#pragma unroll
      for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(s[0][n][2 * r], s[0][n][2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      if constexpr (kFirst) {
        stabiliser_[r] = largest * scale_;
        continue;
      }
      const float raised = fmaxf(stabiliser_[r], largest * scale_);
      const float factor = raised == -INFINITY ? 1.0f : ptx::exp2_approx(stabiliser_[r] - raised);
      stabiliser_[r] = raised;
      row_sum_[r] *= factor;
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        out_[d][2 * r] *= factor;
        out_[d][2 * r + 1] *= factor;
      }
    }
  }

  /// Normalises the rows and writes them: through shared memory, or from registers.
  __device__ __forceinline__ void store(const WorkTile& work_tile) {
    const int first_row = work_tile.first_query + warpgroup_ * kWarpgroupRows;
    float scale[2], lse[2];
    if (first_row < work_tile.end_query) finish_rows(work_tile, scale, lse);
    if (work_tile.has_out_slots()) {
      wait_for_keys();
      wait_for_values();
    }
    if (first_row < work_tile.end_query) {
      const bool copies_out = work_tile.copies_out(warpgroup_) && !work_tile.met_non_finite;
      if (copies_out) {
        const int offset = out_offset<Config>(warpgroup_, q_at_.stage(), k_at_.stage(), v_at_.stage());
        write_out_tile<Element>(s_tiles_ + offset, out_, scale, warp_ * 16,
                                ptx::reread(lane_));  // or what follows from it takes registers in the loops
      } else if (work_tile.part) {
        store_part(work_tile);
      } else {
        store_rows(work_tile, first_row, scale);
      }
      if (work_tile.publishes(warpgroup_)) publish_out(copies_out);
    }
    if (work_tile.has_rows(warpgroup_)) q_at_.advance();
    if (first_row < work_tile.end_query && !work_tile.part) store_lse(work_tile, first_row, lse);
    if (work_tile.has_out_slots()) {
      release(storage_.k_empty[k_at_.stage()]);
      k_at_.advance();
      release_values();
    }
  }

  /// What normalises the rows of out, and their lse.
  __device__ __forceinline__ void finish_rows(const WorkTile& work_tile, float (&scale)[2], float (&lse)[2]) const {
    float sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = row_sum_[r] + __shfl_xor_sync(~0u, row_sum_[r], 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    RowEnd ends[2];
    if (p_.sink) {
      const float sink = static_cast<const float*>(p_.sink)[work_tile.sequence.head];
#pragma unroll
      for (int r = 0; r < 2; ++r) ends[r] = finish_row(stabiliser_[r], sum[r], sink);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) ends[r] = finish_row_approx(stabiliser_[r], sum[r]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = ends[r].scale;
      lse[r] = ends[r].lse;
    }
  }

  __device__ __forceinline__ void store_lse(const WorkTile& work_tile, int first_row, const float (&lse)[2]) const {
    float* g_lse = static_cast<float*>(p_.lse.data) + work_tile.sequence.lse_offset(p_.lse);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + warp_ * 16 + 8 * r + lane_ / 4;
      if (lane_ % 4 == 0 && row < work_tile.end_query) g_lse[row] = lse[r];
    }
  }

  /// To TMA (producer.cuh).
  __device__ __forceinline__ void publish_out(bool copies_out) {
    storage_.out_is_here[query_tile()] = copies_out;
    // By every thread, for what it wrote. The fence before the copy is that of who starts it.
    ptx::mbarrier_arrive(address(storage_.out_full[query_tile()]));
  }

  /// From registers, in 16-byte pieces.
  __device__ __forceinline__ void store_rows(const WorkTile& work_tile, int first_row, const float (&scale)[2]) const {
    const auto rows = query_rows<Element>(p_.out, work_tile.sequence);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + warp_ * 16 + 8 * r + lane_ / 4;
      Element* const g_row = row < work_tile.end_query ? rows.row(row) : nullptr;
      write_out_row(g_row, out_, r, scale[r], lane_, static_cast<int>(p_.head_dim_v));
    }
  }

  /// As the registers are, for combine_splits_kernel().
  __device__ __forceinline__ void store_part(const WorkTile& work_tile) const {
    float4* const g_part = PartTile<Config>::of_lane(work_tile.part, warpgroup_, warp_, lane_);
#pragma unroll
    for (int d = 0; d < kD; ++d) g_part[d * 32] = float4{out_[d][0], out_[d][1], out_[d][2], out_[d][3]};
    *PartTile<Config>::state(g_part) = float4{stabiliser_[0], stabiliser_[1], row_sum_[0], row_sum_[1]};
    if (lane_ == 0) *PartTile<Config>::met_non_finite(g_part, lane_) = work_tile.met_non_finite;
  }

  /// Non-finite values of keys that only some rows see were taken out of V; these rows get them here.
  __device__ __forceinline__ void add_hidden_non_finite(const WorkTile& work_tile, const AttentionParams& p) const {
    const Sequence& sequence = work_tile.sequence;
    const TileSpan tiles = work_tile.rows[warpgroup_];
    const int first_row = work_tile.first_query + warpgroup_ * kWarpgroupRows;
    const auto rows = query_rows<Element>(p_.out, sequence);
    ptx::barrier_any<kWarpgroupThreads>(1 + warpgroup_, false);  // out is written
    add_non_finite<Element, kWarpgroupThreads>(p, sequence, rows, key_rows<Element, false>(p_, p_.v, sequence),
                                               first_row, min(first_row + kWarpgroupRows, work_tile.end_query),
                                               tiles.begin * kBlockN, min(tiles.end * kBlockN, sequence.seqlen_k),
                                               32 * warp_ + ptx::reread(lane_));
  }

  const ForwardParams& p_;
  const ScoreTerms& terms_;
  Storage& storage_;
  const int warpgroup_, lane_, warp_;
  const float scale_;   // of scores, to base 2; kScoreOptions has applied it already
  uint32_t query_ = 0;  // lower half of the descriptor of this work tile's
  const uint32_t keys_, s_tiles_;
  RingPosition<Config::kQuerySlots> q_at_;
  RingPosition<Config::kKeyStages> k_at_;
  RingPosition<Config::kValueStages> v_at_;

  float out_[kD][4];
  float stabiliser_[2];  // base 2; -inf while the row has seen no key
  float row_sum_[2];
};

/// The class with softcap and ALiBi (scores_kernel.cuh).
template <class Config>
class ForwardScoresConsumer;

/// Warpgroup 0 loads, the others compute.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardMaps maps,
                   const ScheduleOf<Config> schedule, const __grid_constant__ ScoreTerms terms) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<ForwardStorage<Config>*>(shared + Config::kTilesBytes);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = Config::kScoreOptions ? ptx::lane_id() : static_cast<int>(threadIdx.x) % 32;  // read once: registers
  ForwardProducer<Config> producer(p, maps, storage, shared, lane);
  if (threadIdx.x == 0) storage.init_barriers();
  if (warp == 1 && lane == 0) {
    producer.prefetch_maps();
    if constexpr (Config::kSplitsKv) ptx::launch_dependents();  // combine_splits_kernel(), which waits by itself
  }
  if (warp == 3 && lane == 0) producer.make_first_work_tile(schedule);
  __syncthreads();
  if constexpr (Config::kSplitsKv)
    if (!schedule.taken) ptx::wait_for_previous_grid();  // beside whose end this one starts, up to here
  if (warp < kWarpgroupWarps) {
    ptx::release_registers<Config::kProducerRegisters>();
    if (warp == 0) producer.load_keys();
    if (warp == 1) producer.load_queries_and_store_out();
    if (warp == 2) producer.sanitise_values();
    if (warp == 3 && lane == 0) producer.schedule_work_tiles(schedule);
  } else {
    ptx::acquire_registers<Config::kRegisters>();
    using Group = std::conditional_t<Config::kScoreOptions, ForwardScoresConsumer<Config>, ForwardConsumer<Config>>;
    const float scale = Config::kScoreOptions ? 1.0f : static_cast<float>(p.softmax_scale) * kLog2E;
    Group(p, terms, storage, ptx::shared_address(shared), warp / kWarpgroupWarps - 1, lane, scale).run();
  }
}

/// Clears the counter of work tiles, beside which the kernel behind it starts.
void clear_forward_workspace(void* workspace, cudaStream_t stream);

template <class Config>
void launch_forward(const ForwardParams& p, const KeySplits& splits, void* workspace, cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(ForwardStorage<Config>);
  static_assert(kSharedBytes <= 227 * 1024, "a block can have no more");
  const WorkListPlan list = forward_work_list(p, Config::kBlockM);
  const ScheduleOf<Config> schedule = make_schedule<Config>(p, splits, list, workspace);
  if (list.listed) {
    fill_work_list(p, list, schedule.list, stream);
  } else if (schedule.taken) {
    clear_forward_workspace(workspace, stream);
  }
  LaunchShape shape = {dim3(forward_ctas<Config>(schedule)), dim3(Config::kThreads), kSharedBytes};
  // Without a counter it waits by itself, before it reads anything but lengths that lie on the device.
  shape.overlaps_previous = schedule.taken || (Config::kSplitsKv && has_equal_lengths(p));
  launch("sm90/forward", forward_kernel<Config>, shape, stream, p, encode_maps<Config>(p), schedule, ScoreTerms(p));
  if constexpr (Config::kSplitsKv) combine_splits<Config>(p, schedule, stream);
}

}  // namespace flash_ext::sm90
