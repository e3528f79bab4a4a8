// Forward: out = softmax(S) V and lse = logsumexp(S) for tiles of queries (FlashAttention-2, Dao 2023, algorithm 1).
//
// A tile of up to 128 queries walks over its tiles of 64 keys. For each panel of queries the scores S^T = K Q^T are a
// small block (keys x queries, one query per vector lane) that stays in the L1 cache while it becomes P^T and is
// multiplied: O^T = alpha O^T + V^T P^T. With split keys, each split writes its own normalised result and lse; the
// merge
//   lse = log(exp(sink) + sum_s exp(lse_s)),   out = sum_s exp(lse_s - lse) out_s
// follows in the order of the splits.
#pragma once

#include "arena.h"
#include "dropout_panel.h"
#include "kernels.h"
#include "online_softmax.h"
#include "row_tile.h"
#include "tile_product.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

struct ForwardItem {
  int64_t batch, first_head, split, tile;

  ForwardItem(const ForwardJob& job, int64_t item) {
    // Late tiles first: under a causal mask they are the heavy ones, and light ones fill the gaps at the end.
    tile = job.tiles - 1 - item % job.tiles;
    item /= job.tiles;
    split = item % job.splits;
    item /= job.splits;
    const int64_t head_groups = job.params.heads_q / job.group;
    first_head = item % head_groups * job.group;
    batch = item / head_groups;
  }
};

/// The keys of a split. Equal parts are rounded up to whole tiles.
FLASH_EXT_INLINE Interval keys_of_split(const ForwardJob& job, const Sequence& seq, int64_t split) {
  const int64_t size = job.split_size > 0 ? job.split_size : round_up(ceil_div(seq.seqlen_k, job.splits), kBlockN);
  return {min(split * size, seq.seqlen_k), min((split + 1) * size, seq.seqlen_k)};
}

template <class T>
class ForwardTile {
 public:
  static constexpr int kPanel = Shape<T>::kPanel;
  static constexpr int64_t kMaxPanels = ceil_div(kMaxTileRows, kPanel);

  ForwardTile(const ForwardJob& job, void* scratch) : job_(job), p_(job.params), rules_(p_), dropout_(p_) {
    Arena arena(scratch);
    const int64_t panels = ceil_div(job.tile_rows, kPanel);
    panel_ = arena.take<Panel<T>>(panels);
    state_ = arena.take<SoftmaxState<T>>(panels);
    q_ = arena.take<T>(panels * p_.head_dim * kPanel);
    out_ = arena.take<T>(panels * p_.head_dim_v * kPanel);
    scores_ = arena.take<T>(kBlockN * kPanel);
    if (dropout_.active()) factors_ = arena.take<T>(kBlockN * kPanel);
    row_ = arena.take<T>(max(p_.head_dim, p_.head_dim_v));
    k_.take(arena, kBlockN, p_.head_dim, p_.head_dim);
    v_.take(arena, kBlockN, p_.head_dim_v, p_.head_dim_v);
    bytes_ = arena.size();
  }

  int64_t bytes() const { return bytes_; }

  void run(const ForwardItem& item) {
    seq_ = sequence_of(p_, item.batch);
    const Interval rows = RowTiles(p_, job_.tile_rows, job_.group).rows(item.tile, seq_.seqlen_q * job_.group);
    rows_ = {rows.begin, rows.end - rows.begin, item.first_head, job_.group};
    if (rows_.count <= 0) return;
    start();
    const Interval keys = intersect(visible_keys(rows_, seq_), keys_of_split(job_, seq_, item.split));
    const int64_t head_kv = item.first_head / (p_.heads_q / p_.heads_kv);
    for (KeyTiles tiles(p_, seq_, rows_, keys); tiles.next();) {
      load_keys(k_, p_.k, p_.dtype, seq_, head_kv, tiles.tile().begin, tiles.tile().end);
      load_keys(v_, p_.v, p_.dtype, seq_, head_kv, tiles.tile().begin, tiles.tile().end);
      for (int64_t n = 0; n < num_panels_; ++n) visit(n, tiles.tile());
    }
    for (int64_t n = 0; n < num_panels_; ++n) finish(n, item.split);
  }

