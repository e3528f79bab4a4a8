// The gradient of an additive bias: dS, summed over the dimensions in which the bias is broadcast.
//
// An item owns a rectangle of dbias: one batch entry and head of it (all of them where it is broadcast), and a tile of
// queries and of keys (all of them where it is broadcast). It visits the tiles that fall on the rectangle in a fixed
// order and adds up their panels of dS, so the sum is repeatable, and no N x N buffer exists besides dbias.
#pragma once

#include "gradient_tile.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

/// How dbias is cut into items. A dimension with stride 0 is broadcast, and one item covers all of it.
struct BiasItems {
  int64_t batches, heads, query_tiles, key_tiles;

  explicit BiasItems(const BackwardJob& job) {
    const ScoreView& dbias = job.params.dbias;
    batches = dbias.batch_stride == 0 ? 1 : job.params.batch;
    heads = dbias.head_stride == 0 ? 1 : job.params.heads_q;
    query_tiles = dbias.row_stride == 0 ? 1 : RowTiles(job.params, job.tile_rows).count;
    key_tiles = dbias.col_stride == 0 ? 1 : ceil_div(job.params.seqlen_k, kBlockN);
  }

  int64_t count() const { return batches * heads * query_tiles * key_tiles; }
};

template <class T>
class BiasRectangle {
 public:
  static constexpr int kPanel = Shape<T>::kPanel;

  BiasRectangle(const BackwardJob& job, void* scratch)
      : job_(job), p_(job.params), arena_(scratch), tile_(job, ScoreGradient::kOfFinalScore, arena_) {
    sum_ = arena_.take<T>(sum_size());
  }

  int64_t bytes() const { return arena_.size(); }

  void run(int64_t item) {
    const TileRegisters registers(tile_.k().in_halves);
    const BiasItems items(job_);
    const int64_t key_tile = item % items.key_tiles;
    item /= items.key_tiles;
    const int64_t query_tile = item % items.query_tiles;
    item /= items.query_tiles;
    const int64_t head = item % items.heads, batch = item / items.heads;
    const Interval batches = part(batch, items.batches, p_.batch);
    const Interval heads = part(head, items.heads, p_.heads_q);
    const RowTiles tiles(p_, job_.tile_rows);
    const Interval query_tiles = part(query_tile, items.query_tiles, tiles.count);
    keys_ = items.key_tiles == 1 ? Interval{0, p_.seqlen_k}
                                 : Interval{key_tile * kBlockN, min((key_tile + 1) * kBlockN, p_.seqlen_k)};

    __builtin_memset(sum_, 0, sum_size() * sizeof(T));
    for (int64_t b = batches.begin; b < batches.end; ++b) {
      const Sequence seq = sequence_of(p_, b);
      if (keys_.begin >= seq.seqlen_k) continue;
      const int64_t end_tile = min(query_tiles.end, tiles.count_for(seq.seqlen_q));
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        for (int64_t n = query_tiles.begin; n < end_tile; ++n) {
          const Interval rows = tiles.rows(n, seq.seqlen_q);
          if (rows.begin < rows.end) add_queries(seq, {rows.begin, rows.end - rows.begin, h, 1});
        }
      }
    }
    store(batch, head, tiles.rows(query_tile, p_.seqlen_q));
  }

 private:
  /// The part of `all` that index `n` of `count` covers: itself or, if there is only one index, everything.
  static Interval part(int64_t n, int64_t count, int64_t all) {
    return count == 1 ? Interval{0, all} : Interval{n, n + 1};
  }

  int64_t sum_size() const { return round_up(job_.tile_rows, kPanel) * kBlockN; }

  void add_queries(const Sequence& seq, const QueryRows& rows) {
    const Interval keys = intersect(visible_keys(rows, seq), keys_);
    bool loaded = false;
    for (KeyTiles tiles(p_, seq, rows, keys); tiles.next(); loaded = true) {
      if (!loaded) tile_.load_queries(seq, rows);
      tile_.compute_ds(tiles.tile());
      for (int64_t n = 0; n < tile_.num_panels(); ++n) {
        if (tile_.sees_any(n)) add_panel(n, tiles.tile().begin % kBlockN);
      }
    }
  }

  /// Adds panel n of dS to `sum_`. Rows of `sum_` are keys modulo kBlockN, so tiles that share a column of dbias, or
  /// belong to one sum over keys, fall on the same rows.
  void add_panel(int64_t n, int64_t first_row) {
    const Interval keys = tile_.keys()[n];
    T* sum = sum_ + (n * kBlockN + first_row) * kPanel;
    const T* ds = tile_.gradients(n);
    for (int64_t at = keys.begin * kPanel; at < keys.end * kPanel; ++at) sum[at] += ds[at];
  }

  void store(int64_t batch, int64_t head, const Interval& queries) {
    const ScoreView& d = p_.dbias;
    const int64_t origin = batch * d.batch_stride + head * d.head_stride;
    const bool all_queries = d.row_stride == 0, all_keys = d.col_stride == 0;
    if (all_queries) sum_over_queries();
    if (all_keys) sum_over_keys();
    const int64_t num_rows = all_queries ? 1 : queries.end - queries.begin;
    const int64_t num_cols = all_keys ? 1 : keys_.end - keys_.begin;
    const int64_t first_row = all_queries ? 0 : queries.begin;
    const int64_t first_col = all_keys ? 0 : keys_.begin;
    for (int64_t r = 0; r < num_rows; ++r) {
      for (int64_t c = 0; c < num_cols; ++c) {
        store_value(d.data, d.dtype, origin + (first_row + r) * d.row_stride + (first_col + c) * d.col_stride,
                    sum_at(r, c));
      }
    }
  }

  T& sum_at(int64_t row, int64_t key) { return sum_[(row / kPanel * kBlockN + key) * kPanel + row % kPanel]; }

  void sum_over_queries() {
    for (int64_t key = 0; key < kBlockN; ++key) {
      for (int64_t row = 1; row < sum_size() / kBlockN; ++row) sum_at(0, key) += sum_at(row, key);
    }
  }

  void sum_over_keys() {
    for (int64_t row = 0; row < sum_size() / kBlockN; ++row) {
      for (int64_t key = 1; key < kBlockN; ++key) sum_at(row, 0) += sum_at(row, key);
    }
  }

  const BackwardJob& job_;
  const BackwardParams& p_;
  Arena arena_;
  GradientTile<T> tile_;
  T* sum_;  // (panels, kBlockN, kPanel)
  Interval keys_{};
};

inline int64_t bias_gradient_items(const BackwardJob& job) { return BiasItems(job).count(); }

template <class T>
int64_t bias_gradient_scratch(const BackwardJob& job) {
  return BiasRectangle<T>(job, nullptr).bytes();
}

template <class T>
void bias_gradient_item(const BackwardJob& job, int64_t item, void* scratch) {
  BiasRectangle<T>(job, scratch).run(item);
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
