// Forward: out = softmax(S) V and lse = logsumexp(S) for tiles of queries (FlashAttention-2, Dao 2023, algorithm 1).
//
// A tile of up to 256 queries walks over its tiles of 64 keys. For each panel of queries the scores S^T = K Q^T are a
// small block (keys x queries, one query per vector lane) that stays in the L1 cache while it becomes P^T and is
// multiplied: O^T = alpha O^T + V^T P^T. A sequence of up to four queries does the same along the head dim
// (few_rows.h). With split keys, each split writes its own normalised result and lse; the merge
//   lse = log(exp(sink) + sum_s exp(lse_s)),   out = sum_s exp(lse_s - lse) out_s
// follows in the order of the splits. Matrix units take the same steps with bfloat16 operands (matrix_tiles.h).
#pragma once

#include "arena.h"
#include "dropout_panel.h"
#include "few_rows.h"
#include "kernels.h"
#include "matrix_softmax.h"
#include "online_softmax.h"
#include "packed_keys.h"
#include "query_operand.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

struct ForwardItem {
  int64_t batch, first_head, split, tile;

  ForwardItem(const ForwardJob& job, int64_t item) {
    const int64_t head_groups = job.params.heads_q / job.group;
    const ItemOfSequence of(job.tiles_before, job.params.batch, head_groups * job.splits, item);
    batch = of.batch;
    // Late tiles first: under a causal mask they are the heavy ones, and light ones fill the gaps at the end.
    tile = of.tiles - 1 - of.index % of.tiles;
    // Heads before splits: the keys of neighbouring heads share pages and prefetched lines.
    first_head = of.index / of.tiles % head_groups * job.group;
    split = of.index / of.tiles / head_groups;
  }
};

/// The keys of a split. Equal parts are rounded up to whole tiles.
FLASH_EXT_INLINE Interval keys_of_split(const ForwardJob& job, const Sequence& seq, int64_t split) {
  const int64_t size = job.split_size > 0 ? job.split_size : round_up(ceil_div(seq.seqlen_k, job.splits), kBlockN);
  return {min(split * size, seq.seqlen_k), min((split + 1) * size, seq.seqlen_k)};
}

/// The log-sum-exp of a row. If a score is infinite, it is infinite, too, while the sum of e^(s - inf) is NaN.
template <class T>
FLASH_EXT_INLINE T lse_of(T maximum, T sum) {
  return maximum == static_cast<T>(kInfinity) ? maximum : maximum + log(sum);
}

template <class T>
class ForwardTile {
 public:
  static constexpr int kPanel = Shape<T>::kPanel;

  ForwardTile(const ForwardJob& job, void* scratch)
      : job_(job), p_(job.params), rules_(p_), dropout_(p_), packed_(job) {
    Arena arena(scratch);
    const int64_t panels = ceil_div(job.tile_rows, kPanel);
    const bool matrix = uses_matrix_units<T>(p_);
    out_rows_ = matrix ? padded_dim(p_.head_dim_v) : p_.head_dim_v;
    panel_ = arena.take<Panel<T>>(panels);
    state_ = arena.take<SoftmaxState<T>>(panels);
    q_.take(arena, panels, p_.head_dim, rules_.q_factor, matrix);
    few_q_ = arena.take<T>(kFewRows<T> * round_up(p_.head_dim, Shape<T>::kLanes));
    out_ = arena.take<T>(panels * out_rows_ * kPanel);
    scores_ = arena.take<T>((matrix ? 1 : panels) * kBlockN * kPanel);
    if (job.row_maxima != nullptr) row_maxima_ = arena.take<T>(panels * kPanel);
    if (dropout_.active()) factors_ = arena.take<T>(kBlockN * kPanel);
    row_ = arena.take<T>(max(p_.head_dim, p_.head_dim_v));
    rows_of_panel_ = arena.take<T>(kPanel * p_.head_dim_v);
    k_.take(arena, kBlockN, p_.head_dim, round_up(p_.head_dim, Shape<T>::kLanes), matrix);
    v_.take(arena, kBlockN, p_.head_dim_v, round_up(p_.head_dim_v, Shape<T>::kLanes), matrix);
    if (matrix) {
      own_ = {k_.halves, arena.take<uint16_t>(out_rows_ * kBlockN)};
      p_pairs_ = arena.take<uint32_t>(panels * kKeyPairWords);
      q_rows_ = arena.take<uint16_t>(kPanel * k_.half_stride);
    }
    bytes_ = arena.size();
  }

