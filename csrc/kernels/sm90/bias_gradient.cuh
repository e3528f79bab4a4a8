// The gradient of an additive bias on wgmma: dS, summed over the dimensions in which the bias is broadcast.
//
//   dS = P * (dP - delta)    P = 2^(S - lse),  S = Q K^T,  dP = dO V^T,  delta: sm80/bias_row_terms.cuh
//
// A block owns a tile of dbias, 128 queries x 128 keys, and recomputes dS of all tiles of scores that fall on it, its
// summands, in a fixed order. Blocks go through works: tiles, or, where there are few, chunks of their sums, which are
// added up afterwards.
//
// Warpgroups 1 and 2 compute, 64 queries each: sum, S and dP in registers; P is made while dP is multiplied. Of
// warpgroup 0,
//   warp 0 brings slabs of 64 columns through the copy engine: of each summand those of Q and K, then of dO and V;
//   warps 1 to 3 find the summands of which some pair is visible, and their rows' terms, every third each.
// The bias of a tile is the same for all summands; each computing warp copies its own part, a tile ahead.
//
//   step_full, step_empty     a slot holds a summand, or the end of a work; all warps have read it
//   slab_full, slab_empty     a stage holds slabs; the computing warps have multiplied them
#pragma once

#include <algorithm>

#include "../common/non_finite.cuh"
#include "../common/scores.cuh"
#include "../launch.h"
#include "../ptx/barrier.h"
#include "../ptx/mbarrier.h"
#include "../ptx/reread.h"
#include "../ptx/setmaxnreg.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "../sm80/bias_gradient_tiles.cuh"
#include "../sm80/bias_row_terms.cuh"
#include "../sm80/bias_tile.cuh"
#include "forward_shape.h"
#include "forward_work.cuh"
#include "tensor_map.h"

namespace flash_ext::sm90 {

template <class Element_, int kHeadDim_>
struct BiasConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kGroups = 2;
  static constexpr int kRows = kGroups * kGroupRows, kKeys = 128;
  static constexpr int kSlabs = panels(kHeadDim);  // of S, and of dP
  static constexpr int kStages = 4, kSlots = 4, kFinders = 3;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  static constexpr int kRegisters = 240, kLoaderRegisters = 24;
  static constexpr int kRowBytes = panel_bytes(kRows), kKeyBytes = panel_bytes(kKeys);  // of a slab
  static constexpr int kStageBytes = kRowBytes + kKeyBytes;
  static constexpr int kSlabsBytes = kStages * kStageBytes;
  static constexpr int kWarps = kGroups * kGroupWarps;  // that compute
  using Bias = sm80::BiasTile<16, kKeys>;               // of a warp
  // Products of S are still under way when those of dP are issued, if all their slabs fit.
  static constexpr bool kOverlap = 2 * kSlabs <= kStages;
};

struct BiasMaps {
  CUtensorMap q, k, v, grad_out;
};

/// A summand as this block sees it.
struct BiasStep {
  bool ends_work;    // and is no summand
  bool all_visible;  // every pair of the tile is there and visible
  int batch, head;
  int first_query, first_key;
  int q_row, k_row, q_batch, k_batch, head_kv;  // where its rows lie
};

/// A stage of a ring, and the parity of its use, in one register.
template <int kStages>
struct RingCount {
  static_assert((kStages & (kStages - 1)) == 0);
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t parity() const { return count / kStages % 2; }
  __device__ __forceinline__ void advance() { ++count; }
};

/// How works are made of tiles.
struct BiasWorks {
  sm80::BiasTiles tiles;
  float* shares;  // of chunks, float; each like dbias, without what is between its rows
  int buffers;    // of the bias
  int count;      // of works

  __device__ __forceinline__ sm80::DbiasTile tile(int work) const {
    return {work % static_cast<int>(tiles.count()), tiles.key_tiles, tiles.query_tiles, tiles.heads};
  }
  __device__ __forceinline__ int chunk(int work) const { return work / static_cast<int>(tiles.count()); }
};

/// Behind the slabs in shared memory.
template <class Config>
struct BiasState {
  static constexpr int kStages = Config::kStages, kSlots = Config::kSlots;

