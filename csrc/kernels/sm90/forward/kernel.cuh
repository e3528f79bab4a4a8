// Attention forward on wgmma:   out_i = sum_j p_ij v_j / l_i,   p_ij = 2^(s_ij - r_i),   l_i = sum_j p_ij
//
// A block goes through tiles of kBlockM queries of one head, each from the last tile of keys that it sees to the first.
// Two to four warpgroups compute, 64 queries each, and wait for nobody but the loads; the warps of one more bring
// work, Q, K and V through TMA, and take out away by it (producer.cuh). A warpgroup's step, for tile n
// of the keys, with P of tile n + 1 in registers:
//   wait for K(n); start S = Q K(n)^T; wait for V(n + 1); start O += P V(n + 1)
//   S is there: K(n) is free; 2^(S - r); O is there: V(n + 1) is free; P = 2^(S - r)
// The exponentials hide behind the products of this warpgroup and of the others. So does the end of a tile of queries,
// as Q of the next one is there by then.
//
// The reference r_i need not be the running maximum (FlashAttention-2, algorithm 1) as long as nothing overflows. It is
// the maximum of the first tile in which the row sees a key, and stays, so that the loop has neither a maximum nor a
// rescaling of the output. What overflows leaves an Inf or NaN, or a huge sum, whatever comes after it: sum and out are
// looked at once, at the end, and the block then takes up the tile of queries again: with V sanitised, as a weight of 0
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

/// Whether a tile raises references: the first one of a work makes them. None: every row of the warpgroup sees all of
/// the tile, and has a reference.
enum class Raise { kFirst, kMore, kNone };

/// What one warpgroup does. Barriers are arrived at by warps: wgmma's wait is one of each warp.
template <class Config>
class ForwardGroup {
 public:
  using Element = typename Config::Element;
  using State = ForwardState<Config>;
  using Work = ForwardWork<Config>;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kD = Config::kHeadDimV / 8;
  static constexpr int kN = kBlockN / 8;
  static constexpr int kSteps = kBlockN / 16;  // of P V
  using Scores = float[1][kN][4];
  using Weights = uint32_t[kSteps][4];  // P as an operand
  using QueryTile = TileDescriptor<kGroupRows>;
  using KeyTile = TileDescriptor<kBlockN>;  // and of values

  __device__ __forceinline__ ForwardGroup(const ForwardParams& p, const ScoreTerms& terms, State& state,
                                          uint32_t s_tiles, int group, int lane, float scale)
      : p_(p),
        terms_(terms),
        state_(state),
        group_(group),
        lane_(lane),
        warp_(static_cast<int>(threadIdx.x) / 32 % kGroupWarps),
        scale_(scale),
        keys_(KeyTile::lower_half(s_tiles + Config::kKeysOffset)),
        s_tiles_(s_tiles) {}

  __device__ __forceinline__ void run() {
    WorkQueue<ForwardState<Config>> queue(state_);
    while (Work* const work = queue.front()) {
      clear();
      visit(*work);
      if (!work->careful) look_for_failure(*work);
      store(*work);
      if (work->met_non_finite) add_hidden_non_finite(*work, p_);
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
      reference_[r] = -INFINITY;
      row_sum_[r] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) out_[d][e] = 0.0f;
  }

  __device__ __forceinline__ void wait_for_query(const Work& work) {
    if (!work.has_rows(group_)) return;
    ptx::mbarrier_wait(address(state_.q_full[query_tile()]), q_at_.parity());
    query_ = QueryTile::lower_half(s_tiles_ + query_tile() * Config::kQueryBytes);
    if constexpr (Config::kOptions || Config::kGeneral) {
      const int rows = work.end_query - (work.first_query + group_ * kGroupRows);
      if (terms_.cap > 0.0f && rows < kGroupRows) clear_query_rows(rows);
    }
  }

