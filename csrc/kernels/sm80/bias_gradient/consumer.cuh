// A CTA of the gradient of the bias: the sum of dS over the tiles of scores that fall on its tile of dbias. See
// kernel.cuh.
#pragma once

#include "kernels/common/bias_gradient/tiles.cuh"
#include "kernels/common/score/bias_tile.cuh"
#include "kernels/ptx/shared_address.h"
#include "kernels/sm80/common/score_tile.cuh"
#include "storage.cuh"

namespace flash_ext::sm80 {

template <class Element>
struct BiasConsumer {
  using Shape = BiasShape<Element>;
  using Unit = ScoreUnit<Element>;
  static constexpr int kSlab = kBiasSlab;
  using Products = flash_ext::Products<Element, kSlab>;
  static constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kM = Shape::kM, kN = Shape::kN;
  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kRowBytes = Products::Layout::bytes(kRows);  // of a slab of Q or dO
  static constexpr int kStageBytes = kRowBytes + Products::Layout::bytes(kKeys);
  static constexpr int kMinStages = kMinBiasStages;
  static constexpr int kWordsPerRow = kKeys / 32, kWordBytes = kRows * kKeys / 8;
  using Bias = BiasTile<Shape::kWarpRows, Shape::kWarpKeys>;
  using Sum = BiasSum<kRows, kKeys, kThreads>;
  using Fragment = float[kM][kN][4];
  using RowValues = float[kM][2];
  static_assert(kStageBytes == bias_stage_bytes(Shape::kFloat) &&
                    (sizeof(ScoreTiles) + 15) / 16 * 16 == kScoreTilesBytes,
                "which the plan goes by");
  static_assert(Bias::kBytes16 == bias_tile_bytes(DType::kFloat16, Shape::kWarpRows, Shape::kWarpKeys) &&
                    Bias::kBytes32 == bias_tile_bytes(DType::kFloat32, Shape::kWarpRows, Shape::kWarpKeys),
                "which the plan goes by");
  static_assert(Sum::kBytes <= kMinStages * kStageBytes, "the sum takes the place of the slabs");

  const BackwardParams& p;
  const BiasTiles& tiles;
  const BiasShared& plan;
  const float* const delta;
  char* const shared;
  const int warp, lane, warp_row, warp_key;

  __device__ __forceinline__ BiasConsumer(const BackwardParams& p, const BiasTiles& tiles, const BiasShared& plan,
                                          const float* delta, char* shared)
      : p(p),
        tiles(tiles),
        plan(plan),
        delta(delta),
        shared(shared),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        warp_row(warp / Shape::kKeyWarps * Shape::kWarpRows),
        warp_key(warp % Shape::kKeyWarps * Shape::kWarpKeys) {}

  __device__ __forceinline__ static int slabs(int64_t columns) {
    return (static_cast<int>(columns) + kSlab - 1) / kSlab;
  }
  __device__ __forceinline__ int score_slabs() const { return slabs(p.head_dim); }
  /// The number of slabs of Q and K, and of dO and V.
  __device__ __forceinline__ int all_slabs() const {
    return score_slabs() + (p.grad_out.data && !p.grad_weights.data ? slabs(p.head_dim_v) : 0);
  }
  /// The stage of the n-th slabs of all score tiles.
  __device__ __forceinline__ uint32_t stage(int n) const {
    return ptx::shared_address(shared) + n % plan.stages * kStageBytes;
  }
  /// At most as many score tiles as stages are under way, and one more is searched for.
  __device__ __forceinline__ int slot(int score_tile) const { return score_tile % (plan.stages + 1); }
  __device__ __forceinline__ BiasScoreTile& score_tile_at(int score_tile) const {
    return reinterpret_cast<BiasScoreTile*>(shared + plan.score_tiles_at)[slot(score_tile)];
  }
  __device__ __forceinline__ uint32_t* words_of(int score_tile) const {
    return reinterpret_cast<uint32_t*>(shared + plan.words_at + slot(score_tile) * kWordBytes);
  }
  __device__ __forceinline__ bool has_masks() const { return p.mask.data || p.blocks.offsets; }
  __device__ __forceinline__ Bias bias_tile() const {
    return {ptx::shared_address(shared) + plan.bias_at +
                warp * static_cast<int>(p.bias.dtype == DType::kFloat32 ? Bias::kBytes32 : Bias::kBytes16),
            p.bias, lane};
  }

  /// How far the search for score tiles has come. Only thread 0 uses it, unless there are masks.
  __device__ __forceinline__ ScoreTiles& ahead() const {
    return *reinterpret_cast<ScoreTiles*>(shared + plan.search_at);
  }