 private:
  void start() {
    num_panels_ = ceil_div(rows_.count, kPanel);
    load_panels(q_, row_, p_.q, p_.dtype, p_.head_dim, rules_.q_factor, rows_, seq_);
    for (int64_t n = 0; n < num_panels_; ++n) {
      panel_[n].set(rows_, n * kPanel, seq_);
      state_[n].clear();
    }
    __builtin_memset(out_, 0, num_panels_ * p_.head_dim_v * kPanel * sizeof(T));
  }

  void visit(int64_t n, const KeyTile& tile) {
    const Panel<T>& panel = panel_[n];
    const Interval keys = intersect(panel.some, {tile.begin, tile.end});
    if (keys.begin == keys.end) return;
    const ScorePanel<T> scores{scores_, keys.begin - tile.begin, keys.end - tile.begin};
    if (panel.vectors == 1) {
      visit<1>(n, tile, scores);
    } else {
      visit<Shape<T>::kCols>(n, tile, scores);
    }
  }

  template <int kCols>
  FLASH_EXT_INLINE void visit(int64_t n, const KeyTile& tile, const ScorePanel<T>& scores) {
    const T* q = q_ + n * p_.head_dim * kPanel;
    T* out = out_ + n * p_.head_dim_v * kPanel;
    multiply<T, kCols>(scores_, k_.data, k_.stride, q, p_.head_dim, scores.begin, scores.end);
    multiply_exactly(scores_, k_, q, scores.begin, scores.end);
    finish_scores(scores, rules_, panel_[n], seq_, tile);
    softmax_step(state_[n], scores, kCols);
    if (dropout_.active()) drop(scores, n, tile);
    accumulate_transposed<T, kCols>(out, state_[n].alpha, v_.data, v_.stride, scores_, scores.begin, scores.end,
                                    p_.head_dim_v);
    accumulate_exactly(out, v_, scores_, scores.begin, scores.end);
  }

  void drop(const ScorePanel<T>& scores, int64_t n, const KeyTile& tile) {
    const int64_t batch_head = seq_.batch * p_.heads_q + rows_.first_head;
    dropout_.draw(factors_, scores, panel_[n], batch_head, tile.begin, T(1), T(0));
    scores.for_each_vector([&](int64_t row, int c, T* s) { store(s, load(s) * load(factors_ + row * kPanel + c)); });
  }

  void finish(int64_t n, int64_t split) {
    for (int lane = 0; lane < panel_[n].count; ++lane) {
      const int64_t i = panel_[n].query[lane], head = panel_[n].head[lane];
      T sum = state_[n].sum[lane];
      T maximum = state_[n].maximum[lane];
      const bool nothing = sum == T(0);
      T factor = 1;
      if (p_.sink != nullptr && job_.partial_out == nullptr && !nothing) {
        const T sink = static_cast<const T*>(p_.sink)[head];
        factor = maximum < sink ? exp(maximum - sink) : T(1);
        sum = sum * factor + (maximum < sink ? T(1) : exp(sink - maximum));
        maximum = max(maximum, sink);
      }
      const T lse = nothing ? -static_cast<T>(kInfinity) : maximum + log(sum);
      factor = nothing ? T(0) : factor * dropout_.kept_scale() / sum;
      const T* out = out_ + n * p_.head_dim_v * kPanel;
      if (job_.partial_out == nullptr) {
        *query_lse<T>(p_.lse, seq_, i, head) = lse;
        store_lane(query_row(p_.out, p_.dtype, seq_, i, head), p_.dtype, row_, out, lane, p_.head_dim_v, factor);
      } else {
        const int64_t row = row_of_head(p_, split, seq_.batch, head, i);
        static_cast<T*>(job_.partial_lse)[row] = lse;
        T* to = static_cast<T*>(job_.partial_out) + row * p_.head_dim_v;
        for (int64_t d = 0; d < p_.head_dim_v; ++d) to[d] = out[d * kPanel + lane] * factor;
      }
    }
  }