  int64_t bytes() const { return bytes_; }

  void run(const ForwardItem& item) {
    const TileRegisters registers(uses_matrix_units<T>(p_));
    seq_ = sequence_of(p_, item.batch);
    const Interval rows = RowTiles(p_, job_.tile_rows, job_.group).rows(item.tile, seq_.seqlen_q * job_.group);
    rows_ = {rows.begin, rows.end - rows.begin, item.first_head, job_.group};
    if (rows_.count <= 0) return;
    start();
    const Interval keys = intersect(visible_keys(rows_, seq_), keys_of_split(job_, seq_, item.split));
    const int64_t head_kv = item.first_head / (p_.heads_q / p_.heads_kv);
    for (KeyTiles tiles(p_, seq_, rows_, keys); tiles.next();) {
      visit(tiles.tile(), head_kv);
    }
    for (int64_t n = 0; n < num_panels_; ++n) finish(n, item.split);
  }

 private:
  void start() {
    num_panels_ = ceil_div(rows_.count, kPanel);
    // The last rows of a longer sequence do not count as few: the backward subtracts lse from their scores, which must
    // have the same bits there.
    few_ = seq_.seqlen_q * job_.group <= kFewRows<T>;
    k_.in_halves = v_.in_halves = !few_ && uses_matrix_units<T>(p_);
    late_factor_ = late_factor();
    out_layout_ = few_ ? LaneLayout{rows_.count, 1, v_.stride} : kPanelLayout<T>;
    __builtin_memset(out_, 0, num_panels_ * out_rows_ * kPanel * sizeof(T));
    // Lanes without a query stay finite.
    __builtin_memset(scores_, 0, (uses_matrix_units<T>(p_) ? 1 : num_panels_) * kBlockN * kPanel * sizeof(T));
    const int64_t row_bytes = p_.head_dim * size_of(p_.dtype);
    for (int64_t row = 0; row < rows_.count; ++row) prefetch_row(address_of_query(row), row_bytes);
    load_queries();
    for (int64_t n = 0; n < num_panels_; ++n) {
      panel_[n].set(rows_, n * kPanel, seq_);
      state_[n].clear();
    }
    if (row_maxima_ == nullptr) return;
    for (int64_t lane = 0; lane < num_panels_ * kPanel; ++lane) row_maxima_[lane] = -static_cast<T>(kInfinity);
  }

  T* out_of(int64_t panel) const { return out_ + panel * out_rows_ * kPanel; }

  const char* address_of_query(int64_t row) const {
    return query_row(p_.q, p_.dtype, seq_, rows_.query(row), rows_.head(row));
  }

  void load_queries() {
    const auto address = [&](int64_t row) { return address_of_query(row); };
    if (!few_) {
      q_.load_rows(p_.dtype, rows_.count, address, row_, q_rows_);
      return;
    }
    __builtin_memset(few_q_, 0, kFewRows<T> * k_.stride * sizeof(T));
    for (int64_t row = 0; row < rows_.count; ++row) {
      load_row(row_, address(row), p_.dtype, p_.head_dim);
      for (int64_t d = 0; d < p_.head_dim; ++d) few_q_[row * k_.stride + d] = row_[d] * rules_.q_factor;
    }
  }

