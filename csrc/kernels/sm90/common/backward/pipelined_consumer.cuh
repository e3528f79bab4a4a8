// The consumer warpgroups, which compute scores and their gradients, dK and dV, of 64 keys each. Products overlap: dP
// runs together with dV, and S of the next step with dK. So dS is computed while dV runs, and the exponentials of the
// next step while dK runs.
#pragma once

#include "consumer.cuh"
#include "kernels/ptx/tma.h"
#include "kernels/ptx/wgmma.h"
#include "maps.h"
#include "pipelined_tile.cuh"
#include "steps.cuh"

namespace flash_ext::sm90 {

/// The score policy without options: it does nothing. BackwardOptionScores (option_scores.cuh) has the same members.
template <class Config, class Storage_>
class BackwardPlainScores {
 public:
  using Storage = Storage_;
  using Tile = BackwardPipelinedTile<typename Config::Element, Config::kBlockM>;
  using Scores = typename Tile::Scores;
  using Weights = typename Tile::Weights;
  using Terms = typename Tile::Terms;
  static constexpr bool kDrops = false;
  static constexpr bool kTwoWeights = false;        // whether dS is computed from other weights than dV
  static constexpr bool kHidesKeys = false;         // whether keys may be hidden from all queries
  static constexpr bool kPreparesEarly = false;     // prepare_ahead() runs before dV is started
  static constexpr bool kLateLse = false;           // lse is read after prepare(), which then has more registers
  static constexpr int kEarlySteps = Tile::kSteps;  // groups of 16 queries whose D is read while dP runs
  static constexpr bool kBoundsScores = false;      // if so, a finite lse does not say that Q is finite

  __device__ __forceinline__ BackwardPlainScores(const BackwardParams&, const Storage&, const BackwardWorkTile<Config>&,
                                                 uint32_t, uint32_t) {}

  __device__ __forceinline__ float keep_scale() const { return 1.0f; }  // as in the workspace
  /// Whether options hide pairs of the CTA whose Q or dO may hold Inf or NaN, whatever lse is. No tile is full then.
  __device__ __forceinline__ bool may_be_non_finite() const { return false; }
  /// Prepares the first step, before its scores are started.
  __device__ __forceinline__ void prepare_first(const BackwardStepsOf<Config>&) {}
  /// Runs while dP of a step is multiplied, and reads what the next step needs from global memory.
  __device__ __forceinline__ void prepare_ahead(const BackwardStepsOf<Config>&) {}
  /// Runs while the scores of a step are multiplied.
  __device__ __forceinline__ void prepare(const BackwardStepsOf<Config>&) {}
  __device__ __forceinline__ void softmax_step(Weights& p, Weights&, const Scores& s, const Terms& lse,
                                               float scale) const {
    Tile::softmax_step(p, s, lse, scale);
  }
  /// Zeroes weights, or gradients computed from them, that are NaN though hidden.
  __device__ __forceinline__ void sanitise_hidden(Weights&) const {}
  __device__ __forceinline__ void sanitise_hidden(Weights&, const Weights&) const {}
  __device__ __forceinline__ void drop(Weights&, const Weights&) const {}
  __device__ __forceinline__ void compute_ds(Weights& ds, const Scores& dp, const Weights& p,
                                             const Terms& minus_delta) const {
    Tile::compute_ds(ds, dp, p, minus_delta);
  }
};

/// The position of a warp in a CTA that has one tile of keys.
template <class Config>
struct BackwardOneTile {
  template <class Storage>
  __device__ __forceinline__ static const uint64_t& k_full(const Storage& storage) {
    return storage.k_full;
  }
  template <class Storage>
  __device__ __forceinline__ static const uint64_t& v_full(const Storage& storage) {
    return storage.v_full;
  }
  __device__ __forceinline__ static uint32_t parity() { return 0; }
  __device__ __forceinline__ static RingCount<Config::kDsStages> first_ds() { return {}; }
  __device__ __forceinline__ static void leave(const RingCount<Config::kDsStages>&) {}
  __device__ __forceinline__ static uint32_t keys_offset() { return 0; }
  template <class Storage>
  __device__ __forceinline__ static BackwardStepsOf<Config> first_step(const Storage& storage) {
    return BackwardStepsOf<Config>(storage);
  }
};

/// A consumer warp. Rules: its score policy.
template <class Config, class Rules>
class BackwardPipelinedConsumer : protected BackwardKeysWarp<Config, typename Rules::Storage> {
 public:
  using Storage = typename Rules::Storage;
  using Base = BackwardKeysWarp<Config, Storage>;
  using Steps = BackwardStepsOf<Config>;

