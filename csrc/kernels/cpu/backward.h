// Backward: dQ, dK and dV, recomputing the probabilities (FlashAttention-2, Dao 2023, algorithm 2).
//
// An item owns a chunk of keys of one key head and accumulates its dK and dV over all heads of the group and all tiles
// of queries, in that order:
//   dV += P^T dO,   dK += dS^T Q * scale,   dQ^T += K^T dS * scale.
// With one chunk the dQ of a tile is complete when its walk over the keys ends. With several, each chunk writes its
// share, and the shares are added in the order of the chunks.
#pragma once

#include "gradient_tile.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

struct BackwardItem {
  int64_t batch, head_kv, chunk;

  BackwardItem(const BackwardJob& job, int64_t item) {
    chunk = item % job.chunks;
    item /= job.chunks;
    head_kv = item % job.params.heads_kv;
    batch = item / job.params.heads_kv;
  }
};

/// The most keys that a chunk can hold.
FLASH_EXT_INLINE int64_t chunk_size(int64_t seqlen_k, int64_t chunks) {
  return round_up(ceil_div(seqlen_k, chunks), kBlockN);
}

template <class T>
class BackwardChunk {
 public:
  static constexpr int kPanel = Shape<T>::kPanel;

  BackwardChunk(const BackwardJob& job, void* scratch)
      : job_(job), p_(job.params), arena_(scratch), tile_(job, wanted(p_), arena_) {
    const bool matrix = uses_matrix_units<T>(p_);
    // Blocks of tiles may reach beyond the last key.
    const int64_t keys = chunk_size(p_.seqlen_k, job.chunks) + (matrix ? kBlockN : 0);
    dq_rows_ = matrix ? padded_dim(p_.head_dim) : p_.head_dim;
    if (p_.dq.data != nullptr) dq_ = arena_.take<T>(round_up(job.tile_rows, kPanel) * dq_rows_);
    if (p_.dk.data != nullptr) dk_ = arena_.take<T>(keys * round_up(p_.head_dim, kPanel));
    if (p_.dv.data != nullptr) dv_ = arena_.take<T>(keys * round_up(p_.head_dim_v, kPanel));
    rows_of_panel_ = arena_.take<T>(kPanel * p_.head_dim);
    if (!matrix) return;
    k_columns_ = arena_.take<uint16_t>(dq_rows_ * kBlockN);
    ds_pairs_ = arena_.take<uint32_t>(kKeyPairWords);
    rounded_ = arena_.take<uint16_t>(round_up(job.tile_rows, kPanel) * kBlockN);
  }

  int64_t bytes() const { return arena_.size(); }

  void run(const BackwardItem& item) {
    const TileRegisters registers(tile_.k().in_halves);
    item_ = item;
    seq_ = sequence_of(p_, item.batch);
    const int64_t size = chunk_size(seq_.seqlen_k, job_.chunks);
    chunk_ = {min(item.chunk * size, seq_.seqlen_k), min((item.chunk + 1) * size, seq_.seqlen_k)};
    const int64_t keys = chunk_.end - chunk_.begin;
    if (p_.dk.data != nullptr) __builtin_memset(dk_, 0, keys * round_up(p_.head_dim, kPanel) * sizeof(T));
    if (p_.dv.data != nullptr) __builtin_memset(dv_, 0, keys * round_up(p_.head_dim_v, kPanel) * sizeof(T));
    const int64_t group = p_.heads_q / p_.heads_kv;
    const RowTiles tiles(p_, job_.tile_rows);
    for (int64_t head = item.head_kv * group; head < (item.head_kv + 1) * group; ++head) {
      for (int64_t n = 0; n < tiles.count; ++n) {
        const Interval rows = tiles.rows(n, seq_.seqlen_q);
        if (rows.begin < rows.end) add_queries({rows.begin, rows.end - rows.begin, head, 1});
      }
    }
    if (p_.dk.data != nullptr) store_keys(p_.dk, dk_, p_.head_dim, static_cast<T>(p_.softmax_scale));
    if (p_.dv.data != nullptr) store_keys(p_.dv, dv_, p_.head_dim_v, T(1));
  }