  uint64_t slab_full[kStages], slab_empty[kStages];
  uint64_t step_full[kSlots], step_empty[kSlots];
  BiasStep steps[kSlots];
  float lse[kSlots][Config::kRows];  // -inf for rows that are not there or see nothing
  float delta[kSlots][Config::kRows];
  float columns[Config::kWarps][Config::kKeys];  // sums of each warp's rows

  static constexpr int bytes() { return (sizeof(BiasState) + 127) / 128 * 128; }

  /// By one thread.
  __device__ __forceinline__ void init() {
    init_all(slab_full, 1);
    init_all(slab_empty, Config::kWarps);
    init_all(step_full, 1);
    init_all(step_empty, Config::kWarps + 1);
    ptx::mbarrier_init_fence();
  }

 private:
  template <int kCount>
  __device__ __forceinline__ static void init_all(uint64_t (&barriers)[kCount], uint32_t arrivals) {
    for (int k = 0; k < kCount; ++k) ptx::mbarrier_init(ptx::shared_address(&barriers[k]), arrivals);
  }
};

template <class Config>
class BiasLoader {
 public:
  using State = BiasState<Config>;

  __device__ __forceinline__ BiasLoader(const BackwardParams& p, const BiasMaps& maps, const BiasWorks& works,
                                        State& state, uint32_t s_slabs, int lane)
      : p_(p), maps_(maps), works_(works), state_(state), s_slabs_(s_slabs), lane_(lane) {}

  /// By warp `finder` of kFinders.
  __device__ __forceinline__ void find_steps(const float* delta, uint32_t finder) {
    RingCount<Config::kSlots> at;
    for (int work = blockIdx.x; work < works_.count; work += gridDim.x) {
      const sm80::BiasTiles& tiles = works_.tiles;
      const int64_t chunk = works_.chunk(work);
      sm80::Summands summands(tiles, works_.tile(work), tiles.summed() * chunk / tiles.chunks,
                              tiles.summed() * (chunk + 1) / tiles.chunks);
      for (; summands.left > 0; summands.next(tiles)) {
        if (is_visible(summands)) add(at, finder, [&] { fill_slot(at.stage(), summands, delta); });
      }
      add(at, finder, [&] {
        if (lane_ == 0) state_.steps[at.stage()].ends_work = true;
      });
    }
  }

  /// By one warp.
  __device__ __forceinline__ void load_slabs() {
    RingCount<Config::kSlots> at;
    RingCount<Config::kStages> stage;
    for (int work = blockIdx.x; work < works_.count; work += gridDim.x) {
      while (true) {
        ptx::mbarrier_wait(address(state_.step_full[at.stage()]), at.parity());
        const BiasStep step = state_.steps[at.stage()];
        __syncwarp();
        if (lane_ == 0) ptx::mbarrier_arrive(address(state_.step_empty[at.stage()]));
        at.advance();
        if (step.ends_work) break;
        for (int slab = 0; slab < Config::kSlabs; ++slab) load_pair(stage, maps_.q, maps_.k, step, slab);
        for (int slab = 0; slab < Config::kSlabs; ++slab) load_pair(stage, maps_.grad_out, maps_.v, step, slab);
      }
    }
  }

 private:
  __device__ __forceinline__ static uint32_t address(const uint64_t& barrier) { return ptx::shared_address(&barrier); }

  /// The next step, if it is this finder's turn.
  template <class Fill>
  __device__ __forceinline__ void add(RingCount<Config::kSlots>& at, uint32_t finder, Fill fill) const {
    if (at.count % Config::kFinders == finder) {
      ptx::mbarrier_wait(address(state_.step_empty[at.stage()]), at.parity() ^ 1);
      fill();
      __syncwarp();  // what all lanes wrote comes before the arrival
      if (lane_ == 0) ptx::mbarrier_arrive(address(state_.step_full[at.stage()]));
    }
    at.advance();
  }