  /// Multiplies all panels with K, then all with V. Either tile alone stays in the L1 cache meanwhile; both together
  /// would not.
  void visit(const KeyTile& tile, int64_t head_kv) {
    const bool packed = find_packed(tile, head_kv);
    if (!packed) load_keys(k_, p_.k, p_.dtype, seq_, head_kv, tile.begin, tile.end);
    for (int64_t n = 0; n < num_panels_; ++n) {
      if (sees(n, tile)) score(n, tile, scores_of(n, tile));
    }
    if (!packed) load_v(tile, head_kv);
    for (int64_t n = 0; n < num_panels_; ++n) {
      if (sees(n, tile)) accumulate(n, scores_of(n, tile));
    }
  }

  /// Points to the operands of a tile: packed already, or else room to pack them. Returns whether they are packed.
  bool find_packed(const KeyTile& tile, int64_t head_kv) {
    if (!k_.in_halves) return false;
    const int64_t index = tile.begin / kBlockN;
    const bool packed =
        job_.packed_keys != nullptr && tile.begin % kBlockN == 0 && packed_.is_finite(seq_.batch, head_kv, index);
    const PackedTile operands = packed ? packed_.tile(seq_.batch, head_kv, index) : own_;
    k_.halves = operands.k;
    v_columns_ = operands.v_columns;
    k_.num_isolated = v_.num_isolated = 0;
    return packed;
  }

  void load_v(const KeyTile& tile, int64_t head_kv) {
    load_keys(v_, p_.v, p_.dtype, seq_, head_kv, tile.begin, tile.end);
    if constexpr (kHasMatrixUnits<T>) {
      if (v_.in_halves) transpose_rows(v_columns_, v_.halves, v_.half_stride);
    }
  }

  bool sees(int64_t n, const KeyTile& tile) const {
    const Interval keys = intersect(panel_[n].some, {tile.begin, tile.end});
    return keys.begin < keys.end;
  }

  ScorePanel<T> scores_of(int64_t n, const KeyTile& tile) const {
    const Interval keys = intersect(panel_[n].some, {tile.begin, tile.end});
    return {scores_ + (uses_matrix_units<T>(p_) ? 0 : n) * kBlockN * kPanel, keys.begin - tile.begin,
            keys.end - tile.begin};
  }

  /// Computes S^T = K Q^T, then P^T.
  void score(int64_t n, const KeyTile& tile, const ScorePanel<T>& scores) {
    if (few_) {
      with_constant<kFewRows<T>>(rows_.count, [&](auto rows) {
        multiply_rows<T, decltype(rows)::value>(scores.s, k_.data, few_q_, k_.stride, scores.begin, scores.end);
      });
      const auto value = [&](int64_t d, int64_t lane) { return few_q_[lane * k_.stride + d]; };
      multiply_exactly(scores.s, k_, value, rows_.count, scores.begin, scores.end);
    } else if (k_.in_halves) {
      score_halves(n, tile, scores);
      return;
    } else {
      q_.multiply(scores, k_, n, panel_[n].vectors);
    }
    finish_scores(scores, rules_, panel_[n], seq_, tile);
    softmax_step(state_[n], scores, panel_[n].vectors);
    if (dropout_.active()) drop(scores, n, tile);
  }

  uint32_t* p_pairs_of(int64_t n) const { return p_pairs_ + n * kKeyPairWords; }

  /// The factor by which the softmax step multiplies, if nothing but masks comes between q . k and the scores; else 1.
  /// Its product with log2 e must be finite.
  T late_factor() const {
    constexpr T kLargest = static_cast<T>(1e38);
    const bool products = rules_.cap == 0 && p_.alibi_slopes == nullptr && p_.bias.data == nullptr;
    const bool is_late = k_.in_halves && products && !dropout_.active();
    return is_late && rules_.q_factor > 0 && rules_.q_factor < kLargest ? rules_.q_factor : T(1);
  }