 private:
  static ScoreGradient wanted(const BackwardParams& p) {
    const bool only_dv = p.dq.data == nullptr && p.dk.data == nullptr && p.dlse.data == nullptr;
    return only_dv ? ScoreGradient::kNone : ScoreGradient::kOfProduct;
  }

  void add_queries(const QueryRows& rows) {
    if (dq_ != nullptr) __builtin_memset(dq_, 0, round_up(rows.count, kPanel) * dq_rows_ * sizeof(T));
    const Interval keys = intersect(visible_keys(rows, seq_), chunk_);
    bool visited = false;
    for (KeyTiles tiles(p_, seq_, rows, keys); tiles.next(); visited = true) {
      if (!visited) tile_.load_queries(seq_, rows);
      add_tile(tiles.tile());
    }
    if (dq_ != nullptr) store_dq(rows);
    if (p_.dlse.data != nullptr) store_dlse(rows, visited);
  }

  void add_tile(const KeyTile& keys) {
    tile_.compute_ds(keys);
    if constexpr (kHasMatrixUnits<T>) {
      if (tile_.k().in_halves && dq_ != nullptr) transpose_rows(k_columns_, tile_.k().halves, tile_.k().half_stride);
    }
    for (int64_t n = 0; n < tile_.num_panels() && dq_ != nullptr; ++n) {
      if (tile_.sees_any(n)) add_to_dq(n);
    }
    const int64_t first = keys.begin - chunk_.begin;
    if (dv_ != nullptr) {
      add_to_keys(dv_, first, keys.size(), tile_.probabilities(0), tile_.do_rows(), tile_.do_pairs());
    }
    if (dk_ != nullptr) add_to_keys(dk_, first, keys.size(), tile_.gradients(0), tile_.q_rows(), tile_.q_pairs());
  }

  void add_to_dq(int64_t n) {
    T* dq = dq_ + n * dq_rows_ * kPanel;
    const Interval keys = tile_.keys()[n];
    if (!tile_.k().in_halves) {
      accumulate_transposed<T>(dq, nullptr, tile_.k().data, tile_.k().stride, tile_.gradients(n), keys.begin, keys.end,
                               p_.head_dim);
    } else if constexpr (kHasMatrixUnits<T>) {
      pack_key_pairs(ds_pairs_, tile_.gradients(n), keys.begin, keys.end);
      accumulate_key_pairs<2>(dq, k_columns_, ds_pairs_, keys.begin, keys.end, dq_rows_);
    }
    accumulate_exactly(dq, tile_.k(), tile_.gradients(n), keys.begin, keys.end);
  }

  void add_to_keys(T* gradient, int64_t first_key, int64_t num_keys, const T* weights, const RowTile<T>& rows,
                   [[maybe_unused]] const uint32_t* pairs) {
    T* to = gradient + first_key * rows.stride;
    if (!rows.in_halves) {
      accumulate_panels(to, weights, tile_.kPanelStride, tile_.keys(), tile_.num_panels(), rows.data, rows.stride,
                        num_keys, rows.stride);
    } else if constexpr (kHasMatrixUnits<T>) {
      for (int64_t n = 0; n < tile_.num_panels(); ++n) {
        if (tile_.sees_any(n)) round_panel(rounded_ + n * tile_.kPanelStride, weights + n * tile_.kPanelStride);
      }
      accumulate_query_pairs(to, rows.stride, rounded_, tile_.keys(), tile_.num_panels(), pairs, num_keys, rows.stride);
    }
    accumulate_panels_exactly(to, weights, tile_.kPanelStride, tile_.keys(), rows);
  }

  void store_dq(const QueryRows& rows) {
    for (int64_t r = 0; r < rows.count; ++r) {
      if (r % kPanel == 0) store_lanes(rows_of_panel_, p_.head_dim, dq_ + r * dq_rows_, p_.head_dim);
      T* from = rows_of_panel_ + r % kPanel * p_.head_dim;
      const int64_t i = rows.query(r);
      if (job_.partial_dq == nullptr) {
        for (int64_t d = 0; d < p_.head_dim; ++d) from[d] *= static_cast<T>(p_.softmax_scale);
        store_row(query_row(p_.dq, p_.dtype, seq_, i, rows.first_head), p_.dtype, from, p_.head_dim);
      } else {
        T* to = static_cast<T*>(job_.partial_dq) + row_of_head(p_, item_.chunk, seq_, rows.first_head, i) * p_.head_dim;
        __builtin_memcpy(to, from, p_.head_dim * sizeof(T));
      }
    }
  }