  /// Whether some pair is.
  __device__ __forceinline__ bool is_visible(const sm80::Summands& summands) const {
    const Sequence sequence(p_, summands.batch(), summands.head());
    const int first_query = summands.query_tile() * Config::kRows, first_key = summands.key_tile() * Config::kKeys;
    const Interval keys = visible_keys(first_query, min(first_query + Config::kRows, sequence.seqlen_q),
                                       sequence.seqlen_k, sequence.window());
    return first_key < keys.end && first_key + Config::kKeys > keys.begin;
  }

  __device__ __forceinline__ void fill_slot(uint32_t slot, const sm80::Summands& summands, const float* delta) const {
    constexpr int kRows = Config::kRows, kKeys = Config::kKeys;
    const Sequence sequence(p_, summands.batch(), summands.head());
    const int first_query = summands.query_tile() * kRows, first_key = summands.key_tile() * kKeys;
    const Interval every =
        common_keys(first_query, min(first_query + kRows, sequence.seqlen_q), sequence.seqlen_k, sequence.window());
    if (lane_ == 0) {
      BiasStep& step = state_.steps[slot];
      step.ends_work = false;
      step.all_visible =
          first_query + kRows <= sequence.seqlen_q && every.begin <= first_key && first_key + kKeys <= every.end;
      step.batch = sequence.batch;
      step.head = sequence.head;
      step.first_query = first_query;
      step.first_key = first_key;
      step.q_row = static_cast<int>(sequence.q_begin) + first_query;
      step.k_row = static_cast<int>(sequence.k_begin) + sequence.leftpad + first_key;
      step.q_batch = p_.seq.cu_seqlens_q ? 0 : sequence.batch;
      step.k_batch = p_.seq.cu_seqlens_k ? 0 : sequence.cache_row;
      step.head_kv = sequence.head_kv;
    }
    const float* const g_lse = static_cast<const float*>(p_.lse.data) + sequence.lse_offset(p_.lse);
    const float* const g_delta = delta + sm80::row_of_head(p_, sequence, 0);
#pragma unroll
    for (int row = lane_; row < kRows; row += 32) {
      const int i = first_query + row;
      const bool there = i < sequence.seqlen_q;
      state_.lse[slot][row] = there ? g_lse[i] : -INFINITY;
      state_.delta[slot][row] = there ? g_delta[i] : 0.0f;
    }
  }

  /// A slab of Q and of K, or of dO and of V.
  __device__ __forceinline__ void load_pair(RingCount<Config::kStages>& at, const CUtensorMap& row_map,
                                            const CUtensorMap& key_map, const BiasStep& step, int slab) const {
    ptx::mbarrier_wait(address(state_.slab_empty[at.stage()]), at.parity() ^ 1);
    if (lane_ == 0) {
      const uint32_t s_full = address(state_.slab_full[at.stage()]);
      const uint32_t s_rows = s_slabs_ + at.stage() * Config::kStageBytes;
      const int column = slab * kPanelColumns;
      ptx::mbarrier_arrive_expect(s_full, Config::kStageBytes);
      ptx::tma_load(s_rows, &row_map, s_full, column, step.q_row, step.head, step.q_batch);
      ptx::tma_load(s_rows + Config::kRowBytes, &key_map, s_full, column, step.k_row, step.head_kv, step.k_batch);
    }
    __syncwarp();
    at.advance();
  }

  const BackwardParams& p_;
  const BiasMaps& maps_;
  const BiasWorks& works_;
  State& state_;
  const uint32_t s_slabs_;
  const int lane_;
};

/// What one warp of those that compute does.
template <class Config>
class BiasGroup {
 public:
  using Element = typename Config::Element;
  using State = BiasState<Config>;
  using Bias = typename Config::Bias;
  static constexpr int kN = Config::kKeys / 8;
  static constexpr int kComputing = Config::kGroups * kGroupThreads;
  using Fragment = float[1][kN][4];
  using RowTile = TileDescriptor<Config::kRows>;
  using KeyTile = TileDescriptor<Config::kKeys>;

  __device__ __forceinline__ BiasGroup(const BackwardParams& p, const BiasWorks& works, State& state, uint32_t s_slabs,
                                       uint32_t s_bias, int warp, int lane)
      : p_(p),
        works_(works),
        state_(state),
        lane_(lane),
        first_row_(warp * 16),
        s_bias_(s_bias + warp * bias_bytes()),
        rows_(RowTile::lower_half(s_slabs + warp / kGroupWarps * panel_bytes(kGroupRows))),
        keys_(KeyTile::lower_half(s_slabs + Config::kRowBytes)) {}

