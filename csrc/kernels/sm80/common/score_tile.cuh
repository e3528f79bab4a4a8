// A tile of scores of 64 queries and 64 keys, computed by one CTA. attention_weights, its backward, the gradient of the
// bias and max_logit are made of such tiles.
//
// Rows go through shared memory in slabs of kScoreSlab columns, two stages of an A and a B slab, so that one kernel
// serves every head dim. A warp owns 16 of the queries. Every method ends with a barrier and leaves the slabs free.
#pragma once

#include "config.h"
#include "kernels/common/mask/tile_range.h"
#include "kernels/common/mask/visibility.cuh"
#include "kernels/common/sanitise.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/common/warp_products.cuh"
#include "kernels/common/warp_products_tf32.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/shared_address.h"

namespace flash_ext::sm80 {

constexpr int kScoreRows = 64;  // queries of a tile
constexpr int kScoreKeys = 64;
constexpr int kScoreSlab = 64;
constexpr int kScoreThreads = kScoreRows / 16 * 32;

/// 16 x 64 accumulators of a warp.
using ScoreFragment = float[1][kScoreKeys / 8][4];

inline int64_t score_tiles(int64_t length) { return (length + kScoreRows - 1) / kScoreRows; }
static_assert(kScoreRows == kScoreKeys && kScoreSlab == kScoreKeys,
              "tiles and slabs are squares, which may swap roles");

template <class Element>
struct ScoreTile {
  using Products = flash_ext::Products<Element, kScoreSlab>;
  using Unit = ScoreUnit<Element>;
  using Rows = RowSource<Element, false>;
  static constexpr int kTileBytes = Products::Layout::bytes(kScoreRows);
  static constexpr int kStages = 2;
  static constexpr int kStepsTogether = sizeof(Element) == 4 ? 1 : 2;  // more fragments of floats spill
  static constexpr int kCtasPerSm = sizeof(Element) == 4 ? 2 : 3;      // while one waits for loads, others compute
  static constexpr int kWordsPerRow = kScoreKeys / 32;
  static constexpr int kSharedBytes = 2 * kStages * kTileBytes + kScoreRows * kWordsPerRow * 4;
  static_assert(kSharedBytes <= kSmallestSharedBytes, "every GPU must be able to launch it");
  static_assert(2 * kTileBytes >= kScoreRows * kScoreKeys * 4, "two slabs hold a float for each score");

  const AttentionParams& p;
  const Sequence& sequence;
  const int first_query, first_key;
  const int lane, warp_row;
  const uint32_t s_slabs;
  uint32_t* const s_words;
  bool outside_window = false, masked = false;  // whether the window or lengths, or masks, hide some pair of the tile

  __device__ __forceinline__ ScoreTile(const AttentionParams& p, const Sequence& sequence, int first_query,
                                       int first_key, char* shared)
      : p(p),
        sequence(sequence),
        first_query(first_query),
        first_key(first_key),
        lane(threadIdx.x % 32),
        warp_row(threadIdx.x / 32 * 16),
        s_slabs(ptx::shared_address(shared)),
        s_words(reinterpret_cast<uint32_t*>(shared + 2 * kStages * kTileBytes)) {}

  __device__ __forceinline__ TileCoordinates<false> coordinates() const {
    return TileCoordinates<false>::of_lane(first_query + warp_row, first_key, lane);
  }
  __device__ __forceinline__ uint32_t slab(int n) const { return s_slabs + n * kTileBytes; }
  /// Byte offset of an element of a slab.
  __device__ __forceinline__ static uint32_t element_at(int row, int column) {
    constexpr int kChunk = Products::Layout::kChunkElements;
    return Products::Layout::at(row, column / kChunk) + column % kChunk * static_cast<int>(sizeof(Element));
  }

  /// Whether some query of the tile sees some key of it. Call it first.
  __device__ __forceinline__ bool sees_any() {
    const int end_query = min(first_query + kScoreRows, sequence.seqlen_q);
    const Window window = sequence.window();
    const Interval some = visible_keys(first_query, end_query, sequence.seqlen_k, window);
    if (first_key >= some.end || first_key + kScoreKeys <= some.begin) return false;
    const Interval every = common_keys(first_query, end_query, sequence.seqlen_k, window);
    outside_window = first_key < every.begin || first_key + kScoreKeys > every.end;
    if (!p.mask.data && !p.blocks.offsets) return true;
    const TileVisibility visible = build_visibility<kScoreThreads, kScoreRows, kScoreKeys>(
        s_words, MaskRows(p.mask, sequence), BlockMaskRows(p.blocks, sequence), first_query, first_key,
        sequence.seqlen_q, sequence.seqlen_k);
    masked = !visible.all;
    return visible.any;
  }