  /// Rows of Q from `first` on, which are not the sequence's. By which way scores are capped is a vote of all rows.
  __device__ __forceinline__ void clear_query_rows(int first) const {
    constexpr int kPieces = kPanelRowBytes / 16;
    auto* const s_query = static_cast<uint4*>(__cvta_shared_to_generic(s_tiles_ + query_tile() * Config::kQueryBytes));
#pragma unroll 1
    for (int panel = 0; panel < panels(kHeadDim); ++panel)
#pragma unroll 1
      for (int at = first * kPieces + warp_ * 32 + lane_; at < kGroupRows * kPieces; at += kGroupThreads)
        s_query[panel * kGroupRows * kPieces + at] = uint4{0, 0, 0, 0};
    ptx::fence_proxy_async_shared();
    ptx::barrier_any<kGroupThreads>(1 + group_, false);
  }

  /// Of all places and warpgroups.
  __device__ __forceinline__ int query_tile() const { return q_at_.stage() * Config::kGroups + group_; }

  __device__ __forceinline__ void visit(const Work& work) {
    const TileSpan& rows = work.rows[group_];
    int tile = work.tiles.end - 1;
    wait_for_query(work);
    for (; tile >= rows.end; --tile) pass();
    if (work.careful) {
#pragma unroll 1
      for (; tile >= rows.begin; --tile) {
        Weights p;
        weigh_keys<Raise::kMore>(work, tile, p);
        add_values(p);
      }
    } else if (tile >= rows.begin) {
      Weights p;
      weigh_keys<Raise::kFirst>(work, tile, p);
#pragma unroll 1
      for (--tile; tile >= rows.begin; --tile) {
        if (tile < work.raised_begin[group_] && tile >= work.plain_begin[group_]) {
          step<Raise::kNone>(work, tile, p);
        } else {
          step<Raise::kMore>(work, tile, p);
        }
      }
      add_values(p);
    }
    for (; tile >= work.tiles.begin; --tile) pass();
  }

  __device__ __forceinline__ void wait_for_keys() const {
    ptx::mbarrier_wait(address(state_.k_full[k_at_.stage()]), k_at_.parity());
  }

  /// S of the tile is computed, for the last time.
  __device__ __forceinline__ void release_keys(const Work& work, int tile) {
    release(state_.k_empty[k_at_.stage()]);
    k_at_.advance();
    if (Config::kOutInRings && tile == work.last_tile(group_)) release(state_.q_empty[group_]);
  }

  __device__ __forceinline__ void wait_for_values() const {
    ptx::mbarrier_wait(address(state_.v_full[v_at_.stage()]), v_at_.parity());
  }

  __device__ __forceinline__ void release_values() {
    release(state_.v_empty[v_at_.stage()]);
    v_at_.advance();
  }

  /// S and P of a tile.
  template <Raise kRaise>
  __device__ __forceinline__ void weigh_keys(const Work& work, int tile, Weights& p) {
    Scores s;
    wait_for_keys();
    start_qk(s);
    ptx::wgmma_wait<0>();
    pin(s);
    release_keys(work, tile);
    weigh<kRaise>(s, work, tile);
    pack(p, s);
  }

  /// P V of a tile.
  __device__ __forceinline__ void add_values(const Weights& p) {
    wait_for_values();
    start_pv(p);
    ptx::wgmma_wait<0>();
    pin_out();
    release_values();
  }

  /// P V of the tile before, S and P of this one.
  template <Raise kRaise>
  __device__ __forceinline__ void step(const Work& work, int tile, Weights& p) {
    Scores s;
    wait_for_keys();
    start_qk(s);
    wait_for_values();
    start_pv(p);
    ptx::wgmma_wait<1>();
    pin(s);
    release_keys(work, tile);
    if constexpr (kRaise == Raise::kNone) weigh<kRaise>(s, work, tile);
    ptx::wgmma_wait<0>();
    pin_out();
    release_values();
    if constexpr (kRaise != Raise::kNone) weigh<kRaise>(s, work, tile);  // which scales out
    pack(p, s);
  }

  /// S to P, whose sums are added up.
  template <Raise kRaise>
  __device__ __forceinline__ void weigh(Scores& s, const Work& work, int tile) {
    constexpr bool kPlain = kRaise == Raise::kNone;
    float sum[2];
    apply_options(s, work, tile);
    if constexpr (!kPlain) {
      hide(s, work, tile);
      raise_reference<kRaise == Raise::kFirst>(s);
    }
    exponentiate<kPlain>(s, scale_, reference_, sum);
    row_sum_[0] += sum[0];
    row_sum_[1] += sum[1];
  }