  /// Finds the next score tile with a visible pair. By all threads if there are masks, else by one.
  __device__ __forceinline__ void seek(int score_tile) const {
    if (!has_masks() && threadIdx.x != 0) return;
    BiasScoreTile& found = score_tile_at(score_tile);
    ScoreTiles ahead = this->ahead();
    for (; ahead.any(); ahead.next(p, tiles, blockIdx.y)) {
      const Sequence sequence(p, ahead.entry(), ahead.head_q());
      const int first_query = ahead.query_tile() * kRows, first_key = ahead.key_tile() * kKeys;
      const int end_query = min(first_query + kRows, sequence.seqlen_q);
      const Window window = sequence.window();
      const Interval some = visible_keys(first_query, end_query, sequence.seqlen_k, window);
      if (first_key >= some.end || first_key + kKeys <= some.begin) continue;
      const Interval every = common_keys(first_query, end_query, sequence.seqlen_k, window);
      bool masked = false;
      if (has_masks()) {
        const TileVisibility visible = build_visibility<kThreads, kRows, kKeys>(
            words_of(score_tile), MaskRows(p.mask, sequence), BlockMaskRows(p.blocks, sequence), first_query, first_key,
            sequence.seqlen_q, sequence.seqlen_k);
        if (!visible.any) continue;
        masked = !visible.all;
      }
      if (threadIdx.x == 0) {
        found = {sequence.batch,
                 sequence.head,
                 first_query,
                 first_key,
                 sequence.seqlen_q,
                 sequence.seqlen_k,
                 true,
                 first_key < every.begin || first_key + kKeys > every.end,
                 masked,
                 first_query + kRows <= sequence.seqlen_q,
                 query_rows<const Element>(p.q, sequence).base,
                 key_rows<const Element, false>(p, p.k, sequence).base,
                 key_rows<const Element, false>(p, p.v, sequence).base,
                 p.grad_out.data ? query_rows<const Element>(p.grad_out, sequence).base : nullptr,
                 static_cast<const float*>(p.lse.data) + sequence.lse_offset(p.lse),
                 delta ? delta + row_of_head(p, sequence, 0) : nullptr};
        ahead.next(p, tiles, blockIdx.y);
        this->ahead() = ahead;
      }
      return;
    }
    if (threadIdx.x == 0) {
      found.valid = false;
      this->ahead() = ahead;
    }
  }
  /// Copies the n-th slabs, as one group of copies, which is empty when there are none.
  __device__ __forceinline__ void load(int n) const {
    const BiasScoreTile& score_tile = score_tile_at(n / all_slabs());
    if (score_tile.valid) {
      const int slab_of_score_tile = n % all_slabs();
      const bool of_scores = slab_of_score_tile < score_slabs();
      const int slab = of_scores ? slab_of_score_tile : slab_of_score_tile - score_slabs();
      const int columns = static_cast<int>(of_scores ? p.head_dim : p.head_dim_v) - slab * kSlab;
      load_slab<kRows>(stage(n), of_scores ? score_tile.q : score_tile.grad_out,
                       of_scores ? p.q.row_stride : p.grad_out.row_stride, slab, score_tile.first_query,
                       score_tile.seqlen_q, columns);
      load_slab<kKeys>(stage(n) + kRowBytes, of_scores ? score_tile.k : score_tile.v,
                       of_scores ? p.k.row_stride : p.v.row_stride, slab, score_tile.first_key, score_tile.seqlen_k,
                       columns);
    }
    ptx::cp_async_commit();
  }
  template <int kSlabRows>
  __device__ __forceinline__ static void load_slab(uint32_t s_slab, const void* base, int64_t row_stride, int slab,
                                                   int first, int num_rows, int columns) {
    const RowSource<const Element, false> rows{static_cast<const Element*>(base) + slab * kSlab, row_stride};
    load_tile<Element, kSlab, kThreads, kSlabRows>(s_slab, rows, first, num_rows, min(columns, kSlab));
  }

  __device__ __forceinline__ void wait_for_slabs() const {
    switch (plan.stages) {  // copies of one stage more are never under way
      case 2:
        ptx::cp_async_wait<0>();
        break;
      case 3:
        ptx::cp_async_wait<1>();
        break;
      default:
        ptx::cp_async_wait<2>();
    }
    __syncthreads();
  }