  /// Whether scores() of a tile leaves all of its queries in the slabs, for the next tile of the same queries.
  __device__ __forceinline__ bool keeps_queries() const {
    return p.head_dim <= kStages * kScoreSlab && p.bias.data == nullptr;
  }

  /// Computes scores, -inf where hidden. kKeepCapSlope: slabs 2 and 3 then hold what times_cap_slope needs.
  /// `has_queries`: the tile before left the queries in the slabs.
  template <bool kKeepCapSlope>
  __device__ __forceinline__ void scores(ScoreFragment& s, bool has_queries = false) const {
    const ScoreRules<Element> rules(p, sequence);
    multiply_rows(s, query_rows<Element>(p.q, sequence), first_query, sequence.seqlen_q,
                  key_rows<Element, false>(p, p.k, sequence), first_key, sequence.seqlen_k,
                  static_cast<int>(p.head_dim), has_queries);
    for_each_score(s, [&](float& x, int, int, int) { x = Unit::multiply(x, rules.scale); });
    if (rules.cap > 0.0f) {
      for_each_score(s, [&](float& x, int, int n, int e) {
        x = softcap_tanh<Element>(x);
        if constexpr (kKeepCapSlope) store_shared(own_slot(n, e), softcap_slope(x));
        x = Unit::multiply(x, rules.cap);
      });
    }
    rules.add_alibi(s, coordinates());
    if (rules.bias.present()) {
      rules.bias.with_type([&](auto type) { load_matrix<decltype(type)>(p.bias); });
      for_each_in_matrix(s, [](float& x, float b) { x = with_bias(x, b, Unit::of_bias); });
    }
    hide(s);
  }

  /// Loads the tile's part of a matrix of scores into slabs 0 and 1, as floats; 0 beyond the lengths.
  template <class T>
  __device__ __forceinline__ void load_matrix(const ScoreView& view) const {
    const T* const g_matrix = place_in<const T>(view);
    if (rows_are_aligned<T>(view) && first_key + kScoreKeys <= sequence.seqlen_k) {
      load_matrix_chunks(g_matrix, view.row_stride);
    } else {
      load_matrix_elements(g_matrix, view);
    }
    __syncthreads();
  }

  /// Calls f(x, y) for every score x and the element y at its place in the matrix that was loaded.
  template <class F>
  __device__ __forceinline__ void for_each_in_matrix(ScoreFragment& s, F f) const {
#pragma unroll
    for (int n = 0; n < kScoreKeys / 8; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 y = load_shared<float2>(matrix_at(warp_row + lane / 4 + 8 * r, 8 * n + 2 * (lane % 4)));
        f(s[0][n][2 * r], y.x);
        f(s[0][n][2 * r + 1], y.y);
      }
    __syncthreads();
  }

  /// The tile's first element of a matrix of scores.
  template <class T>
  __device__ __forceinline__ T* place_in(const ScoreView& view) const {
    return static_cast<T*>(view.data) + sequence.batch * view.batch_stride + sequence.head * view.head_stride +
           first_query * view.row_stride + first_key * view.col_stride;
  }

  /// Whether the tile's rows of a matrix are made of 16-byte chunks.
  template <class T>
  __device__ __forceinline__ bool rows_are_aligned(const ScoreView& view) const {
    const int64_t start = reinterpret_cast<int64_t>(place_in<T>(view)), stride = view.row_stride * sizeof(T);
    return view.col_stride == 1 && (start | stride) % 16 == 0;
  }

  /// Multiplies dS by the slope of the softcap. At a hidden score, whose dS is 0, the slope may be NaN.
  __device__ __forceinline__ void times_cap_slope(ScoreFragment& s) const {
    if (p.softcap == 0.0) return;
    for_each_score(s,
                   [&](float& x, int, int n, int e) { x = x == 0.0f ? 0.0f : x * load_shared<float>(own_slot(n, e)); });
  }

  /// s = A B^T, for 64 rows of A from first_a on and of B from first_b on. Rows from num_a or num_b on count as 0.
  /// `has_a`: the slabs hold A.
  __device__ __forceinline__ void multiply_rows(ScoreFragment& s, const Rows& a, int first_a, int num_a, const Rows& b,
                                                int first_b, int num_b, int columns, bool has_a = false) const {
    for_each_score(s, [](float& x, int, int, int) { x = 0.0f; });
    const int num_slabs = (columns + kScoreSlab - 1) / kScoreSlab;
    const auto load = [&](int n) {
      if (n < num_slabs) {
        if (!has_a) load_slab(slab(n % kStages * 2), a, first_a, num_a, columns, n);
        load_slab(slab(n % kStages * 2 + 1), b, first_b, num_b, columns, n);
      }
      ptx::cp_async_commit();
    };
    load(0);
#pragma unroll 1
    for (int n = 0; n < num_slabs; ++n) {
      load(n + 1);
      ptx::cp_async_wait<1>();
      __syncthreads();
      multiply_slabs(s, slab(n % kStages * 2), slab(n % kStages * 2 + 1));
      __syncthreads();
    }
  }