  /// A tile that other warpgroups see. Their use of the barriers must not fall behind ours by a whole turn, so we wait.
  __device__ __forceinline__ void pass() {
    wait_for_keys();
    release(state_.k_empty[k_at_.stage()]);
    k_at_.advance();
    wait_for_values();
    release_values();
  }

  /// Whether something overflowed or met Inf or NaN, or a row that sees keys found no reference, in this warp's rows.
  __device__ __forceinline__ void look_for_failure(Work& work) const {
    const TileCoordinates<false> at = coordinates(work, 0);
    bool failed = false, overflowed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = at.row(0, 2 * r);
      if (row >= work.end_query) continue;
      const bool sees_keys = work.sequence.keys_begin(row) < work.sequence.keys_end(row);
      const bool met = trace_of_row(out_, r) != 0.0f;
      failed |= met;
      overflowed |= has_overflowed(row_sum_[r], met) || (reference_[r] == -INFINITY && sees_keys);
    }
    note_failure(work, failed, overflowed);
  }

  /// By a lane's share of a row's sum. A quad of lanes shares a row: the limit leaves room for theirs, and for a
  /// sink's. `met`: out is not finite; so weights may have been too large for an Element.
  __device__ __forceinline__ static bool has_overflowed(float sum, bool met) {
    constexpr float kMostSum = 0x1p100f, kMostWeight = std::is_same_v<Element, __half> ? 65504.0f : kMostSum;
    return !(sum <= (met ? kMostWeight : kMostSum));
  }

  __device__ __forceinline__ static void note_failure(Work& work, bool failed, bool overflowed) {
    if (__any_sync(~0u, failed | overflowed)) work.failed = true;
    if (__any_sync(~0u, overflowed)) work.overflowed = true;
  }

  /// Whether window and lengths hide nothing of a tile.
  __device__ __forceinline__ bool is_full(const Work& work, int tile) const {
    const TileSpan& rows = work.rows[group_];
    return tile >= rows.full_begin && tile < rows.full_end;
  }

  __device__ __forceinline__ void hide(Scores& s, const Work& work, int tile) const {
    if (!is_full(work, tile)) hide_outside_window(s, coordinates(work, tile), work.sequence);
  }

  /// Products to base-2 scores; hiding comes after.
  __device__ __forceinline__ void apply_options(Scores& s, const Work& work, int tile) const {
    if constexpr (Config::kOptions) {
      const ScoreRules<Element> rules = this->rules(work);
      scale_and_cap<Config::kCapsByProducts>(s, rules, terms_.softcap, is_full(work, tile));
      rules.add_alibi(s, coordinates(work, tile));
    }
  }

  __device__ __forceinline__ ScoreRules<Element> rules(const Work& work) const {
    ScoreRules<Element> rules(p_, work.sequence);
    rules.scale = terms_.scale, rules.cap = terms_.cap;  // or doubles are divided here
    if constexpr (Config::kOptions) rules.slope = work.slope;
    return rules;
  }

  __device__ __forceinline__ TileCoordinates<false> coordinates(const Work& work, int tile) const {
    const int row = work.first_query + group_ * kGroupRows + warp_ * 16;
    return TileCoordinates<false>::of_lane(row, tile * kBlockN, lane_);
  }

  __device__ __forceinline__ static void pin(Scores& s) {
    for_each_score(s, [](float& x, int, int, int) { ptx::pin(x); });
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

  __device__ __forceinline__ void pin_out() {
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) ptx::pin(out_[d][e]);
  }

  /// Makes the maximum so far the reference of each row. kFirst: there is none yet, and out is 0.
  template <bool kFirst = false>
  __device__ __forceinline__ void raise_reference(const Scores& s) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = -INFINITY;