  __device__ __forceinline__ void run() {
    int work = blockIdx.x;
    if (works_.buffers > 1) load_bias(work, s_bias_);
#pragma unroll 1
    for (; work < works_.count; work += gridDim.x) {
      if (works_.buffers > 1) {
        load_bias(work + gridDim.x, s_other_bias());
        ptx::cp_async_wait<1>();
      } else {
        load_bias(work, s_bias_);
        ptx::cp_async_wait<0>();
      }
      __syncwarp();
      add_up();
      store(work);
      if (works_.buffers > 1) s_bias_ = s_other_bias();
    }
  }

 private:
  __device__ __forceinline__ static uint32_t address(const uint64_t& barrier) { return ptx::shared_address(&barrier); }
  __device__ __forceinline__ int bias_bytes() const {
    return p_.bias.dtype == DType::kFloat32 ? Bias::kBytes32 : Bias::kBytes16;
  }
  __device__ __forceinline__ Bias bias_tile() const { return {s_bias_, p_.bias, lane_}; }
  /// Of the buffer that is not in use.
  __device__ __forceinline__ uint32_t s_other_bias() const {
    const uint32_t s_first = ptx::shared_address(&state_) + State::bytes() + first_row_ / 16 * bias_bytes();
    return 2 * s_first + Config::kWarps * bias_bytes() - s_bias_;
  }

  /// Of a work. For all sequences: a bias may be there for rows and keys that the first one has not.
  __device__ __forceinline__ void load_bias(int work, uint32_t s_target) const {
    if (work < works_.count) {
      __syncwarp();
      const sm80::DbiasTile tile = works_.tile(work);
      Sequence sequence(p_, tile.batch, tile.head);
      sequence.seqlen_q = static_cast<int>(p_.seqlen_q);
      sequence.seqlen_k = static_cast<int>(p_.seqlen_k);
      Bias{s_target, p_.bias, lane_}.load(sequence, tile.query * Config::kRows + first_row_, tile.key * Config::kKeys);
    }
    ptx::cp_async_commit();
  }

  /// Whether the warp's part of the bias has an Inf or NaN, of which -Inf hides.
  __device__ __forceinline__ bool bias_is_finite() const {
    uint32_t found = 0;
    if (p_.bias.dtype == DType::kFloat32) {
      found = non_finite<float>(Bias::kBytes32);
    } else if (p_.bias.dtype == DType::kFloat16) {
      found = non_finite<__half>(Bias::kBytes16);
    } else {
      found = non_finite<__nv_bfloat16>(Bias::kBytes16);
    }
    return !__any_sync(~0u, found != 0);
  }
  template <class T>
  __device__ __forceinline__ uint32_t non_finite(int bytes) const {
    const int end = p_.bias.row_stride == 0 ? bytes / 16 : bytes;  // one row stands for all
    uint32_t found = 0;
#pragma unroll 4
    for (int at = lane_ * 16; at < end; at += 32 * 16) {
      const uint4 x = sm80::load_shared<uint4>(s_bias_ + at);
      using Test = NonFinite<T>;
      found |= Test::in_word(x.x) | Test::in_word(x.y) | Test::in_word(x.z) | Test::in_word(x.w);
    }
    return found;
  }

  /// The sum of a work.
  __device__ __forceinline__ void add_up() {
    for_each_score(sum_, [](float& x, int, int, int) { x = 0.0f; });
    const bool plain = bias_is_finite() && p_.softcap == 0.0 && !p_.alibi_slopes;
#pragma unroll 1
    while (true) {
      ptx::mbarrier_wait(address(state_.step_full[step_at_.stage()]), step_at_.parity());
      const BiasStep& step = state_.steps[step_at_.stage()];
      const bool ends = step.ends_work;
      if (!ends) add(step, plain && step.all_visible);
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(address(state_.step_empty[step_at_.stage()]));
      step_at_.advance();
      if (ends) return;
    }
  }