  /// c += A B^T for the warp's rows of both slabs of a stage.
  __device__ __forceinline__ void multiply(Fragment& c, uint32_t s_stage) const {
    const uint32_t s_lane_a = s_stage + Products::lane_a(lane) + warp_row * Products::kRowBytes;
    const uint32_t s_lane_b = s_stage + kRowBytes + Products::lane_b(lane) + warp_key * Products::kRowBytes;
    constexpr int kUnroll = Shape::kFloat ? 1 : 4;
    multiply_rows<Products, kSlab / Products::kDepth, kUnroll>(c, s_lane_a, s_lane_b);
  }

  __device__ __forceinline__ TileCoordinates<false> coordinates(const BiasScoreTile& score_tile) const {
    return TileCoordinates<false>::of_lane(score_tile.first_query + warp_row, score_tile.first_key + warp_key, lane);
  }

  /// Loads lse of the lane's rows, -inf for rows that do not exist or see nothing, and -delta.
  __device__ __forceinline__ void load_terms(RowValues& lse, RowValues& minus_delta,
                                             const BiasScoreTile& score_tile) const {
    const TileCoordinates<false> at = coordinates(score_tile);
    const float* const g_lse = score_tile.lse;
    const float* const g_delta = score_tile.delta;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = at.row(m, 2 * r);
        const bool there = i < score_tile.seqlen_q;
        lse[m][r] = there ? Unit::lse_with_slack(g_lse[i]) : -INFINITY;
        minus_delta[m][r] = there && g_delta ? -g_delta[i] : 0.0f;
      }
  }