#pragma unroll
      for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(s[0][n][2 * r], s[0][n][2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      if constexpr (kFirst) {
        reference_[r] = largest * scale_;
        continue;
      }
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

  /// Normalises the rows and writes them: through shared memory, or from registers.
  __device__ __forceinline__ void store(const Work& work) {
    const int first_row = work.first_query + group_ * kGroupRows;
    float scale[2], lse[2];
    if (first_row < work.end_query) finish_rows(work, scale, lse);
    if (work.has_out_slots()) {
      wait_for_keys();
      wait_for_values();
    }
    if (first_row < work.end_query) {
      const bool copies_out = work.copies_out(group_) && !work.met_non_finite;
      if (copies_out) {
        const int offset = out_offset<Config>(group_, q_at_.stage(), k_at_.stage(), v_at_.stage());
        write_out_tile<Element>(s_tiles_ + offset, out_, scale, warp_ * 16,
                                ptx::reread(lane_));  // or what follows from it takes registers in the loops
      } else if (work.part) {
        store_part(work);
      } else {
        store_rows(work, first_row, scale);
      }
      if (work.hands_over(group_)) hand_out_over(copies_out);
    }
    if (work.has_rows(group_)) q_at_.advance();
    if (first_row < work.end_query && !work.part) store_lse(work, first_row, lse);
    if (work.has_out_slots()) {
      release(state_.k_empty[k_at_.stage()]);
      k_at_.advance();
      release_values();
    }
  }

  /// What normalises the rows of out, and their lse.
  __device__ __forceinline__ void finish_rows(const Work& work, float (&scale)[2], float (&lse)[2]) const {
    float sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = row_sum_[r] + __shfl_xor_sync(~0u, row_sum_[r], 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    RowEnd ends[2];
    if (p_.sink) {
      const float sink = static_cast<const float*>(p_.sink)[work.sequence.head];
#pragma unroll
      for (int r = 0; r < 2; ++r) ends[r] = finish_row(reference_[r], sum[r], sink);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) ends[r] = finish_row_approx(reference_[r], sum[r]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = ends[r].scale;
      lse[r] = ends[r].lse;
    }
  }

  __device__ __forceinline__ void store_lse(const Work& work, int first_row, const float (&lse)[2]) const {
    float* g_lse = static_cast<float*>(p_.lse.data) + work.sequence.lse_offset(p_.lse);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + warp_ * 16 + 8 * r + lane_ / 4;
      if (lane_ % 4 == 0 && row < work.end_query) g_lse[row] = lse[r];
    }
  }

  /// To TMA (producer.cuh).
  __device__ __forceinline__ void hand_out_over(bool copies_out) {
    state_.out_is_here[query_tile()] = copies_out;
    // By every thread, for what it wrote. The fence before the copy is that of who starts it.
    ptx::mbarrier_arrive(address(state_.out_full[query_tile()]));
  }

  /// From registers, in 16-byte pieces.
  __device__ __forceinline__ void store_rows(const Work& work, int first_row, const float (&scale)[2]) const {
    const auto rows = query_rows<Element>(p_.out, work.sequence);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + warp_ * 16 + 8 * r + lane_ / 4;
      Element* const g_row = row < work.end_query ? rows.row(row) : nullptr;
      write_out_row(g_row, out_, r, scale[r], lane_, static_cast<int>(p_.head_dim_v));
    }
  }

  /// As the registers are, for merge_parts_kernel().
  __device__ __forceinline__ void store_part(const Work& work) const {
    float4* const g_part = PartTile<Config>::of_lane(work.part, group_, warp_, lane_);
#pragma unroll
    for (int d = 0; d < kD; ++d) g_part[d * 32] = float4{out_[d][0], out_[d][1], out_[d][2], out_[d][3]};
    g_part[kD * 32] = float4{reference_[0], reference_[1], row_sum_[0], row_sum_[1]};
  }

  /// Non-finite values of keys that only some rows see were taken out of V; these rows get them here.
  __device__ __forceinline__ void add_hidden_non_finite(const Work& work, const AttentionParams& p) const {
    const Sequence& sequence = work.sequence;
    const TileSpan tiles = work.rows[group_];
    const int first_row = work.first_query + group_ * kGroupRows;
    const auto rows = query_rows<Element>(p_.out, sequence);
    ptx::barrier_any<kGroupThreads>(1 + group_, false);  // out is written
    add_non_finite<Element, kGroupThreads>(p, sequence, rows, key_rows<Element, false>(p_, p_.v, sequence), first_row,
                                           min(first_row + kGroupRows, work.end_query), tiles.begin * kBlockN,
                                           min(tiles.end * kBlockN, sequence.seqlen_k),
                                           static_cast<int>(threadIdx.x) % kGroupThreads);
  }

  const ForwardParams& p_;
  const ScoreTerms& terms_;
  State& state_;
  const int group_, lane_, warp_;
  const float scale_;   // of scores, to base 2; kOptions has applied it already
  uint32_t query_ = 0;  // lower half of the descriptor of this work's
  const uint32_t keys_, s_tiles_;
  RingPosition<Config::kPlaces> q_at_;
  RingPosition<Config::kKeyStages> k_at_;
  RingPosition<Config::kValueStages> v_at_;

  float out_[kD][4];
  float reference_[2];  // base 2; -inf while the row has seen no key
  float row_sum_[2];
};