  __device__ __forceinline__ void add(const BiasStep& step, bool plain) {
    Fragment s, dp;
    const RingCount<Config::kStages> first = slab_at_;
    multiply(s);
    if constexpr (!Config::kOverlap) {
      ptx::wgmma_wait<0>();
      release(first);
    }
    const RingCount<Config::kStages> second = slab_at_;
    multiply(dp);
    if constexpr (Config::kOverlap) {
      ptx::wgmma_wait<1>();
      release(first);
    }
    for_each_score(s, [](float& x, int, int, int) { ptx::pin(x); });
    if (plain) {
      make_plain_weights(s);
    } else {
      make_weights(s, step);
    }
    ptx::wgmma_wait<0>();
    for_each_score(dp, [](float& x, int, int, int) { ptx::pin(x); });
    release(second);
    const float* const s_delta = state_.delta[step_at_.stage()] + first_row_ + lane_ / 4;
    const float delta[2] = {s_delta[0], s_delta[8]};
    if (plain) {
      for_each_score(s, [&](float& x, int m, int n, int e) {
        sum_[m][n][e] = fmaf(x, dp[m][n][e] - delta[e / 2], sum_[m][n][e]);
      });
    } else {
      // Where the weight is 0 the rest may be NaN, from keys or rows that this query has nothing to do with.
      for_each_score(s, [&](float& x, int m, int n, int e) {
        if (x != 0.0f) sum_[m][n][e] = fmaf(x, dp[m][n][e] - delta[e / 2], sum_[m][n][e]);
      });
    }
  }

  /// c = A B^T of the next slabs, as one group of products.
  __device__ __forceinline__ void multiply(Fragment& c) {
    using Product = ptx::Wgmma<Element, Config::kKeys>;
#pragma unroll
    for (int slab = 0; slab < Config::kSlabs; ++slab) {
      ptx::mbarrier_wait(address(state_.slab_full[slab_at_.stage()]), slab_at_.parity());
      const uint32_t offset = slab_at_.stage() * (Config::kStageBytes / 16);
      const uint32_t row = rows_ + offset, key = keys_ + offset;
      if (slab == 0) {
        ptx::wgmma_fence();
        Product::template multiply<false>(c[0], RowTile::at(row, 0), KeyTile::at(key, 0));
      }
#pragma unroll
      for (int step = slab == 0 ? 1 : 0; step < kPanelColumns / 16; ++step)
        Product::template multiply<true>(c[0], RowTile::at(row, RowTile::along_row(step)),
                                         KeyTile::at(key, KeyTile::along_row(step)));
      slab_at_.advance();
    }
    ptx::wgmma_commit();
  }

  /// The slabs of one product have been multiplied.
  __device__ __forceinline__ void release(RingCount<Config::kStages> at) const {
#pragma unroll
    for (int slab = 0; slab < Config::kSlabs; ++slab) {
      if (lane_ == 0) ptx::mbarrier_arrive(address(state_.slab_empty[at.stage()]));
      at.advance();
    }
  }

  __device__ __forceinline__ void load_lse(float (&lse)[2]) const {
    const float* const s_lse = state_.lse[step_at_.stage()] + first_row_ + lane_ / 4;
    lse[0] = s_lse[0];
    lse[1] = s_lse[8];
  }

  /// P in place of Q K^T, where nothing but a bias without -inf is added to scores.
  __device__ __forceinline__ void make_plain_weights(Fragment& s) const {
    const float scale = static_cast<float>(p_.softmax_scale) * kLog2E;
    float lse[2];
    load_lse(lse);
    // A row that sees nothing has weight 0.
    const float shift[2] = {lse[0] == -INFINITY ? -INFINITY : -kLog2E * lse[0],
                            lse[1] == -INFINITY ? -INFINITY : -kLog2E * lse[1]};
    for_each_score(s, [&](float& x, int, int, int e) { x = fmaf(x, scale, shift[e / 2]); });
    bias_tile().add(s, kLog2E);
    for_each_score(s, [](float& x, int, int, int) { x = ptx::exp2_approx(x); });
  }

