// What the backward recomputes for a tile of queries and a tile of keys, panel by panel, one query per vector lane:
//   P  = exp(S - lse)
//   dP = V dO^T                              (or the gradient that is given, for attention_weights)
//   dS = P * (f dP - D)                      f: dropout factor,   D = rowsum(dO * O) - dlse  (0 for attention_weights)
// dS is the gradient of the final score, which is that of the bias; through the softcap it gains (1 - tanh^2).
#pragma once

#include "arena.h"
#include "dropout_panel.h"
#include "kernels.h"
#include "online_softmax.h"
#include "query_operand.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

/// Which dS a caller uses.
enum class ScoreGradient {
  kNone,          // only P is wanted
  kOfProduct,     // of q . k * scale, through the softcap
  kOfFinalScore,  // of the score that the softmax sees
};

template <class T>
class GradientTile {
 public:
  static constexpr int kPanel = Shape<T>::kPanel;
  static constexpr int64_t kPanelStride = kBlockN * kPanel;

  GradientTile(const BackwardJob& job, ScoreGradient wanted, Arena& arena)
      : job_(job),
        p_(job.params),
        wanted_(wanted),
        of_weights_(p_.grad_weights.data != nullptr),
        rules_(p_),
        dropout_(p_) {
    const int64_t panels = ceil_div(job.tile_rows, kPanel);
    const int64_t rows = panels * kPanel;
    panel_ = arena.take<Panel<T>>(panels);
    keys_ = arena.take<Interval>(panels);
    lse_ = arena.take<T>(rows);
    term_ = arena.take<T>(rows);
    ds_sum_ = arena.take<T>(rows);
    const bool matrix = uses_matrix_units<T>(p_);
    q_rows_.take(arena, rows, p_.head_dim, round_up(p_.head_dim, kPanel), matrix);
    q_.take(arena, panels, p_.head_dim, rules_.q_factor, matrix);
    k_.take(arena, kBlockN, p_.head_dim, p_.head_dim, matrix);
    probabilities_ = arena.take<T>(panels * kPanelStride);
    gradients_ = arena.take<T>(panels * kPanelStride);
    if (dropping()) factors_ = arena.take<T>(kPanelStride);
    if (rules_.cap > 0) slope_ = arena.take<T>(panels * kPanelStride);
    if (matrix) {
      q_pairs_ = arena.take<uint32_t>(rows * q_rows_.half_stride / 2);
    }
    if (of_weights_) return;
    do_rows_.take(arena, rows, p_.head_dim_v, round_up(p_.head_dim_v, kPanel), matrix);
    do_.take(arena, panels, p_.head_dim_v, T(1), matrix);
    v_.take(arena, kBlockN, p_.head_dim_v, p_.head_dim_v, matrix);
    if (matrix) do_pairs_ = arena.take<uint32_t>(rows * do_rows_.half_stride / 2);
  }

  void load_queries(const Sequence& seq, const QueryRows& rows) {
    seq_ = seq;
    rows_ = rows;
    head_ = rows.first_head;
    num_panels_ = ceil_div(rows.count, kPanel);
    __builtin_memset(ds_sum_, 0, num_panels_ * kPanel * sizeof(T));
    load_row_terms();
    load_query_rows(q_rows_, q_, q_pairs_, p_.q);
    if (!of_weights_) load_query_rows(do_rows_, do_, do_pairs_, p_.grad_out);
    for (int64_t n = 0; n < num_panels_; ++n) panel_[n].set(rows, n * kPanel, seq);
  }

  /// Recomputes all panels against a tile of keys. First it computes P of all panels, which needs K, then dS, which
  /// needs V. Either tile alone stays in the L1 cache meanwhile; both together would not.
  void compute_ds(const KeyTile& tile) {
    tile_ = tile;
    const int64_t head_kv = head_ / (p_.heads_q / p_.heads_kv);
    load_keys(k_, p_.k, p_.dtype, seq_, head_kv, tile.begin, tile.end);
    for (int64_t n = 0; n < num_panels_; ++n) {
      const Interval keys = intersect(panel_[n].some, {tile.begin, tile.end});
      keys_[n] = keys.begin == keys.end ? Interval{0, 0} : Interval{keys.begin - tile.begin, keys.end - tile.begin};
      if (sees_any(n)) compute_p(n);
    }
    if (wanted_ == ScoreGradient::kNone && !dropping()) return;
    const bool with_v = wanted_ != ScoreGradient::kNone && !of_weights_;
    if (with_v) load_keys(v_, p_.v, p_.dtype, seq_, head_kv, tile.begin, tile.end);
    for (int64_t n = 0; n < num_panels_; ++n) {
      if (sees_any(n)) compute_ds(n);
    }
  }

  /// Whether a panel saw any of the keys; if not, its blocks hold nothing.
  bool sees_any(int64_t n) const { return keys_[n].begin < keys_[n].end; }