  void store_dlse(const QueryRows& rows, bool visited) {
    for (int64_t r = 0; r < rows.count; ++r) {
      *query_lse<T>(p_.dlse, seq_, rows.query(r), rows.first_head) = visited ? -tile_.ds_sum()[r] : T(0);
    }
  }

  void store_keys(const TensorView& view, T* gradient, int64_t dim, T factor) {
    int64_t run;
    for (int64_t j = chunk_.begin; j < chunk_.end; ++j) {
      T* row = gradient + (j - chunk_.begin) * round_up(dim, kPanel);
      for (int64_t d = 0; d < dim; ++d) row[d] *= factor;
      store_row(const_cast<char*>(key_row(view, p_.dtype, seq_, j, item_.head_kv, &run)), p_.dtype, row, dim);
    }
  }

  const BackwardJob& job_;
  const BackwardParams& p_;
  Arena arena_;
  GradientTile<T> tile_;
  int64_t dq_rows_;
  T* dq_ = nullptr;  // (panels, dq_rows_, kPanel)
  T* dk_ = nullptr;  // (keys of the chunk, head_dim rounded up to kPanel)
  T* dv_ = nullptr;
  T* rows_of_panel_ = nullptr;     // (kPanel, head_dim): rows of dQ
  uint16_t* k_columns_ = nullptr;  // (dq_rows_, kBlockN): a tile of K transposed, for matrix units
  uint32_t* ds_pairs_ = nullptr;   // dS of a panel in pairs of keys
  uint16_t* rounded_ = nullptr;    // panels of P, later of dS, in bfloat16
  BackwardItem item_{job_, 0};
  Sequence seq_{};
  Interval chunk_{};
};

inline int64_t gradient_items(const BackwardJob& job) { return job.params.batch * job.params.heads_kv * job.chunks; }

template <class T>
int64_t gradient_scratch(const BackwardJob& job) {
  return BackwardChunk<T>(job, nullptr).bytes();
}

template <class T>
void gradient_item(const BackwardJob& job, int64_t item, void* scratch) {
  BackwardChunk<T>(job, scratch).run(BackwardItem(job, item));
}

inline int64_t reduce_dq_items(const BackwardJob& job) {
  return job.params.heads_q * job.tiles_before[job.params.batch];
}

template <class T>
int64_t reduce_dq_scratch(const BackwardJob& job) {
  return job.params.head_dim * static_cast<int64_t>(sizeof(T));
}

/// One row of dQ: the sum of the shares of the chunks.
template <class T>
void reduce_dq_row(const BackwardJob& job, const Sequence& seq, int64_t head, int64_t i, T* sum) {
  const BackwardParams& p = job.params;
  for (int64_t d = 0; d < p.head_dim; ++d) sum[d] = 0;
  for (int64_t chunk = 0; chunk < job.chunks; ++chunk) {
    const T* share = static_cast<const T*>(job.partial_dq) + row_of_head(p, chunk, seq, head, i) * p.head_dim;
    for (int64_t d = 0; d < p.head_dim; ++d) sum[d] += share[d];
  }
  for (int64_t d = 0; d < p.head_dim; ++d) sum[d] *= static_cast<T>(p.softmax_scale);
  store_row(query_row(p.dq, p.dtype, seq, i, head), p.dtype, sum, p.head_dim);
}

/// Sums dQ of the rows of one tile over the chunks.
template <class T>
void reduce_dq_item(const BackwardJob& job, int64_t item, void* scratch) {
  const BackwardParams& p = job.params;
  const ItemOfSequence of(job.tiles_before, p.batch, p.heads_q, item);
  const int64_t first = of.index % of.tiles * job.tile_rows, head = of.index / of.tiles;
  const Sequence seq = sequence_of(p, of.batch);
  const int64_t end = min(first + job.tile_rows, seq.seqlen_q);
  for (int64_t i = first; i < end; ++i) reduce_dq_row(job, seq, head, i, static_cast<T*>(scratch));
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