  /// Computes S^T, then P^T, rounded and packed.
  void score_halves([[maybe_unused]] int64_t n, [[maybe_unused]] const KeyTile& tile,
                    [[maybe_unused]] const ScorePanel<T>& scores) {
    if constexpr (kHasMatrixUnits<T>) {
      q_.multiply(scores, k_, n, panel_[n].vectors, /*unscaled=*/late_factor_ != T(1));
      finish_scores(scores, rules_, panel_[n], seq_, tile);
      if (!dropout_.active()) {
        softmax_step_packed(state_[n], p_pairs_of(n), scores, late_factor_, panel_[n].vectors,
                            row_maxima_ == nullptr ? nullptr : row_maxima_ + n * kPanel);
        return;
      }
      softmax_step(state_[n], scores, panel_[n].vectors);
      drop(scores, n, tile);
      pack_key_pairs(p_pairs_of(n), scores.s, scores.begin, scores.end);
    }
  }

  /// O^T = alpha O^T + V^T P^T.
  void accumulate(int64_t n, const ScorePanel<T>& scores) {
    const T* alpha = state_[n].alpha;
    if (few_) {
      with_constant<kFewRows<T>>(rows_.count, [&](auto rows) {
        accumulate_rows<T, decltype(rows)::value>(out_, alpha, v_.data, v_.stride, scores.s, scores.begin, scores.end);
      });
    } else if (v_.in_halves) {
      accumulate_halves(n, scores);
    } else if (panel_[n].vectors == 1) {
      accumulate_transposed<T, 1>(out_of(n), alpha, v_.data, v_.stride, scores.s, scores.begin, scores.end,
                                  p_.head_dim_v);
    } else {
      accumulate_transposed<T>(out_of(n), alpha, v_.data, v_.stride, scores.s, scores.begin, scores.end, p_.head_dim_v);
    }
    accumulate_exactly(out_of(n), v_, scores.s, scores.begin, scores.end, out_layout_);
  }

  void accumulate_halves([[maybe_unused]] int64_t n, [[maybe_unused]] const ScorePanel<T>& scores) {
    if constexpr (kHasMatrixUnits<T>) {
      T* out = out_of(n);
      if (state_[n].has_scaled()) scale_columns(out, state_[n].alpha, out_rows_);
      if (panel_[n].vectors == 1) {
        accumulate_key_pairs<1>(out, v_columns_, p_pairs_of(n), scores.begin, scores.end, out_rows_);
      } else {
        accumulate_key_pairs<2>(out, v_columns_, p_pairs_of(n), scores.begin, scores.end, out_rows_);
      }
      if (v_.num_isolated > 0) unpack_key_pairs(scores.s, p_pairs_of(n), scores.begin, scores.end);
    }
  }

  void drop(const ScorePanel<T>& scores, int64_t n, const KeyTile& tile) {
    const int64_t batch_head = seq_.batch * p_.heads_q + rows_.first_head;
    dropout_.draw(factors_, scores, panel_[n], batch_head, tile.begin, T(1), T(0));
    scores.for_each_vector([&](int64_t row, int c, T* s) { store(s, load(s) * load(factors_ + row * kPanel + c)); });
  }

  /// The largest score of a query; Inf or NaN if one of its scores is. The maximum leaves out NaN, but the sum is NaN
  /// then.
  T row_maximum(int64_t n, int lane) const {
    const bool packed = k_.in_halves && !dropout_.active();
    const T maximum = packed ? row_maxima_[n * kPanel + lane] * late_factor_ : state_[n].maximum[lane];
    const T sum = state_[n].sum[lane];
    return sum == sum || maximum == static_cast<T>(kInfinity) ? maximum : sum;
  }