  /// c += S B, for slab `n` of the columns of rows [first, + 64): warps own rows of S. S goes through shared memory,
  /// since a loop over it in registers would have to be unrolled, and then loads all of B at once.
  __device__ __forceinline__ void accumulate(ScoreFragment& c, ScoreFragment& s, const Rows& rows, int first,
                                             int num_rows, int columns, int n) const {
    for_each_score(s, [&](float& x, int, int tile, int e) { store_shared(own_slot(tile, e), x); });
    load_finite_slab(slab(0), rows, first, num_rows, columns, n);
    __syncthreads();
    const uint32_t s_lane = slab(0) + Products::lane_b_transposed(lane);
    constexpr int kTiles = Products::kDepth / 8;
#pragma unroll 1
    for (int step = 0; step < kScoreKeys / Products::kDepth; ++step) {
      float part[kTiles][4];
#pragma unroll
      for (int k = 0; k < 4 * kTiles; ++k)
        part[k / 4][k % 4] = load_shared<float>(own_slot(step * kTiles + k / 4, k % 4));
      typename Products::A a;
      Products::a_from_accumulators(a, part, 0);
      multiply_step(c, a, s_lane, step);
    }
    __syncthreads();
  }

  /// c += S^T B, the same for columns of S, of which a warp owns 16.
  __device__ __forceinline__ void accumulate_transposed(ScoreFragment& c, const ScoreFragment& s, const Rows& rows,
                                                        int first, int num_rows, int columns, int n) const {
    store_fragment(slab(1), s);
    load_finite_slab(slab(0), rows, first, num_rows, columns, n);
    __syncthreads();
    const uint32_t s_lane_a = slab(1) + Products::lane_a_transposed(lane);
    const uint32_t s_lane_b = slab(0) + Products::lane_b_transposed(lane);
#pragma unroll kStepsTogether
    for (int step = 0; step < kScoreRows / Products::kDepth; ++step) {
      typename Products::A a;
      Products::load_a_transposed(a, s_lane_a, warp_row / 16, step);
      multiply_step(c, a, s_lane_b, step);
    }
    __syncthreads();
  }

  /// Stores the warp's rows of c to slab `n` of the columns of rows [first, ...).
  __device__ __forceinline__ void store_slab(const ScoreFragment& c, const Rows& rows, int first, int num_rows,
                                             int columns, int n) const {
    store_fragment(slab(0), c);
    __syncwarp();
    store_rows<Element, kScoreSlab>(slab(0), Rows{rows.base + n * kScoreSlab, rows.row_stride}, warp_row, 16, first,
                                    num_rows, columns - n * kScoreSlab, lane);
    __syncthreads();
  }