  __device__ __forceinline__ BackwardPipelinedConsumer(const BackwardParams& p, Storage& storage, uint32_t s_tiles,
                                                       float scale, int warpgroup, int lane)
      : Base(p, storage, s_tiles, warpgroup * panel_bytes(kWarpgroupRows), scale, warpgroup, lane),
        rules_(p, storage, storage.work_tile, 0, s_tiles) {}
  __device__ __forceinline__ void run(const BackwardStoringMaps& maps) {
    zero_accumulators(dk_);
    zero_accumulators(dv_);
    BackwardOneTile<Config> at;
    if (work_tile_.tiles.begin < work_tile_.tiles.end) sum_up(at);
    if (work_tile_.sums) return store_splits();
    store_over_inputs(maps);
  }

 protected:
  /// In a persistent CTA, which has several slots for key tiles: for the tile in `slot`.
  __device__ __forceinline__ BackwardPipelinedConsumer(const BackwardParams& p, Storage& storage, uint32_t slot,
                                                       uint32_t s_tiles, float scale, int warpgroup, int lane)
      : Base(p, storage, storage.work_tiles[slot], s_tiles,
             static_cast<int>(slot) * Config::kKeySlotBytes + warpgroup * panel_bytes(kWarpgroupRows), scale, warpgroup,
             lane),
        rules_(p, storage, storage.work_tiles[slot], slot, s_tiles) {}

  /// Stores the sums of a split, in float.
  __device__ __forceinline__ void store_splits() const {
    this->store_dv(dv_, rules_.keep_scale());
    this->store_dk(dk_, dk_scale());
  }
  __device__ __forceinline__ float dk_scale() const {
    return static_cast<float>(p_.softmax_scale) * rules_.keep_scale();
  }

  /// Stores the warp's rows of a panel of dK or dV from shared memory. Called by one lane.
  __device__ __forceinline__ void store_panel(const BackwardRowMaps& maps, uint32_t s_rows, int panel) const {
    const Sequence& sequence = work_tile_.sequence;
    const int rows = sequence.seqlen_k - this->first_key(), batch = p_.seq.cu_seqlens_k ? 0 : sequence.cache_row;
    int row = static_cast<int>(sequence.k_begin) + sequence.leftpad + this->first_key();
    if (rows >= kRowsOfWarp) {
      ptx::tma_store(&maps.all, s_rows, panel * kPanelColumns, row, sequence.head_kv, batch);
    } else {
#pragma unroll 1
      for (const int end = row + rows; row < end; ++row, s_rows += kPanelRowBytes)
        ptx::tma_store(&maps.one, s_rows, panel * kPanelColumns, row, sequence.head_kv, batch);
    }
  }
  using Base::kBlockM, Base::kConsumerThreads, Base::keys_, Base::kHeadDim, Base::kValues, Base::lane_, Base::p_,
      Base::queries_, Base::s_tiles_, Base::scale_, Base::storage_, Base::warp_, Base::warpgroup_, Base::work_tile_;
  using typename Base::Element, typename Base::Products, typename Base::Sum;

 private:
  /// Stores dV through the room of V, and dK through that of the first stages of Q, when all consumers are done with
  /// both.
  __device__ __forceinline__ void store_over_inputs(const BackwardStoringMaps& maps) const {
    static_assert(Config::kStages * Config::kQueryBytes >= Config::kKeyBytes);
    ptx::barrier_sync<BackwardBarriers<Config>::kRowsSanitised, kConsumerThreads>();
    const uint32_t s_dv = s_tiles_ + Config::kValuesOffset, s_dk = s_tiles_ + Config::kQueriesOffset;
    const int first_row = warpgroup_ * kWarpgroupRows + warp_ * kRowsOfWarp;
    const float keep_scale = rules_.keep_scale(), scale = dk_scale();
    if (p_.dv.data) write_out_tile<Element, Config::kBlockN>(s_dv, dv_, {keep_scale, keep_scale}, first_row, lane_);
    if (p_.dk.data) write_out_tile<Element, Config::kBlockN>(s_dk, dk_, {scale, scale}, first_row, lane_);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane_ != 0) return;
    store_panels(maps.dv, p_.dv, s_dv + panel_bytes(first_row), p_.head_dim_v);
    store_panels(maps.dk, p_.dk, s_dk + panel_bytes(first_row), p_.head_dim);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }
  __device__ __forceinline__ void store_panels(const BackwardRowMaps& maps, const TensorView& view, uint32_t s_rows,
                                               int64_t columns) const {
    if (!view.data) return;
#pragma unroll
    for (int panel = 0; panel < panels(kHeadDim); ++panel)
      if (panel * kPanelColumns < columns) store_panel(maps, s_rows + panel * panel_bytes(Config::kBlockN), panel);
  }