  int64_t num_panels() const { return num_panels_; }
  const Interval* keys() const { return keys_; }
  const RowTile<T>& k() const { return k_; }
  const RowTile<T>& q_rows() const { return q_rows_; }
  const RowTile<T>& do_rows() const { return do_rows_; }
  /// For matrix units: pairs of the rows of Q and dO, panel by panel.
  const uint32_t* q_pairs() const { return q_pairs_; }
  const uint32_t* do_pairs() const { return do_pairs_; }
  /// Panel n of P, dropout applied, and of dS: (kBlockN, kPanel), zero where a key is not seen.
  T* probabilities(int64_t n) const { return probabilities_ + n * kPanelStride; }
  T* gradients(int64_t n) const { return gradients_ + n * kPanelStride; }
  /// Sum of dS over the keys visited since the queries were loaded; kept for attention_weights only.
  const T* ds_sum() const { return ds_sum_; }

 private:
  void load_row_terms() {
    const T* terms = static_cast<const T*>(job_.row_term);
    const int64_t first = row_of_head(p_, 0, seq_, head_, 0);
    for (int64_t row = 0; row < num_panels_ * kPanel; ++row) {
      // exp(S - inf) = 0: lanes without a query and queries that saw nothing take part with probability 0.
      lse_[row] = static_cast<T>(kInfinity);
      term_[row] = 0;
      if (row >= rows_.count) continue;
      const T lse = *query_lse<T>(p_.lse, seq_, rows_.query(row), head_);
      if (lse == -static_cast<T>(kInfinity)) continue;
      lse_[row] = lse == static_cast<T>(kInfinity) ? infinite_lse() : lse;
      if (terms != nullptr) term_[row] = terms[first + rows_.query(row)];
    }
  }

  /// The lse to use for a row whose lse is inf. If a score is infinite, out of the row and all its weights are NaN: lse
  /// becomes NaN. If the sink is infinite, they are 0: lse stays inf. attention_weights uses the lse of its caller as
  /// it is.
  T infinite_lse() const {
    const T infinity = static_cast<T>(kInfinity);
    const bool by_sink = p_.sink != nullptr && static_cast<const T*>(p_.sink)[head_] == infinity;
    return of_weights_ || by_sink ? infinity : infinity - infinity;
  }

  /// Loads rows of Q or dO, row-major and as panels. Rows that play no part become 0, whatever they hold.
  void load_query_rows(RowTile<T>& tile, QueryOperand<T>& panels, uint32_t* pairs, const TensorView& view) {
    if (panels.in_halves()) {
      load_query_halves(tile, panels, pairs, view);
      return;
    }
    Poison<T> poison{};
    for (int64_t row = 0; row < num_panels_ * kPanel; ++row) {
      T* to = tile.data + row * tile.stride;
      __builtin_memset(to, 0, tile.stride * sizeof(T));
      if (plays_part(row, view)) poison |= load_row(to, address_of_query(row, view), p_.dtype, tile.dim);
      panels.set_row(row, to);
    }
    tile.isolate(num_panels_ * kPanel, poison);
  }

  bool plays_part(int64_t row, const TensorView& view) const {
    return lse_[row] != static_cast<T>(kInfinity) && view.data != nullptr;
  }

  const char* address_of_query(int64_t row, const TensorView& view) const {
    return query_row(view, p_.dtype, seq_, rows_.query(row), head_);
  }

  /// Does the same for matrix units. Lanes of panels keep Inf and NaN, which belong to their query alone. Row-major
  /// rows, over which keys sum, are sanitised.
  void load_query_halves([[maybe_unused]] RowTile<T>& tile, [[maybe_unused]] QueryOperand<T>& panels,
                         [[maybe_unused]] uint32_t* pairs, [[maybe_unused]] const TensorView& view) {
    if constexpr (kHasMatrixUnits<T>) {
      const int64_t stride = tile.half_stride;
      tile.num_isolated = 0;
      for (int64_t n = 0; n < num_panels_; ++n) {
        uint16_t* panel = tile.halves + n * kPanel * stride;
        bool special[kPanel] = {};
        __builtin_memset(panel, 0, kPanel * stride * sizeof(uint16_t));
        for (int64_t lane = 0; lane < kPanel; ++lane) {
          const int64_t row = n * kPanel + lane;
          if (!plays_part(row, view)) continue;
          special[lane] = copy_halves(panel + lane * stride, address_of_query(row, view), tile.dim, stride);
        }
        panels.set_panel(n, panel);
        for (int64_t lane = 0; lane < kPanel; ++lane) {
          if (special[lane]) tile.isolate_halves(n * kPanel + lane);
        }
        pack_row_pairs(pairs + n * kPanel * stride / 2, panel, stride);
      }
    }
  }

  bool dropping() const { return dropout_.active() && !(of_weights_ && p_.dropout_mode == kDropoutIgnore); }

  ScorePanel<T> scores_of(int64_t n) const { return {probabilities(n), keys_[n].begin, keys_[n].end}; }
  T* slope(int64_t n) const { return slope_ + n * kPanelStride; }