  /// Stores the warp's rows of c as elements of a tile in shared memory.
  __device__ __forceinline__ void store_fragment(uint32_t s_tile, const ScoreFragment& c) const {
#pragma unroll
    for (int n = 0; n < kScoreKeys / 8; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        Products::store_pair(s_tile + Products::pair_at(warp_row + 8 * r + lane / 4, n, lane), c[0][n][2 * r],
                             c[0][n][2 * r + 1]);
  }

 private:
  /// The address, in slabs 2 and 3, of a slot for an accumulator. No other thread uses the slot.
  __device__ __forceinline__ uint32_t own_slot(int n, int e) const {
    return slab(2) + ((4 * n + e) * kScoreThreads + threadIdx.x) * 4;
  }

  /// Rows lie 64 floats apart, and are swizzled so that fragments are read from different banks.
  __device__ __forceinline__ uint32_t matrix_at(int row, int column) const {
    return slab(0) + (row * kScoreKeys + (column ^ (row % 8 * 4))) * 4;
  }

  template <class T>
  __device__ __forceinline__ void load_matrix_chunks(const T* g_matrix, int64_t row_stride) const {
    constexpr int kChunk = 16 / sizeof(T), kChunks = kScoreKeys / kChunk, kTogether = 4;  // loads under way at a time
    const int column = threadIdx.x % kChunks * kChunk;
#pragma unroll 1
    for (int first = threadIdx.x / kChunks; first < kScoreRows; first += kTogether * (kScoreThreads / kChunks)) {
      uint4 chunks[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int row = first + k * (kScoreThreads / kChunks);
        chunks[k] = first_query + row < sequence.seqlen_q
                        ? *reinterpret_cast<const uint4*>(g_matrix + row * row_stride + column)
                        : uint4{0, 0, 0, 0};
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const T* const values = reinterpret_cast<const T*>(&chunks[k]);
        const int row = first + k * (kScoreThreads / kChunks);
#pragma unroll
        for (int e = 0; e < kChunk; e += 2)
          store_shared(matrix_at(row, column + e),
                       float2{static_cast<float>(values[e]), static_cast<float>(values[e + 1])});
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void load_matrix_elements(const T* g_matrix, const ScoreView& view) const {
    constexpr int kRowStep = kScoreThreads / kScoreKeys, kTogether = 16;
    const int column = threadIdx.x % kScoreKeys;
    const bool inside = first_key + column < sequence.seqlen_k;
#pragma unroll 1
    for (int first = threadIdx.x / kScoreKeys; first < kScoreRows; first += kTogether * kRowStep) {
      T values[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int row = first + k * kRowStep;
        values[k] = inside && first_query + row < sequence.seqlen_q
                        ? g_matrix[row * view.row_stride + column * view.col_stride]
                        : static_cast<T>(0.0f);
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k)
        store_shared(matrix_at(first + k * kRowStep, column), static_cast<float>(values[k]));
    }
  }

  __device__ __forceinline__ static void load_slab(uint32_t s_slab, const Rows& rows, int first, int num_rows,
                                                   int columns, int n) {
    load_tile<Element, kScoreSlab, kScoreThreads, kScoreRows>(s_slab, Rows{rows.base + n * kScoreSlab, rows.row_stride},
                                                              first, num_rows, columns - n * kScoreSlab);
  }

  /// Loads a slab, with 0 in place of Inf and NaN: a hidden pair has gradient 0, and 0 * NaN is NaN. A query that sees
  /// an Inf or NaN of q or k has it in its score.
  __device__ __forceinline__ static void load_finite_slab(uint32_t s_slab, const Rows& rows, int first, int num_rows,
                                                          int columns, int n) {
    load_slab(s_slab, rows, first, num_rows, columns, n);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    sanitise_loaded_tile<Element, kScoreSlab, kScoreThreads, kScoreRows>(s_slab);
  }

  __device__ __forceinline__ void multiply_slabs(ScoreFragment& s, uint32_t s_a, uint32_t s_b) const {
    const uint32_t s_lane_a = s_a + Products::lane_a(lane), s_lane_b = s_b + Products::lane_b(lane);
    flash_ext::multiply_rows<Products, kScoreSlab / Products::kDepth, kStepsTogether>(s, s_lane_a, s_lane_b, warp_row);
  }

  __device__ __forceinline__ static void multiply_step(ScoreFragment& c, const typename Products::A& a, uint32_t s_lane,
                                                       int step) {
#pragma unroll
    for (int n = 0; n < kScoreSlab / 8; n += 2) {
      typename Products::B b;
      Products::load_b_transposed(b, s_lane, n / 2, step);
      Products::multiply(c[0][n], c[0][n + 1], a, b);
    }
  }

  __device__ __forceinline__ void hide(ScoreFragment& s) const {
    if (outside_window) hide_outside_window(s, coordinates(), sequence);
    if (!masked) return;
    hide_by_words(s, lane,
                  [&](int row, int group) { return s_words[(warp_row + lane / 4 + row) * kWordsPerRow + group]; });
  }
};

/// Applies a dropout mode of attention_weights to weights, or to the gradient of weights.
__device__ __forceinline__ void apply_dropout(ScoreFragment& w, const AttentionParams& p, const Sequence& sequence,
                                              int mode, const TileCoordinates<false>& at) {
  const Dropout dropout(p, sequence);
  if (!dropout.active || mode == kDropoutIgnore) return;
  dropout.apply(w, p.dropout.rule, mode, at);
}

/// Weights out of scores, e^(s - lse), by the row's lse.
template <class Unit>
struct WeightRows {
  float lse[2];  // -inf for rows that are not there or see nothing

  __device__ __forceinline__ WeightRows(const LseView& view, const Sequence& sequence, int first_row) {
    const float* const g_lse = static_cast<const float*>(view.data) + sequence.lse_offset(view);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = first_row + 8 * r;
      lse[r] = i < sequence.seqlen_q ? Unit::lse_with_slack(g_lse[i]) : -INFINITY;
    }
  }

  __device__ __forceinline__ float weight(float score, int r) const { return visible_weight<Unit>(score, lse[r]); }
};

/// Turns scores into weights, after dropout.
template <class Unit>
__device__ __forceinline__ void to_weights(ScoreFragment& s, const AttentionParams& p, const Sequence& sequence,
                                           const LseView& lse, int dropout_mode, const TileCoordinates<false>& at) {
  const WeightRows<Unit> rows(lse, sequence, at.row(0, 0));
  for_each_score(s, [&](float& x, int, int, int e) { x = rows.weight(x, e / 2); });
  apply_dropout(s, p, sequence, dropout_mode, at);
}

}  // namespace flash_ext::sm80