  const ForwardJob& job_;
  const ForwardParams& p_;
  ScoreRules<T> rules_;
  Dropout<T> dropout_;
  Panel<T>* panel_;
  SoftmaxState<T>* state_;
  T* q_;    // (panels, head_dim, kPanel), scaled
  T* out_;  // (panels, head_dim_v, kPanel), not normalised
  T* scores_;
  T* factors_ = nullptr;
  T* row_;
  RowTile<T> k_;
  RowTile<T> v_;
  int64_t bytes_;
  Sequence seq_{};
  QueryRows rows_{};
  int64_t num_panels_ = 0;
};

inline int64_t count_tiles(const AttentionParams& p, int64_t tile_rows, int64_t group) {
  return RowTiles(p, tile_rows, group).count;
}

inline int64_t forward_items(const ForwardJob& job) {
  return job.params.batch * (job.params.heads_q / job.group) * job.splits * job.tiles;
}

template <class T>
int64_t forward_scratch(const ForwardJob& job) {
  return ForwardTile<T>(job, nullptr).bytes();
}

template <class T>
void forward_item(const ForwardJob& job, int64_t item, void* scratch) {
  ForwardTile<T>(job, scratch).run(ForwardItem(job, item));
}

inline int64_t rows_of_job(const ForwardJob& job) {
  return job.params.batch * job.params.heads_q * job.params.seqlen_q;
}

template <class T>
int64_t merge_scratch(const ForwardJob& job) {
  return (job.params.head_dim_v + job.splits) * static_cast<int64_t>(sizeof(T));
}

/// Merges the splits of one row.
template <class T>
void merge_row(const ForwardJob& job, int64_t row, void* scratch) {
  const ForwardParams& p = job.params;
  const int64_t i = row % p.seqlen_q;
  const int64_t head = row / p.seqlen_q % p.heads_q;
  const Sequence seq = sequence_of(p, row / p.seqlen_q / p.heads_q);
  if (i >= seq.seqlen_q) return;
  const T* partial_lse = static_cast<const T*>(job.partial_lse);
  const T* partial_out = static_cast<const T*>(job.partial_out);
  T* out = static_cast<T*>(scratch);
  T* share = out + p.head_dim_v;

  T maximum = -static_cast<T>(kInfinity);
  bool nothing = true;
  for (int64_t s = 0; s < job.splits; ++s) {
    const T lse = partial_lse[row_of_head(p, s, seq.batch, head, i)];
    maximum = max(maximum, lse);
    nothing = nothing && lse == -static_cast<T>(kInfinity);
  }
  T sum = 0;
  if (p.sink != nullptr && !nothing) {
    const T sink = static_cast<const T*>(p.sink)[head];
    maximum = max(maximum, sink);
    sum = exp(sink - maximum);
  }
  for (int64_t s = 0; s < job.splits; ++s) {
    const T lse = partial_lse[row_of_head(p, s, seq.batch, head, i)];
    share[s] = lse == -static_cast<T>(kInfinity) ? T(0) : exp(lse - maximum);
    sum += share[s];
  }
  for (int64_t d = 0; d < p.head_dim_v; ++d) out[d] = 0;
  for (int64_t s = 0; s < job.splits; ++s) {
    if (share[s] == T(0)) continue;
    const T* part = partial_out + row_of_head(p, s, seq.batch, head, i) * p.head_dim_v;
    const T factor = share[s] / sum;
    for (int64_t d = 0; d < p.head_dim_v; ++d) out[d] += factor * part[d];
  }
  *query_lse<T>(p.lse, seq, i, head) = nothing ? -static_cast<T>(kInfinity) : maximum + log(sum);
  store_row(query_row(p.out, p.dtype, seq, i, head), p.dtype, out, p.head_dim_v);
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