  /// Computes the scores, then P without dropout.
  void compute_p(int64_t n) {
    const ScorePanel<T> scores = scores_of(n);
    q_.multiply(scores, k_, n);
    finish_scores(scores, rules_, panel_[n], seq_, tile_, rules_.cap > 0 ? slope(n) : nullptr);
    const T* lse = lse_ + n * kPanel;
    scores.for_each_vector([=](int64_t, int c, T* s) { store(s, probability<T>(load(s), load(lse + c))); });
    clear_outside(scores.s, scores);
  }

  /// Computes dP, then dS. Multiplies P by the dropout factor, as dV needs it.
  void compute_ds(int64_t n) {
    const ScorePanel<T> scores = scores_of(n);
    if (dropping()) draw_factors(n, scores);
    if (wanted_ == ScoreGradient::kNone) {
      scores.for_each_vector([=](int64_t j, int c, T* p) { store(p, load(p) * load(factors_ + j * kPanel + c)); });
      return;
    }
    if (of_weights_) {
      load_weight_gradients(gradients(n), n, scores);
    } else {
      do_.multiply({gradients(n), scores.begin, scores.end}, v_, n);
    }
    finish_ds(n, scores);
    clear_outside(gradients(n), scores);
  }

  void draw_factors(int64_t n, const ScorePanel<T>& scores) {
    const bool negate = of_weights_ && p_.dropout_mode == kDropoutNegate;
    dropout_.draw(factors_, scores, panel_[n], seq_.batch * p_.heads_q + head_, tile_.begin,
                  negate ? T(1) : dropout_.kept_scale(), negate ? T(-1) : T(0));
  }

  void load_weight_gradients(T* dp, int64_t n, const ScorePanel<T>& scores) {
    const ScoreView& w = p_.grad_weights;
    for (int lane = 0; lane < kPanel; ++lane) {
      const bool in_use = lane < panel_[n].count;
      const int64_t row = in_use ? seq_.batch * w.batch_stride + head_ * w.head_stride +
                                       panel_[n].query[lane] * w.row_stride + tile_.begin * w.col_stride
                                 : 0;
      for (int64_t j = scores.begin; j < scores.end; ++j) {
        dp[j * kPanel + lane] = in_use ? load_value<T>(w.data, w.dtype, row + j * w.col_stride) : T(0);
      }
    }
  }

  /// Turns dP into dS in place.
  void finish_ds(int64_t n, const ScorePanel<T>& scores) {
    const T* term = term_ + n * kPanel;
    T* sum = of_weights_ ? ds_sum_ + n * kPanel : nullptr;
    T* gradients_of_panel = gradients(n);
    const T* slopes = wanted_ == ScoreGradient::kOfProduct && rules_.cap > 0 ? slope(n) : nullptr;
    const T* factors = dropping() ? factors_ : nullptr;
    scores.for_each_vector([=](int64_t j, int c, T* probability) __attribute__((always_inline)) {
      const int64_t at = j * kPanel + c;
      const Vec<T> p = load(probability);
      Vec<T> dp = load(gradients_of_panel + at);
      if (factors != nullptr) {
        dp *= load(factors + at);
        store(probability, p * load(factors + at));
      }
      // Where P is 0 the rest may be NaN, the slope too, from keys or rows that this query has nothing to do with.
      const auto unless_hidden = [&](const Vec<T>& x) { return p == T(0) ? Vec<T>{} : x; };
      const Vec<T> ds = unless_hidden(p * (dp - load(term + c)));
      if (sum != nullptr) store(sum + c, load(sum + c) + ds);
      store(gradients_of_panel + at, slopes != nullptr ? unless_hidden(ds * load(slopes + at)) : ds);
    });
  }

  static void clear_outside(T* block, const ScorePanel<T>& scores) {
    __builtin_memset(block, 0, scores.begin * kPanel * sizeof(T));
    __builtin_memset(block + scores.end * kPanel, 0, (kBlockN - scores.end) * kPanel * sizeof(T));
  }

  const BackwardJob& job_;
  const BackwardParams& p_;
  ScoreGradient wanted_;
  bool of_weights_;
  ScoreRules<T> rules_;
  Dropout<T> dropout_;
  Panel<T>* panel_;
  Interval* keys_;  // per panel: keys of the loaded tile that it sees, counted from the tile's first
  T* lse_;
  T* term_;
  T* ds_sum_;
  QueryOperand<T> q_, do_;
  uint32_t* q_pairs_ = nullptr;
  uint32_t* do_pairs_ = nullptr;
  T* probabilities_;  // (panels, kBlockN, kPanel)
  T* gradients_;
  T* factors_ = nullptr;
  T* slope_ = nullptr;  // (panels, kBlockN, kPanel)
  RowTile<T> q_rows_, do_rows_, k_, v_;
  Sequence seq_{};
  QueryRows rows_{};
  KeyTile tile_{};
  int64_t head_ = 0;
  int64_t num_panels_ = 0;
};

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
