// attention_weights: exp(score - lse) for a given lse, tile by tile, straight into the result.
#pragma once

#include "arena.h"
#include "dropout_panel.h"
#include "kernels.h"
#include "online_softmax.h"
#include "query_operand.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

template <class T>
class WeightsTile {
 public:
  static constexpr int kPanel = Shape<T>::kPanel;

  WeightsTile(const WeightsJob& job, void* scratch) : job_(job), p_(job.params), rules_(p_), dropout_(p_) {
    Arena arena(scratch);
    const bool matrix = uses_matrix_units<T>(p_);
    q_.take(arena, ceil_div(job.tile_rows, kPanel), p_.head_dim, rules_.q_factor, matrix);
    scores_ = arena.take<T>(kBlockN * kPanel);
    factors_ = arena.take<T>(kBlockN * kPanel);
    row_ = arena.take<T>(p_.head_dim);
    k_.take(arena, kBlockN, p_.head_dim, p_.head_dim, matrix);
    if (matrix) {
      q_rows_ = arena.take<uint16_t>(kPanel * k_.half_stride);
    }
    bytes_ = arena.size();
  }

  int64_t bytes() const { return bytes_; }

  void run(int64_t item) {
    const TileRegisters registers(k_.in_halves);
    const RowTiles tiles(p_, job_.tile_rows);
    const ItemOfSequence of(job_.tiles_before, p_.batch, p_.heads_q, item);
    const int64_t head = of.index / of.tiles, tile = of.index % of.tiles;
    seq_ = sequence_of(p_, of.batch);
    const Interval rows = tiles.rows(tile, seq_.seqlen_q);
    if (p_.seq.cu_seqlens_q == nullptr) clear(head, tiles.rows(tile, p_.seqlen_q));
    rows_ = {rows.begin, rows.end - rows.begin, head, 1};
    if (rows_.count <= 0) return;
    load_queries();
    for (KeyTiles keys(p_, seq_, rows_, visible_keys(rows_, seq_)); keys.next();) {
      load_keys(k_, p_.k, p_.dtype, seq_, head / (p_.heads_q / p_.heads_kv), keys.tile().begin, keys.tile().end);
      for (int64_t n = 0; n * kPanel < rows_.count; ++n) visit(n, keys.tile());
    }
  }

 private:
  int64_t origin(int64_t head, int64_t i) const {
    const ScoreView& w = p_.weights;
    return seq_.batch * w.batch_stride + head * w.head_stride + i * w.row_stride;
  }

  void load_queries() {
    const auto address = [&](int64_t row) {
      return query_row(p_.q, p_.dtype, seq_, rows_.query(row), rows_.first_head);
    };
    q_.load_rows(p_.dtype, rows_.count, address, row_, q_rows_);
  }

  void clear(int64_t head, const Interval& rows) {
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      for (int64_t j = 0; j < p_.seqlen_k; ++j) {
        store_value(p_.weights.data, p_.weights.dtype, origin(head, i) + j * p_.weights.col_stride, T(0));
      }
    }
  }

  void visit(int64_t n, const KeyTile& tile) {
    panel_.set(rows_, n * kPanel, seq_);
    const Interval keys = intersect(panel_.some, {tile.begin, tile.end});
    if (keys.begin == keys.end) return;
    const ScorePanel<T> scores{scores_, keys.begin - tile.begin, keys.end - tile.begin};
    q_.multiply(scores, k_, n);
    finish_scores(scores, rules_, panel_, seq_, tile);
    exponentiate(scores);
    if (dropout_.active() && p_.dropout_mode != kDropoutIgnore) drop(scores, tile);
    store_panel(scores, tile);
  }

  void exponentiate(const ScorePanel<T>& scores) {
    alignas(64) T shift[kPanel] = {};
    for (int lane = 0; lane < panel_.count; ++lane) {
      const T lse = *query_lse<T>(p_.lse, seq_, panel_.query[lane], rows_.first_head);
      shift[lane] = lse == -static_cast<T>(kInfinity) ? -lse : lse;  // a query that saw no key: all weights 0
    }
    scores.for_each_vector([&](int64_t, int c, T* s) { store(s, probability<T>(load(s), load(shift + c))); });
  }

  void drop(const ScorePanel<T>& scores, const KeyTile& tile) {
    const bool negate = p_.dropout_mode == kDropoutNegate;
    dropout_.draw(factors_, scores, panel_, seq_.batch * p_.heads_q + rows_.first_head, tile.begin,
                  negate ? T(1) : dropout_.kept_scale(), negate ? T(-1) : T(0));
    scores.for_each_vector([&](int64_t n, int c, T* s) { store(s, load(s) * load(factors_ + n * kPanel + c)); });
  }

  void store_panel(const ScorePanel<T>& scores, const KeyTile& tile) {
    for (int lane = 0; lane < panel_.count; ++lane) {
      const int64_t row = origin(rows_.first_head, panel_.query[lane]) + tile.begin * p_.weights.col_stride;
      for (int64_t n = scores.begin; n < scores.end; ++n) {
        store_value(p_.weights.data, p_.weights.dtype, row + n * p_.weights.col_stride, scores_[n * kPanel + lane]);
      }
    }
  }

  const WeightsJob& job_;
  const WeightsParams& p_;
  ScoreRules<T> rules_;
  Dropout<T> dropout_;
  QueryOperand<T> q_;
  T* scores_;
  T* factors_;
  T* row_;
  uint16_t* q_rows_ = nullptr;  // of a panel, for matrix units
  RowTile<T> k_;
  int64_t bytes_;
  Sequence seq_{};
  QueryRows rows_{};
  Panel<T> panel_;
};

inline int64_t weights_items(const WeightsJob& job) { return job.params.heads_q * job.tiles_before[job.params.batch]; }

template <class T>
int64_t weights_scratch(const WeightsJob& job) {
  return WeightsTile<T>(job, nullptr).bytes();
}

template <class T>
void weights_item(const WeightsJob& job, int64_t item, void* scratch) {
  WeightsTile<T>(job, scratch).run(item);
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
