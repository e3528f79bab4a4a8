// Tiles of K, and of V transposed, as operands of matrix units: made once for a call and shared by all tiles of queries
// that visit them. They take as much memory as K and V, head dims rounded up to 32. A tile that holds an Inf or a NaN
// is left to the query tiles that visit it: which keys they see decides what they may read (row_tile.h).
#pragma once

#include "arena.h"
#include "few_rows.h"
#include "kernels.h"
#include "query_operand.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

struct PackedTile {
  uint16_t* k = nullptr;          // (kBlockN, padded head_dim), zero past the last key
  uint16_t* v_columns = nullptr;  // (padded head_dim_v, kBlockN)
};

/// Where the tiles lie: (batch, heads_kv, tiles of keys).
class PackedKeys {
 public:
  explicit PackedKeys(const ForwardJob& job)
      : data_(static_cast<char*>(job.packed_keys)), tiles_(ceil_div(job.params.seqlen_k, kBlockN)) {
    const ForwardParams& p = job.params;
    heads_ = p.heads_kv;
    k_bytes_ = kBlockN * padded_dim(p.head_dim) * static_cast<int64_t>(sizeof(uint16_t));
    tile_bytes_ = kHeaderBytes + k_bytes_ + kBlockN * padded_dim(p.head_dim_v) * static_cast<int64_t>(sizeof(uint16_t));
    count_ = p.batch * heads_ * tiles_;
  }

  int64_t count() const { return count_; }
  int64_t bytes() const { return count_ * tile_bytes_; }
  int64_t tiles() const { return tiles_; }

  /// Whether a tile's K and V are all finite. The packer of the tile sets it.
  bool& is_finite(int64_t batch, int64_t head, int64_t tile) const {
    return *reinterpret_cast<bool*>(data_ + offset(batch, head, tile));
  }

  PackedTile tile(int64_t batch, int64_t head, int64_t tile) const {
    char* k = data_ + offset(batch, head, tile) + kHeaderBytes;
    return {reinterpret_cast<uint16_t*>(k), reinterpret_cast<uint16_t*>(k + k_bytes_)};
  }

 private:
  static constexpr int64_t kHeaderBytes = 64;  // keeps operands in whole cache lines

  int64_t offset(int64_t batch, int64_t head, int64_t tile) const {
    return ((batch * heads_ + head) * tiles_ + tile) * tile_bytes_;
  }

  char* data_;
  int64_t tiles_;
  int64_t heads_ = 0;
  int64_t k_bytes_ = 0;
  int64_t tile_bytes_ = 0;
  int64_t count_ = 0;
};

/// The number of keys that the query tiles of a head visit, all tiles together.
inline int64_t visited_keys(const ForwardJob& job, const Sequence& seq) {
  const int64_t rows_of_head = seq.seqlen_q * job.group;
  int64_t visited = 0;
  for (int64_t first = 0; first < rows_of_head; first += job.tile_rows) {
    const Interval keys = visible_keys({first, min(job.tile_rows, rows_of_head - first), 0, job.group}, seq);
    visited += keys.end - keys.begin;
  }
  return visited;
}

/// Bytes of the packed tiles; 0 if the call does not pack them, since it cannot or visits each key less than twice on
/// average.
template <class T>
int64_t packed_key_bytes(const ForwardJob& job) {
  const ForwardParams& p = job.params;
  const bool dense = p.seq.cu_seqlens_k == nullptr && p.seq.block_table == nullptr && p.blocks.offsets == nullptr;
  if (!uses_matrix_units<T>(p) || !dense || p.seqlen_q * job.group <= kFewRows<T>) return 0;
  // Keys that batch entries share would be packed again for each entry.
  if (p.batch > 1 && (p.k.batch_stride == 0 || p.v.batch_stride == 0)) return 0;
  constexpr int64_t kMinVisits = 2;
  int64_t visited = 0, keys = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence seq = sequence_of(p, b);
    visited += visited_keys(job, seq) * (p.heads_q / job.group / p.heads_kv);
    keys += seq.seqlen_k;
  }
  return visited < kMinVisits * keys ? 0 : PackedKeys(job).bytes();
}

inline int64_t pack_keys_items(const ForwardJob& job) { return PackedKeys(job).count(); }

/// Memory for the rows of a tile before they are transposed, and for its rows that are not finite.
template <class T>
struct PackingScratch {
  RowTile<T> k, v;
  int64_t bytes;

  PackingScratch(const ForwardJob& job, void* scratch) {
    Arena arena(scratch);
    k.take(arena, kBlockN, job.params.head_dim, job.params.head_dim, /*for_matrix_units=*/true);
    v.take(arena, kBlockN, job.params.head_dim_v, job.params.head_dim_v, /*for_matrix_units=*/true);
    bytes = arena.size();
  }
};

template <class T>
int64_t pack_keys_scratch(const ForwardJob& job) {
  return PackingScratch<T>(job, nullptr).bytes;
}

template <class T>
void pack_keys_item([[maybe_unused]] const ForwardJob& job, [[maybe_unused]] int64_t item,
                    [[maybe_unused]] void* scratch) {
  if constexpr (kHasMatrixUnits<T>) {
    const ForwardParams& p = job.params;
    const PackedKeys packed(job);
    const int64_t tile = item % packed.tiles(), head = item / packed.tiles() % p.heads_kv;
    const Sequence seq = sequence_of(p, item / packed.tiles() / p.heads_kv);
    const int64_t begin = tile * kBlockN, end = min(begin + kBlockN, seq.seqlen_k);
    if (begin >= end) return;
    PackingScratch<T> rows(job, scratch);
    const PackedTile to = packed.tile(seq.batch, head, tile);
    rows.k.halves = to.k;
    load_keys(rows.k, p.k, p.dtype, seq, head, begin, end);
    load_keys(rows.v, p.v, p.dtype, seq, head, begin, end);
    transpose_rows(to.v_columns, rows.v.halves, rows.v.half_stride);
    packed.is_finite(seq.batch, head, tile) = rows.k.num_isolated + rows.v.num_isolated == 0;
  }
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