  using Tile = BackwardPipelinedTile<Element, kBlockM>;
  using Scores = typename Tile::Scores;
  using Weights = typename Tile::Weights;
  using Terms = typename Tile::Terms;
  using Visible = typename Tile::Visible;
  using QueryTile = TileDescriptor<kBlockM>;
  using DsTile = std::conditional_t<Config::kDsQueries == kPanelColumns, TileDescriptor<Config::kBlockN>,
                                    HalfPanelDescriptor<Config::kBlockN>>;
  static constexpr bool kListsPieces = Config::kListsBlocks && Config::kPersistent;
  static constexpr bool kReadsDeltaFirst = Config::kPersistent;
  struct NoBits {};
  using Bits = std::conditional_t<kListsPieces, BackwardPieceBits<Config>, NoBits>;
  static constexpr uint32_t kStage = Config::kQueryBytes / 16;  // in a descriptor
  static constexpr uint32_t kGrads = Config::kStages * kStage;  // after Q

  /// The query tiles of which nothing is hidden.
  struct FullTiles {
    int begin, end;
    __device__ __forceinline__ explicit FullTiles(const TileSpan& tiles)
        : begin(ptx::uniform(tiles.full_begin)), end(ptx::uniform(tiles.full_end)) {}
    __device__ __forceinline__ bool has(int tile) const { return tile >= begin && tile < end; }
  };