  void finish(int64_t n, int64_t split) {
    const T* rows = out_of(n);
    if (!few_) {
      store_lanes(rows_of_panel_, p_.head_dim_v, out_of(n), p_.head_dim_v);
      rows = rows_of_panel_;
    }
    const int64_t stride = few_ ? v_.stride : p_.head_dim_v;
    for (int lane = 0; lane < panel_[n].count; ++lane) {
      const int64_t i = panel_[n].query[lane], head = panel_[n].head[lane];
      T sum = state_[n].sum[lane];
      T maximum = state_[n].maximum[lane] * late_factor_;
      const bool nothing = sum == T(0);
      if (row_maxima_ != nullptr)
        static_cast<T*>(job_.row_maxima)[row_of_head(p_, split, seq_, head, i)] = row_maximum(n, lane);
      T factor = 1;
      if (p_.sink != nullptr && job_.partial_out == nullptr && !nothing) {
        const T sink = static_cast<const T*>(p_.sink)[head];
        factor = maximum < sink ? exp(maximum - sink) : T(1);
        sum = sum * factor + (maximum < sink ? T(1) : exp(sink - maximum));
        maximum = max(maximum, sink);
      }
      const T lse = nothing ? -static_cast<T>(kInfinity) : lse_of(maximum, sum);
      factor = nothing ? T(0) : factor * dropout_.kept_scale() / sum;
      const T* out = rows + lane * stride;
      for (int64_t d = 0; d < p_.head_dim_v; ++d) row_[d] = out[d] * factor;
      if (job_.partial_out == nullptr) {
        *query_lse<T>(p_.lse, seq_, i, head) = lse;
        store_row(query_row(p_.out, p_.dtype, seq_, i, head), p_.dtype, row_, p_.head_dim_v);
      } else {
        const int64_t row = row_of_head(p_, split, seq_, head, i);
        static_cast<T*>(job_.partial_lse)[row] = lse;
        T* to = static_cast<T*>(job_.partial_out) + row * p_.head_dim_v;
        __builtin_memcpy(to, row_, p_.head_dim_v * sizeof(T));
      }
    }
  }

  const ForwardJob& job_;
  const ForwardParams& p_;
  ScoreRules<T> rules_;
  Dropout<T> dropout_;
  PackedKeys packed_;
  Panel<T>* panel_;
  SoftmaxState<T>* state_;
  QueryOperand<T> q_;
  T* few_q_;                 // (up to four rows, head_dim): Q, scaled
  T* out_;                   // (panels, out_rows_, kPanel), not normalised; with few_: (rows, head_dim_v)
  T* scores_;                // (panels, kBlockN, kPanel); with matrix units: one panel at a time
  T* row_maxima_ = nullptr;  // (panels, kPanel): the largest product of each query in the packed softmax step
  T* factors_ = nullptr;
  T* row_;
  T* rows_of_panel_;  // (kPanel, head_dim_v)
  RowTile<T> k_;
  RowTile<T> v_;
  PackedTile own_{};               // room for a tile that is not packed beforehand
  uint16_t* v_columns_ = nullptr;  // (out_rows_, kBlockN): v_ transposed, for matrix units
  uint32_t* p_pairs_ = nullptr;    // P, panel by panel
  uint16_t* q_rows_ = nullptr;     // rows of Q of a panel
  int64_t out_rows_;
  int64_t bytes_;
  Sequence seq_{};
  QueryRows rows_{};
  int64_t num_panels_ = 0;
  bool few_ = false;
  T late_factor_ = 1;
  LaneLayout out_layout_{};
};

inline int64_t count_tiles(const AttentionParams& p, int64_t batch, int64_t tile_rows, int64_t group) {
  return RowTiles(p, tile_rows, group).count_for(sequence_of(p, batch).seqlen_q * group);
}

inline int64_t forward_items(const ForwardJob& job) {
  return job.params.heads_q / job.group * job.splits * job.tiles_before[job.params.batch];
}

template <class T>
int64_t forward_scratch(const ForwardJob& job) {
  return ForwardTile<T>(job, nullptr).bytes();
}

template <class T>
void forward_item(const ForwardJob& job, int64_t item, void* scratch) {
  ForwardTile<T>(job, scratch).run(ForwardItem(job, item));
}