/// The class with softcap and ALiBi (scores_kernel.cuh).
template <class Config>
class ForwardScoresGroup;

/// Warpgroup 0 loads, the others compute.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardMaps maps,
                   const ScheduleOf<Config> schedule, const __grid_constant__ ScoreTerms terms) {
  extern __shared__ __align__(1024) char shared[];
  auto& state = *reinterpret_cast<ForwardState<Config>*>(shared + Config::kTilesBytes);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = Config::kOptions ? ptx::lane_id() : static_cast<int>(threadIdx.x) % 32;  // read once: registers
  ForwardLoader<Config> loader(p, maps, state, shared, lane);
  if (threadIdx.x == 0) state.init_barriers();
  if (warp == 1 && lane == 0) {
    loader.prefetch_maps();
    if constexpr (Config::kCuts) ptx::launch_dependents();  // merge_parts_kernel(), which waits by itself
  }
  if (warp == 3 && lane == 0) loader.make_first_work(schedule);
  __syncthreads();
  if (warp < kGroupWarps) {
    ptx::give_up_registers<Config::kLoaderRegisters>();
    if (warp == 0) loader.load_keys();
    if (warp == 1) loader.load_queries_and_store_out();
    if (warp == 2) loader.sanitise_values();
    if (warp == 3 && lane == 0) loader.schedule_work(schedule);
  } else {
    ptx::take_registers<Config::kRegisters>();
    using Group = std::conditional_t<Config::kOptions, ForwardScoresGroup<Config>, ForwardGroup<Config>>;
    const float scale = Config::kOptions ? 1.0f : static_cast<float>(p.softmax_scale) * kLog2E;
    Group(p, terms, state, ptx::shared_address(shared), warp / kGroupWarps - 1, lane, scale).run();
  }
}

/// Clears the counter of works, beside which the kernel behind it starts.
void clear_forward_workspace(void* workspace, cudaStream_t stream);

template <class Config>
void launch_forward(const ForwardParams& p, void* workspace, cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(ForwardState<Config>);
  static_assert(kSharedBytes <= 227 * 1024, "a block can have no more");
  const WorkListPlan list = forward_work_list(p, Config::kBlockM);
  const ScheduleOf<Config> schedule = make_schedule<Config>(p, list, workspace);
  if (list.listed) {
    fill_work_list(p, list, schedule.list, stream);
  } else if (schedule.taken) {
    clear_forward_workspace(workspace, stream);
  }
  LaunchShape shape = {dim3(forward_blocks(schedule)), dim3(Config::kThreads), kSharedBytes};
  shape.overlaps_previous = schedule.taken != nullptr;
  launch("sm90/forward", forward_kernel<Config>, shape, stream, p, encode_maps<Config>(p), schedule, ScoreTerms(p));
  if constexpr (Config::kCuts) merge_parts<Config>(p, schedule, stream);
}

}  // namespace flash_ext::sm90