  /// sum += dS, from S and f dP - delta, where nothing but a bias without -inf is added to scores.
  __device__ __forceinline__ void add_plain(Fragment& sum, Fragment& s, const Fragment& dp,
                                            const RowValues& lse) const {
    const float scale = score_scale(p, Unit::kPerNatural);
    // Hidden pairs get weight 0 by a stabiliser of inf.
    RowValues stabiliser;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) stabiliser[m][r] = lse[m][r] == -INFINITY ? INFINITY : lse[m][r];
    for_each_score(s, [&](float& x, int, int, int) { x = Unit::multiply(x, scale); });
    if (p.bias.data) bias_tile().add(s, Unit::kPerNatural);
    for_each_score(s, [&](float& x, int m, int n, int e) {
      x = Unit::weight_of_score(x, stabiliser[m][e / 2]);
      if (x != 0.0f) sum[m][n][e] = fmaf(x, dp[m][n][e], sum[m][n][e]);
    });
  }

  /// Adds dS of a score tile under any options.
  __device__ __forceinline__ void add(Fragment& sum, Fragment& s, Fragment& dp, const RowValues& lse,
                                      const BiasScoreTile& score_tile, int number) const {
    const Sequence sequence(p, score_tile.batch, score_tile.head);
    const TileCoordinates<false> at = coordinates(score_tile);
    {
      const ScoreRules<Element> rules(p, sequence);
      rules.scale_and_cap(s);
      rules.add_alibi(s, at);
      if (plan.stages_bias) {
        bias_tile().add(s, Unit::kPerNatural);
      } else if (p.bias.data) {
        rules.add_bias(s, at);
      }
    }
    if (score_tile.outside_window) hide_outside_window(s, at, sequence);
    if (score_tile.masked) {
      const uint32_t* const s_lane = words_of(number) + (warp_row + lane / 4) * kWordsPerRow + warp_key / 32;
      hide_by_words(s, lane, [&](int row, int group) { return s_lane[row * kWordsPerRow + group]; });
    }
    for_each_score(s, [&](float& x, int m, int, int e) { x = visible_weight<Unit>(x, lse[m][e / 2]); });
    if (plan.stages_bias) bias_tile().hide(s);
    if (p.grad_weights.data) {
      drop(s, sequence, p.dropout_mode, at);
      multiply_by_gradient(s, sequence, at);
      for_each_score(s, [&](float& x, int m, int n, int e) { sum[m][n][e] += x; });
    } else {
      if (drops()) {
        drop(dp, sequence, kDropoutApply, at);
        RowValues rematerialise, minus_delta;
        load_terms(rematerialise, minus_delta, score_tile);
        for_each_score(dp, [&](float& x, int m, int, int e) { x += minus_delta[m][e / 2]; });
      }
      // Where the weight is 0 the rest may be NaN, from keys or rows that this query does not see.
      for_each_score(s, [&](float& x, int m, int n, int e) {
        if (x != 0.0f) sum[m][n][e] = fmaf(x, dp[m][n][e], sum[m][n][e]);
      });
    }
  }

  __device__ __forceinline__ bool drops() const { return p.dropout.rule.threshold > 0; }
  __device__ __forceinline__ void drop(Fragment& w, const Sequence& sequence, int mode,
                                       const TileCoordinates<false>& at) const {
    if (drops() && mode != kDropoutIgnore) Dropout(p, sequence).apply(w, p.dropout.rule, mode, at);
  }

  /// Turns weights into dS of attention_weights. Weights that are not 0 belong to pairs that exist.
  __device__ __forceinline__ void multiply_by_gradient(Fragment& w, const Sequence& sequence,
                                                       const TileCoordinates<false>& at) const {
    const ScoreView& view = p.grad_weights;
    const auto* const g_lane = static_cast<const Element*>(view.data) + sequence.batch * view.batch_stride +
                               sequence.head * view.head_stride + at.row(0, 0) * view.row_stride +
                               at.column(0, 0) * view.col_stride;
    for_each_score(w, [&](float& x, int m, int n, int e) {
      if (x != 0.0f)
        x *= static_cast<float>(g_lane[(16 * m + 8 * (e / 2)) * view.row_stride + (8 * n + e % 2) * view.col_stride]);
    });
  }

  /// Whether the warp's part of a copied bias holds a -inf. b is 0 before and after.
  __device__ __forceinline__ bool bias_hides(Fragment& b) const {
    if (!plan.stages_bias) return false;
    bias_tile().add(b, 1.0f);
    bool hides = false;
    for_each_score(b, [&](float& x, int, int, int) {
      hides = hides || x == -INFINITY;
      x = 0.0f;
    });
    return __any_sync(~0u, hides);
  }

  /// Loads the bias for all sequences: rows and keys that the first sequence lacks may exist in others.
  __device__ __forceinline__ void load_bias(const DbiasTile& mine) const {
    if (!plan.stages_bias) return;
    Sequence sequence(p, mine.batch, mine.head);
    sequence.seqlen_q = static_cast<int>(p.seqlen_q);
    sequence.seqlen_k = static_cast<int>(p.seqlen_k);
    bias_tile().load(sequence, mine.query * kRows + warp_row, mine.key * kKeys + warp_key);
  }

  __device__ __forceinline__ void store(const Sum& result, Fragment& sum) const {
    __syncthreads();  // the last slabs have been read
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          *reinterpret_cast<float2*>(result.s_sum +
                                     Sum::at(warp_row + 16 * m + 8 * r + lane / 4, warp_key + 8 * n + 2 * (lane % 4))) =
              make_float2(sum[m][n][2 * r], sum[m][n][2 * r + 1]);
  }

  /// Adds the score tiles of chunk blockIdx.y that fall on a tile of dbias.
  __device__ __forceinline__ void run(Fragment& sum, const DbiasTile& mine) {
    if (threadIdx.x == 0) ahead() = ScoreTiles(p, tiles, mine, blockIdx.y);
    load_bias(mine);
    __syncthreads();
    seek(0);
    for (int n = 1; n < plan.stages; ++n) {
      __syncthreads();
      load(n - 1);
      seek(n);
    }
    bool plain = p.softcap == 0.0 && !p.alibi_slopes && plan.stages_bias == (p.bias.data != nullptr) && !drops() &&
                 !p.grad_weights.data;
    int at = 0;  // slabs that have been multiplied
#pragma unroll 1
    for (int number = 0;; ++number) {
      wait_for_slabs();
      const BiasScoreTile& score_tile = score_tile_at(number);
      if (!score_tile.valid) return;
      seek(number + plan.stages);  // now that registers are free
      Fragment s, dp;
      for_each_score(s, [](float& x, int, int, int) { x = 0.0f; });
      if (number == 0) plain = plain && !bias_hides(s);
      RowValues lse, minus_delta;
      load_terms(lse, minus_delta, score_tile);
      for (int slab = 0;;) {
        load(at + plan.stages - 1);
        multiply(s, stage(at++));
        if (++slab == score_slabs()) break;
        wait_for_slabs();
      }
      for_each_score(dp, [&](float& x, int m, int, int e) { x = drops() ? 0.0f : minus_delta[m][e / 2]; });
#pragma unroll 1
      for (int slab = score_slabs(); slab < all_slabs(); ++slab) {
        wait_for_slabs();
        load(at + plan.stages - 1);
        multiply(dp, stage(at++));
      }
      if (plain && score_tile.is_full && !score_tile.outside_window && !score_tile.masked) {
        add_plain(sum, s, dp, lse);
      } else {
        add(sum, s, dp, lse, score_tile, number);
      }
    }
  }
};

}  // namespace flash_ext::sm80