/// Rows of out that are merged by one item.
constexpr int64_t kMergedRows = 16;

inline int64_t merge_items(const ForwardJob& job) {
  return job.params.batch * job.params.heads_q * ceil_div(job.params.seqlen_q, kMergedRows);
}

template <class T>
int64_t merge_scratch(const ForwardJob& job) {
  return (job.params.head_dim_v + job.splits) * static_cast<int64_t>(sizeof(T));
}

/// Merges the splits of one row.
template <class T>
void merge_row(const ForwardJob& job, const Sequence& seq, int64_t head, int64_t i, void* scratch) {
  const ForwardParams& p = job.params;
  const T* partial_lse = static_cast<const T*>(job.partial_lse);
  const T* partial_out = static_cast<const T*>(job.partial_out);
  T* out = static_cast<T*>(scratch);
  T* share = out + p.head_dim_v;

  T maximum = -static_cast<T>(kInfinity);
  bool nothing = true;
  for (int64_t s = 0; s < job.splits; ++s) {
    const T lse = partial_lse[row_of_head(p, s, seq, head, i)];
    maximum = max(maximum, lse);
    nothing = nothing && lse == -static_cast<T>(kInfinity);
  }
  T sum = 0;
  if (p.sink != nullptr && !nothing) {
    const T sink = static_cast<const T*>(p.sink)[head];
    maximum = max(maximum, sink);
    sum = sink == maximum ? T(1) : exp(sink - maximum);  // an infinite sink takes everything
  }
  for (int64_t s = 0; s < job.splits; ++s) {
    const T lse = partial_lse[row_of_head(p, s, seq, head, i)];
    share[s] = lse == -static_cast<T>(kInfinity) ? T(0) : exp(lse - maximum);
    sum += share[s];
  }
  for (int64_t d = 0; d < p.head_dim_v; ++d) out[d] = 0;
  for (int64_t s = 0; s < job.splits; ++s) {
    if (share[s] == T(0)) continue;
    const T* part = partial_out + row_of_head(p, s, seq, head, i) * p.head_dim_v;
    const T factor = share[s] / sum;
    for (int64_t d = 0; d < p.head_dim_v; ++d) out[d] += factor * part[d];
  }
  *query_lse<T>(p.lse, seq, i, head) = nothing ? -static_cast<T>(kInfinity) : lse_of(maximum, sum);
  store_row(query_row(p.out, p.dtype, seq, i, head), p.dtype, out, p.head_dim_v);
}

/// Merges the splits of some rows of one head.
template <class T>
void merge_item(const ForwardJob& job, int64_t item, void* scratch) {
  const ForwardParams& p = job.params;
  const int64_t groups = ceil_div(p.seqlen_q, kMergedRows);
  const int64_t first = item % groups * kMergedRows;
  const int64_t head = item / groups % p.heads_q;
  const Sequence seq = sequence_of(p, item / groups / p.heads_q);
  for (int64_t i = first; i < min(first + kMergedRows, seq.seqlen_q); ++i) merge_row<T>(job, seq, head, i, scratch);
}

inline int64_t max_logit_items(const ForwardJob& job) { return job.params.batch * job.params.heads_q; }

/// Writes the largest score of one head of a batch entry; NaN if a score is NaN.
template <class T>
void max_logit_item(const ForwardJob& job, int64_t item, void*) {
  const ForwardParams& p = job.params;
  const int64_t head = item % p.heads_q;
  const Sequence seq = sequence_of(p, item / p.heads_q);
  const T* row_maxima = static_cast<const T*>(job.row_maxima);
  T largest = -static_cast<T>(kInfinity);
  for (int64_t split = 0; split < job.splits; ++split) {
    const T* row = row_maxima + row_of_head(p, split, seq, head, 0);
    for (int64_t i = 0; i < seq.seqlen_q; ++i) largest = largest != largest || row[i] <= largest ? largest : row[i];
  }
  static_cast<T*>(p.max_logit)[item] = largest;
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