  __device__ __forceinline__ void make_weights(Fragment& s, const BiasStep& step) const {
    const Sequence sequence(p_, step.batch, step.head);
    const auto at = TileCoordinates<false>::of_lane(step.first_query + first_row_, step.first_key, ptx::reread(lane_));
    const ScoreRules<Element> rules(p_, sequence);
    rules.scale_and_cap(s);
    rules.add_alibi(s, at);
    bias_tile().add(s, kLog2E);
    if (!step.all_visible) hide_outside_window(s, at, sequence);
    float lse[2];
    load_lse(lse);
    for_each_score(s, [&](float& x, int, int, int e) {
      // Hidden scores first: an lse of NaN must not reach them.
      const float l = lse[e / 2];
      x = l == -INFINITY || x == -INFINITY ? 0.0f : ptx::exp2_approx(fmaf(l, -kLog2E, x));
    });
    bias_tile().hide(s);
  }

  /// To dbias, or to the share of a chunk.
  __device__ __forceinline__ void store(int work) {
    const sm80::DbiasTile tile = works_.tile(work);
    const int64_t keys = p_.seqlen_k, rows = p_.dbias.row_stride == 0 ? 1 : p_.seqlen_q;
    ScoreView target = p_.dbias;
    if (works_.shares) {
      const sm80::BiasTiles& tiles = works_.tiles;
      const int64_t share = works_.chunk(work);
      target = {works_.shares + share * tiles.batches * tiles.heads * rows * keys,
                DType::kFloat32,
                tiles.heads * rows * keys,
                rows * keys,
                p_.dbias.row_stride == 0 ? 0 : keys,
                1};
    }
    const int first_key = tile.key * Config::kKeys;
    const int64_t offset = tile.batch * target.batch_stride + tile.head * target.head_stride + first_key;
    const int num_keys = static_cast<int>(min(keys - first_key, int64_t{Config::kKeys}));
    if (target.row_stride == 0) {
      store_columns(static_cast<float*>(target.data) + offset, num_keys);
      return;
    }
    const int first_row = tile.query * Config::kRows + first_row_;
    const int num_rows = static_cast<int>(min(rows - first_row, int64_t{16}));
    switch (target.dtype) {
      case DType::kFloat16:
        return store_rows(static_cast<__half*>(target.data) + offset + first_row * target.row_stride, target.row_stride,
                          num_rows, num_keys);
      case DType::kBFloat16:
        return store_rows(static_cast<__nv_bfloat16*>(target.data) + offset + first_row * target.row_stride,
                          target.row_stride, num_rows, num_keys);
      default:
        return store_rows(static_cast<float*>(target.data) + offset + first_row * target.row_stride, target.row_stride,
                          num_rows, num_keys);
    }
  }