 protected:
  /// Sums up dK and dV over all steps of a key tile. At: BackwardOneTile, or a class with its members.
  template <class At>
  __device__ __forceinline__ void sum_up(At& at) {
    const auto sanitise_keys = [&] {
      this->sanitise_keys(at.k_full(storage_), at.parity(), s_tiles_ + at.keys_offset());
    };
    if (Config::kPersistent) sanitise_keys();  // early, while few registers are in use
    Scores s;                                  // and then dP
    Weights p, ds;
    Terms terms;  // lse, and then D
    Visible visible;
    Bits bits;
    const FullTiles full(work_tile_.tiles), full_of_keys(work_tile_.groups[warpgroup_]);
    Steps step = at.first_step(storage_);
    RingCount<Config::kDsStages> ds_at = at.first_ds();

    // The first step: S, its row terms, its visible pairs.
    if (!Config::kPersistent) sanitise_keys();
    rules_.prepare_first(step);
    start_scores(s, terms, bits, step, full, false);
    rules_.prepare(step);
    bool hides = find_visible(visible, bits, step, full_of_keys);
    if (Rules::kLateLse) Tile::load(terms, storage_.lse[step.stage], lane_);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(s[0]);
    wait_for(at.v_full(storage_), at.parity());
#pragma unroll 1
    while (!kHasTails || !step.is_past_end()) {
      // Barriers are tested ahead of need: a test takes as long as a wait for a barrier that is already complete.
      const bool has_grads = ptx::mbarrier_test(address(storage_.do_full[step.grad_stage()]), step.grad_parity());

      // P, from S.
      rules_.softmax_step(p, ds, s, terms, scale_);
      if (hides) hide_weights(p, ds, visible);
      rules_.sanitise_hidden(p);
      rules_.drop(p, ds);
      fence_operands(p);
      if constexpr (Rules::kTwoWeights) fence_operands(ds);
      ptx::fence_operand(s[0]);
      if (!has_grads) wait_for(storage_.do_full[step.grad_stage()], step.grad_parity());

      // Start dP, then dV. D is read meanwhile.
      const uint32_t queries = queries_ + step.stage * kStage;
      const uint32_t grads = (Config::kBiased ? queries_ + step.grad_stage() * kStage : queries) + kGrads;
      Products::start(s, keys_ + kValues, grads);
      if (Rules::kPreparesEarly) rules_.prepare_ahead(step);
      if (!kReadsDeltaFirst) start_sum(dv_, p, grads);
      const float* const s_delta = storage_.minus_delta[step.grad_stage()];
      Tile::template load<0, Rules::kEarlySteps>(terms, s_delta, lane_);
      const Steps current = step;
      step.advance();
      const bool has_room = ptx::mbarrier_test(address(storage_.ds_empty[ds_at.stage()]), ds_at.parity() ^ 1);
      const bool has_queries = ptx::mbarrier_test(address(storage_.q_full[step.stage]), step.parity);
      // dV starts only here: a product whose operand is in registers holds its warp until it is nearly over.
      if (kReadsDeltaFirst) start_sum(dv_, p, grads);
      if (!Rules::kPreparesEarly) rules_.prepare_ahead(current);
      ptx::wgmma_wait<1>();
      ptx::fence_operand(s[0]);

      // dS, from dP; dV may be in flight.
      if (!has_room) wait_for(storage_.ds_empty[ds_at.stage()], ds_at.parity() ^ 1);
      Tile::template load<Rules::kEarlySteps, Tile::kSteps>(terms, s_delta, lane_);
      rules_.compute_ds(ds, s, p, terms);
      if (hides) Tile::hide(ds, visible);
      rules_.sanitise_hidden(ds, p);
      const uint32_t s_ds = s_ds_of_stage(ds_at.stage());
      if constexpr (Config::kPersistent) {
        Tile::template store_by_half_panels<Config::kDsPanelBytes>(s_ds, warp_, ds, lane_);
      } else {
        Tile::store(s_ds, warp_, ds, lane_);
      }
      fence_operands(ds);
      ptx::fence_proxy_async_shared();
      arrive_as_warp(storage_.ds_full[ds_at.stage()], lane_);

      // Start S of the next step, then dK. The next step is prepared meanwhile.
      start_scores(s, terms, bits, step, full, has_queries || step.is_past_end());
      start_ds_sum(dk_, ds, DsTile::lower_half(s_ds), queries);
      rules_.prepare(step);
      hides = find_visible(visible, bits, step, full_of_keys);
      if (Rules::kLateLse) Tile::load(terms, storage_.lse[step.stage], lane_);
      ds_at.advance();
      ptx::wgmma_wait<1>();
      ptx::fence_operand(s[0]);
      if (!kHasTails && step.is_past_end()) break;
    }
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dk_);
    ptx::fence_operand(dv_);
    sum_up_tails(ds_at, step, full, full_of_keys);
    at.leave(ds_at);
  }

 private:
  static constexpr bool kHasTails = Config::kHasTails;

  /// Adds the last tiles of all heads, where few of their queries see the keys.
  __device__ __forceinline__ void sum_up_tails(RingCount<Config::kDsStages>& ds_at, Steps& step, const FullTiles& full,
                                               const FullTiles& full_of_keys) {
    if constexpr (kHasTails) {
      static_assert(kBlockM == 3 * kTailQueries);
      static_assert(std::is_same_v<Rules, BackwardPlainScores<Config, Storage>>, "add_tail() knows of no options");
      const int tail_queries = ptx::uniform(work_tile_.tail_queries);
      if (tail_queries > 0) {
        step.begin_tails(work_tile_);
#pragma unroll 1
        for (; !step.is_past_end(); step.advance_to_next_tail(), ds_at.advance()) {
          if (tail_queries == kTailQueries) {
            add_tail<kTailQueries>(ds_at, step, full, full_of_keys);
          } else {
            add_tail<2 * kTailQueries>(ds_at, step, full, full_of_keys);
          }
        }
      }
    }
  }
  /// Adds the last tile of one head, of which kQueries queries are computed. Its products overlap no other step's.
  template <int kQueries>
  __device__ __forceinline__ void add_tail(const RingCount<Config::kDsStages>& ds_at, const Steps& step,
                                           const FullTiles& full, const FullTiles& full_of_keys) {
    using Tail = BackwardPipelinedTile<Element, kQueries>;
    typename Tail::Scores s, dp;
    typename Tail::Weights p, ds;
    typename Tail::Terms terms;
    Visible visible;
    Bits bits;
    const uint32_t queries = queries_ + step.stage * kStage, grads = queries + kGrads;
    wait_for(storage_.q_full[step.stage], step.parity);
    Tail::load(terms, storage_.lse[step.stage], lane_);
    sanitise_if_hidden<Tail>(step, full, bits, terms);
    wait_for(storage_.do_full[step.stage], step.parity);
    Products::start(s, keys_, queries);
    Products::start(dp, keys_ + kValues, grads);
    const bool hides = find_visible(visible, bits, step, full_of_keys);
    ptx::wgmma_wait<1>();
    ptx::fence_operand(s[0]);
    Tail::softmax_step(p, s, terms, scale_);
    if (hides) {
      Tail::hide(p, visible);
      if (work_tile_.large) Tail::bound(p);
    }
    fence_operands(p);
    ptx::wgmma_fence();
    start_sum(dv_, p, grads);
    Tail::load(terms, storage_.minus_delta[step.stage], lane_);
    wait_for(storage_.ds_empty[ds_at.stage()], ds_at.parity() ^ 1);
    ptx::wgmma_wait<1>();
    ptx::fence_operand(dp[0]);
    Tail::compute_ds(ds, dp, p, terms);
    if (hides) Tail::hide(ds, visible);
    Tail::template store_by_half_panels<Config::kDsPanelBytes>(s_ds_of_stage(ds_at.stage()), warp_, ds, lane_);
    fence_operands(ds);
    ptx::fence_proxy_async_shared();
    arrive_as_warp(storage_.ds_full[ds_at.stage()], lane_);
    ptx::wgmma_fence();
    start_sum(dk_, ds, queries);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dk_);
    ptx::fence_operand(dv_);
  }
  /// Starts S of a step, reads its lse and, with kListsPieces, issues the loads of the bits of its visible pairs.
  /// After the last step it multiplies whatever the stage holds, and nobody uses the result.
  __device__ __forceinline__ void start_scores(Scores& s, Terms& lse, Bits& bits, const Steps& step,
                                               const FullTiles& full, bool has_queries) const {
    if (!has_queries) wait_for(storage_.q_full[step.stage], step.parity);
    if (!Rules::kLateLse) Tile::load(lse, storage_.lse[step.stage], lane_);
    sanitise_if_hidden<Tile>(step, full, bits, lse);
    Products::start(s, keys_, queries_ + step.stage * kStage);
    if constexpr (kListsPieces) bits.flags = ptx::uniform(bits.flags);  // before dK's product holds the warp
  }
  /// For a step of which a mask may hide some pairs: sanitises its Q and dO if they may hold Inf or NaN, and issues the
  /// loads of the bits that say which pairs bitmaps hide (kListsPieces).
  template <class TermsTile>
  __device__ __forceinline__ void sanitise_if_hidden(const Steps& step, const FullTiles& full, Bits& bits,
                                                     typename TermsTile::Terms& lse) const {
    if constexpr (kListsPieces) bits.flags = storage_.step_flags[step.slot], bits.show_all();
    if (may_hide(step, full, bits) && !step.is_past_end()) {
      if (Rules::kLateLse) TermsTile::load(lse, storage_.lse[step.stage], lane_);
      if constexpr (kListsPieces)
        storage_.step_metadata[step.slot].load_bits(bits, bits_of_warp(), ptx::uniform(warpgroup_), lane_);
      if (Rules::kBoundsScores || p_.sink || may_run_past_queries(step) || may_be_non_finite(step) ||
          TermsTile::has_non_finite(lse))
        sanitise_rows(step);
    }
  }
  /// Whether a step may have rows that are no queries of the sequence. Where key tiles are anchored, these may have no
  /// lse, or be rows of the next sequence. Only the last tile of a head has such rows.
  __device__ __forceinline__ static bool may_run_past_queries(const Steps& step) {
    if constexpr (Config::kAnchored && !Config::kListsBlocks) return step.tile == step.last;
    return false;
  }
  /// Returns whether some pair is hidden; if so, sets `visible` to the pairs that are not.
  __device__ __forceinline__ bool find_visible(Visible& visible, const Bits& bits, const Steps& step,
                                               const FullTiles& full_of_keys) const {
    if constexpr (kListsPieces) {
      return find_listed_pieces(visible, bits, step);
    } else if constexpr (Config::kListsBlocks) {
      return find_listed(visible, step);
    } else if constexpr (Config::kFindsSteps) {
      return find_masked(visible, step, full_of_keys);
    } else if constexpr (Rules::kHidesKeys) {
      const bool partial = !full_of_keys.has(step.tile);
      if (!partial && !rules_.hides_keys()) return false;
      visible[0] = visible[1] = ~0u;
      if (partial) Tile::find_visible(visible, work_tile_.sequence, this->first_key(), step.tile * kBlockM, lane_);
      rules_.hide_keys(visible);
      return true;
    } else {
      if (full_of_keys.has(step.tile)) return false;
      Tile::find_visible(visible, work_tile_.sequence, this->first_key(), step.tile * kBlockM, lane_);
      return true;
    }
  }
  /// Whether Q or dO of a step may hold Inf or NaN while a mask hides some of its pairs.
  __device__ __forceinline__ bool may_be_non_finite(const Steps& step) const {
    if constexpr (Config::kFindsSteps) return rules_.found().has_non_finite;
    return rules_.may_be_non_finite();
  }
  /// Whether some key may be hidden from some query.
  __device__ __forceinline__ bool may_hide(const Steps& step, const FullTiles& full, const Bits& bits) const {
    if constexpr (kListsPieces) {
      return p_.blocks.num_bitmaps > 0 && (ptx::uniform(bits.flags) & kPiecesAreMasked) != 0;
    } else if constexpr (Config::kListsBlocks) {
      if (p_.blocks.num_bitmaps == 0 || step.is_past_end()) return false;
      // Of either key group: all consumers sanitise rows together.
      const ListedQueries& queries = storage_.step_metadata[step.stage];
      return (queries.visible[0] & queries.visible[1]) >= 0;
    } else if constexpr (Config::kFindsSteps) {
      if (step.is_past_end()) return false;
      const FoundQueries& queries = rules_.found();
      return (queries.words >= 0 && queries.has_non_finite) || !full.has(queries.tile);
    } else {
      return !full.has(step.tile);
    }
  }
  /// find_visible() where a mask of pairs leaves steps: by the mask's words, by the window and by the lengths.
  __device__ __forceinline__ bool find_masked(Visible& visible, const Steps& step,
                                              const FullTiles& full_of_keys) const {
    if (step.is_past_end()) return false;
    const int tile = rules_.found().tile;
    const bool partial = !full_of_keys.has(tile), masked = rules_.found().words >= 0;
    if (!partial && !masked) return false;
    visible[0] = visible[1] = ~0u;
    if (partial) Tile::find_visible(visible, work_tile_.sequence, this->first_key(), tile * kBlockM, lane_);
    if (masked) rules_.hide_pairs(visible);
    return true;
  }
  /// find_visible() for a step of a list: by the bits of the warpgroup's keys and by the ends of the sequences.
  __device__ __forceinline__ bool find_listed(Visible& visible, const Steps& step) const {
    if (step.is_past_end()) return false;
    const ListedQueries& queries = storage_.step_metadata[step.stage];
    const int first_query = ptx::uniform(queries.tile) * kBlockM;
    const int set = ptx::uniform(queries.visible[ptx::uniform(warpgroup_)]);
    const Sequence& sequence = work_tile_.sequence;
    const bool partial =
        first_query + kBlockM > sequence.seqlen_q || work_tile_.first_key + Config::kBlockN > sequence.seqlen_k;
    if (!partial && set < 0 && !work_tile_.large) return false;
    visible[0] = visible[1] = ~0u;
    if (partial) Tile::find_visible(visible, sequence, this->first_key(), first_query, lane_);
    if (set >= 0) {
      const uint2 bits = __ldg(bits_of_warp() + int64_t{set} * kBitsOfKeyGroup + lane_);
      visible[0] &= bits.x;
      visible[1] &= bits.y;
    }
    return true;
  }

  /// find_visible() for a step of pieces, whose bits have been loaded.
  __device__ __forceinline__ bool find_listed_pieces(Visible& visible, const Bits& bits, const Steps& step) const {
    if (step.is_past_end() || (bits.flags & kPiecesHide) == 0) return false;
    const Sequence& sequence = work_tile_.sequence;
    storage_.step_metadata[step.slot].find_visible(visible, bits, sequence.seqlen_q,
                                                   sequence.seqlen_k - this->first_key(), lane_);
    return true;
  }
  /// The bits of this warp's keys in the first set of bits.
  __device__ __forceinline__ const uint2* bits_of_warp() const { return work_tile_.visible + warp_ * 32; }

  /// Zeroes hidden weights, those of dV and those of dS, and bounds P. With dropout, p is computed from ds afterwards.
  __device__ __forceinline__ void hide_weights(Weights& p, Weights& ds, const Visible& visible) const {
    Tile::hide(Rules::kDrops ? ds : p, visible);
    if (Rules::kTwoWeights && !Rules::kDrops) Tile::hide(ds, visible);
    if (work_tile_.large) Tile::bound(Rules::kDrops ? ds : p);
  }

  // ---- Products. The caller waits for them, and then fences the accumulators.

  using Product = ptx::Wgmma<Element, kHeadDim>;

  /// Starts sum += p rows: dV += P dO and, for a tail, dK += dS Q. Unlike BackwardProducts::start_sum() it issues no
  /// wgmma_fence(): the caller has done so since p was written, itself or by Products::start().
  template <int kSteps>
  __device__ __forceinline__ static void start_sum(Sum& sum, const uint32_t (&p)[kSteps][4], uint32_t rows) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      Product::template multiply_registers<true>(sum, p[k], QueryTile::at(rows, QueryTile::down_rows(k)));
    ptx::wgmma_commit();
  }
  /// Starts dK += dS Q. A warp reads the rows of dS in shared memory that it has written itself, after its own proxy
  /// fence alone. PTX does not promise that a warp of a warpgroup reads only its own rows of A, but on compute
  /// capability 9.0 it does.
  __device__ __forceinline__ static void start_ds_sum(Sum& sum, const Weights& ds, uint32_t ds_rows, uint32_t queries) {
#pragma unroll
    for (int k = 0; k < Tile::kSteps; ++k) {
      const uint64_t rows = QueryTile::at(queries, QueryTile::down_rows(k));
      if (k < Config::kDsSteps) {
        Product::template multiply_registers<true>(sum, ds[k], rows);
      } else {
        Product::template multiply<true, ptx::Major::kK, ptx::Major::kMN>(
            sum, DsTile::at(ds_rows, DsTile::along_row(k)), rows);
      }
    }
    ptx::wgmma_commit();
  }

  template <int kSteps>
  __device__ __forceinline__ static void fence_operands(uint32_t (&pairs)[kSteps][4]) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e) pairs[k][e] = ptx::reread(pairs[k][e]);
  }

  // ---- dS in shared memory, and sanitising of Q and dO

  __device__ __forceinline__ uint32_t s_ds_of_stage(uint32_t stage) const {
    constexpr int kKeysBytes = kWarpgroupRows * Config::kDsQueries * 2;
    return s_tiles_ + Config::kDsOffset + stage * Config::kDsBytes + warpgroup_ * kKeysBytes;
  }

  /// Sanitises Q and dO of a partial tile, by all consumers, which then wait for each other. A query with a finite lse
  /// has finite Q and dO (row_terms.cuh), except that a sink may hide scores of -inf. All warps see the same lse, so
  /// all of them come here or none.
  __device__ __forceinline__ void sanitise_rows(const Steps& step) const {
    wait_for(storage_.do_full[step.grad_stage()], step.grad_parity());
    const int thread = warpgroup_ * kWarpgroupThreads + warp_ * 32 + lane_;
    uint32_t s_tile = s_tiles_ + Config::kQueriesOffset + step.stage * Config::kQueryBytes;
    const int to_grads = Config::kStages * Config::kQueryBytes +
                         (Config::kBiased ? static_cast<int>(step.grad_stage() - step.stage) * Config::kQueryBytes : 0);
#pragma unroll 1
    for (int tile = 0; tile < 2; ++tile, s_tile += to_grads)
      sanitise_tile<Element, Config::kQueryBytes, kConsumerThreads>(s_tile, thread);
    ptx::barrier_sync<BackwardBarriers<Config>::kRowsSanitised, kConsumerThreads>();
  }

 protected:
  Sum dk_, dv_;
  Rules rules_;
};

}  // namespace flash_ext::sm90