  /// The sums over all rows of the block. By all warps that compute.
  __device__ __forceinline__ void store_columns(float* g_columns, int num_keys) {
    constexpr int kBarrier = 1;
    const int warp = first_row_ / 16;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = sum_[0][n][c] + sum_[0][n][2 + c];
#pragma unroll
        for (int lanes = 16; lanes >= 4; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
        if (lane_ < 4) state_.columns[warp][8 * n + 2 * lane_ + c] = x;
      }
    ptx::barrier_sync<kBarrier, kComputing>();
    const int column = warp * 32 + lane_;
    if (column < num_keys) {
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < Config::kWarps; ++k) sum += state_.columns[k][column];
      g_columns[column] = sum;
    }
    ptx::barrier_sync<kBarrier, kComputing>();  // the sums have been read
  }

  template <class T>
  __device__ __forceinline__ void store_rows(T* g_rows, int64_t row_stride, int num_rows, int num_keys) const {
    const auto start = reinterpret_cast<uint64_t>(g_rows), stride = static_cast<uint64_t>(row_stride) * sizeof(T);
    const bool aligned = (start | stride) % 16 == 0;
    if (num_rows < 16 || num_keys < Config::kKeys || !aligned) {
      store_elements(g_rows, row_stride, num_rows, num_keys);
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      T* const g_row = g_rows + (lane_ / 4 + 8 * r) * row_stride;
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int n = 0; n < kN; ++n)
          *reinterpret_cast<float2*>(g_row + 8 * n + 2 * (lane_ % 4)) =
              make_float2(sum_[0][n][2 * r], sum_[0][n][2 * r + 1]);
      } else {
        store_row(g_row, r);
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void store_elements(T* g_rows, int64_t row_stride, int num_rows, int num_keys) const {
    const int lane = ptx::reread(lane_), first_key = 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      T* const g_lane = g_rows + (lane / 4 + 8 * r) * row_stride + first_key;
      const int keys = lane / 4 + 8 * r < num_rows ? num_keys - first_key : 0;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * n + c < keys) g_lane[8 * n + c] = static_cast<T>(sum_[0][n][2 * r + c]);
    }
  }

  /// A quad of lanes holds a row, each of them two columns of eight. They exchange what they have of 32 columns, so
  /// that each has eight of them.
  template <class T>
  __device__ __forceinline__ void store_row(T* g_row, int r) const {
    const bool odd = lane_ & 1, upper = lane_ & 2;
#pragma unroll
    for (int n = 0; n < kN; n += 4) {
      uint32_t w[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) w[k] = ptx::pack2<T>(sum_[0][n + k][2 * r], sum_[0][n + k][2 * r + 1]);
      exchange(w[0], w[1], odd, 1);
      exchange(w[2], w[3], odd, 1);
      exchange(w[0], w[2], upper, 2);
      exchange(w[1], w[3], upper, 2);
      *reinterpret_cast<uint4*>(g_row + 8 * (n + lane_ % 4)) = uint4{w[0], w[1], w[2], w[3]};
    }
  }
  /// The lower of two lanes gets both their a, the upper one both their b.
  __device__ __forceinline__ static void exchange(uint32_t& a, uint32_t& b, bool upper, int distance) {
    const uint32_t theirs = __shfl_xor_sync(~0u, upper ? a : b, distance);
    (upper ? a : b) = theirs;
  }

  const BackwardParams& p_;
  const BiasWorks& works_;
  State& state_;
  const int lane_, first_row_;  // first_row_: of the warp in the block's rows
  uint32_t s_bias_;             // of the warp's part of what is in use
  const uint32_t rows_, keys_;  // lower halves of descriptors
  RingCount<Config::kStages> slab_at_;
  RingCount<Config::kSlots> step_at_;

  Fragment sum_;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    bias_gradient_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BiasMaps maps,
                         const __grid_constant__ BiasWorks works, const float* delta) {
  extern __shared__ __align__(1024) char shared[];
  auto& state = *reinterpret_cast<BiasState<Config>*>(shared + Config::kSlabsBytes);
  const uint32_t s_slabs = ptx::shared_address(shared);
  const uint32_t s_bias = s_slabs + Config::kSlabsBytes + BiasState<Config>::bytes();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) state.init();
  __syncthreads();
  if (warp < kGroupWarps) {
    ptx::give_up_registers<Config::kLoaderRegisters>();
    BiasLoader<Config> loader(p, maps, works, state, s_slabs, lane);
    if (warp == 0) loader.load_slabs();
    if (warp > 0) loader.find_steps(delta, static_cast<uint32_t>(warp - 1));
  } else {
    ptx::take_registers<Config::kRegisters>();
    BiasGroup<Config>(p, works, state, s_slabs, s_bias, warp - kGroupWarps, lane).run();
  }
}

/// dbias from the shares of chunks. A thread per element.
static __global__ void __launch_bounds__(256)
    bias_shares_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BiasWorks works, int shares) {
  const ScoreView& d = p.dbias;
  const int64_t keys = p.seqlen_k, rows = d.row_stride == 0 ? 1 : p.seqlen_q;
  const int64_t total = works.tiles.batches * works.tiles.heads * rows * keys;
  for (int64_t n = int64_t{blockIdx.x} * 256 + threadIdx.x; n < total; n += int64_t{gridDim.x} * 256) {
    float sum = 0.0f;
    for (int share = 0; share < shares; ++share) sum += works.shares[share * total + n];
    const int64_t row = n / keys, head = row / rows;
    const int64_t at = head / works.tiles.heads * d.batch_stride + head % works.tiles.heads * d.head_stride +
                       row % rows * d.row_stride + n % keys;
    switch (d.dtype) {
      case DType::kFloat16:
        static_cast<__half*>(d.data)[at] = __float2half(sum);
        break;
      case DType::kBFloat16:
        static_cast<__nv_bfloat16*>(d.data)[at] = __float2bfloat16(sum);
        break;
      default:
        static_cast<float*>(d.data)[at] = sum;
    }
  }
}

template <class Element>
inline sm80::BiasTiles bias_tiles(const BackwardParams& p) {
  using Config = BiasConfig<Element, 64>;
  constexpr int64_t kWantedWorks = 528;  // four for each SM
  return {p, Config::kRows, Config::kKeys, kWantedWorks};
}

/// Memory beside the tensors.
struct BiasMemory {
  float *delta, *shares;
  int num_shares;
  int64_t bytes;

  BiasMemory(const BackwardParams& p, const sm80::BiasTiles& tiles, void* memory) {
    const auto bytes_of = [](int64_t floats) { return (floats * 4 + 255) / 256 * 256; };
    const bool sums_rows = p.dbias.row_stride == 0;
    num_shares = static_cast<int>(sums_rows || tiles.chunks > 1 ? tiles.chunks : 0);
    const int64_t size = int64_t{tiles.batches} * tiles.heads * (sums_rows ? 1 : p.seqlen_q) * p.seqlen_k;
    const int64_t delta_bytes = bytes_of(p.heads_q * sm80::rows_of_head(p));
    delta = static_cast<float*>(memory);
    shares = num_shares ? reinterpret_cast<float*>(static_cast<char*>(memory) + delta_bytes) : nullptr;
    bytes = delta_bytes + bytes_of(num_shares * size);
  }
};

template <class Element, int kHeadDim>
void run_bias_gradient(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Config = BiasConfig<Element, kHeadDim>;
  const sm80::BiasTiles tiles = bias_tiles<Element>(p);
  const BiasMemory workspace(p, tiles, memory);
  sm80::launch_bias_row_terms<Element>(p, workspace.delta, stream);
  BiasWorks works{tiles, workspace.shares, 0, static_cast<int>(grid_size(tiles.count() * tiles.chunks))};
  if (works.count == 0) return;

  constexpr int64_t kFixedBytes = Config::kSlabsBytes + BiasState<Config>::bytes();
  const int64_t bias_bytes = Config::kWarps * Config::Bias::bytes(p.bias);
  works.buffers = kFixedBytes + 2 * bias_bytes <= shared_bytes_per_block() ? 2 : 1;
  TensorShape grad_shape = query_shape(p, p.head_dim);
  grad_shape.dim = p.head_dim_v;
  const BiasMaps maps = {encode_tensor_map(p.q, query_shape(p, p.head_dim), p.dtype, Config::kRows),
                         encode_tensor_map(p.k, key_shape(p, p.head_dim), p.dtype, Config::kKeys),
                         encode_tensor_map(p.v, key_shape(p, p.head_dim_v), p.dtype, Config::kKeys),
                         encode_tensor_map(p.grad_out, grad_shape, p.dtype, Config::kRows)};
  const int64_t blocks = std::min<int64_t>(works.count, device_attribute(cudaDevAttrMultiProcessorCount));
  const LaunchShape shape{dim3(grid_size(blocks)), dim3(Config::kThreads),
                          static_cast<size_t>(kFixedBytes + works.buffers * bias_bytes)};
  launch("sm90/bias_gradient", bias_gradient_kernel<Config>, shape, stream, p, maps, works, workspace.delta);
  if (workspace.shares) {
    const int64_t rows = p.dbias.row_stride == 0 ? 1 : p.seqlen_q;
    const int64_t blocks = (int64_t{tiles.batches} * tiles.heads * rows * p.seqlen_k + 255) / 256;
    launch("sm90/bias_gradient", bias_shares_kernel, {dim3(grid_size(blocks)), dim3(256)}, stream, p, works,
           workspace.num_shares);
  }
}

}  // namespace flash_ext::sm90
