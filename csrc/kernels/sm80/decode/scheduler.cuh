// How decoding is divided into work tiles: tiles of query rows, and ranges of the keys that a tile sees.
//
// A row is a query and a head: row = query * group + head, where the heads of a group share their keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/divisor.h"
#include "kernels/common/scheduler/tile_numbers.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/ptx/arithmetic.h"
#include "shape.h"

namespace flash_ext::sm80 {

/// The division of the whole launch into work tiles.
struct DecodeGrid {
  Divisor group;       // heads that share a tile
  Divisor groups;      // of heads
  Divisor key_groups;  // groups that share a key head
  TileNumbers tiles;   // of rows, of a group
  Divisor row_tiles;   // of the longest sequence; numbered by rows: of all sequences
  Divisor splits;      // ranges of keys, at most
  Divisor split_size;  // > 0: of exactly this many keys, else of equal size
  Divisor ctas;        // that share the splits of a tile
  int min_split_size;  // of ranges of equal size
  int block_m;         // rows of a tile
  int tile_rows;       // that a tile can have, at most block_m
  ScoreFactors factors;

  /// `per_natural`: kPerNatural of the unit of scores.
  explicit DecodeGrid(const ForwardParams& p, float per_natural = BaseTwoUnit::kPerNatural)
      : group(p.head_group),
        groups(p.heads_q / p.head_group),
        key_groups(p.heads_q / p.heads_kv / p.head_group),
        tiles(p, WorkListSide::kQueries, p.block_m, p.heads_q / p.head_group, p.head_group),
        row_tiles(tiles.by_rows ? tiles.count : tiles.tiles_of_longest),
        splits(std::max<int64_t>(1, p.split_size > 0 ? (p.seqlen_k + p.split_size - 1) / p.split_size : p.num_splits)),
        split_size(p.split_size),
        ctas(p.split_size > 0 ? ctas_per_tile(typical_tiles(p), splits.value) : splits.value),
        min_split_size(smallest_split(typical_tiles(p))),
        block_m(static_cast<int>(p.block_m)),
        tile_rows(static_cast<int>(std::min(p.seqlen_q * p.head_group, p.block_m))),
        factors(p, per_natural) {}

  /// The number of tiles, where packed sequences count with their mean length: a bound on the longest decides nothing.
  int64_t typical_tiles(const ForwardParams& p) const {
    const int64_t queries = p.seq.cu_seqlens_q ? tiles_of_rows(p.total_q, std::max<int64_t>(1, p.batch)) : p.seqlen_q;
    return p.batch * tiles_of_rows(queries * p.head_group, p.block_m) * groups.value;
  }

  int64_t all_tiles() const { return tiles.count * groups.value; }
  int64_t partial_rows() const { return splits.value > 1 ? all_tiles() * splits.value * tile_rows : 0; }
};

/// Partial results of a tile's rows over each range: out is normalised, lse in units of scores. Splits of a tile lie
/// together.
struct DecodePartials {
  float* out;  // (tiles, splits, tile_rows, head_dim_v)
  float* lse;  // (tiles, splits, tile_rows)
};

/// Rows [first_row, first_row + rows) of a group, and the keys that at least one of them sees.
struct DecodeTile {
  Sequence sequence;
  int64_t index;  // among all tiles
  int first_row, rows;
  int begin, end;
  int origin, split_size;  // split s: keys [origin + s * split_size, + split_size), as far as they are in [begin, end)
  int first_split;         // the first split that has keys

  __device__ __forceinline__ DecodeTile(const ForwardParams& p, const DecodeGrid& grid, int batch, int group, int tile)
      : sequence(p, batch, group * static_cast<int>(grid.group.value)),
        index((grid.tiles.first_of(batch, sequence.q_begin) + tile) * grid.groups.value + group),
        first_row(tile * grid.block_m),
        rows(min(grid.block_m, sequence.seqlen_q * static_cast<int>(grid.group.value) - first_row)) {
    sequence.head_kv = static_cast<int>(grid.key_groups.quotient(group));  // without a division by what varies
    begin = rows > 0 ? sequence.keys_begin(first_query(grid)) : 0;
    end = rows > 0 ? max(sequence.keys_end(last_query(grid)), begin) : 0;
    // A fixed size fixes the bounds of splits too: how long the cache or other sequences are must not change a
    // sequence's result. Ranges of equal size are whole tiles.
    constexpr int kRound = 16;
    const int equal = static_cast<int>(grid.splits.quotient(end - begin + grid.splits.value - 1));
    const bool fixed = grid.split_size.value > 0;
    origin = fixed ? 0 : begin;
    split_size = fixed ? static_cast<int>(grid.split_size.value)
                       : max((equal + kRound - 1) / kRound * kRound, grid.min_split_size);
    first_split = fixed ? static_cast<int>(grid.split_size.quotient(begin)) : 0;
  }

  __device__ __forceinline__ int first_query(const DecodeGrid& grid) const {
    return static_cast<int>(grid.group.quotient(first_row));
  }
  __device__ __forceinline__ int last_query(const DecodeGrid& grid) const {
    return static_cast<int>(grid.group.quotient(first_row + rows - 1));
  }

  /// Whether rows differ in the keys that they see.
  __device__ __forceinline__ bool is_mixed(const DecodeGrid& grid) const {
    return first_query(grid) < last_query(grid);
  }

  /// The keys that every row sees, perhaps none.
  __device__ __forceinline__ int common_begin(const DecodeGrid& grid) const {
    return sequence.keys_begin(last_query(grid));
  }
  __device__ __forceinline__ int common_end(const DecodeGrid& grid) const {
    return sequence.keys_end(first_query(grid));
  }

  /// The keys of a split, none where they cross.
  __device__ __forceinline__ int split_begin(int split) const { return max(origin + split * split_size, begin); }
  __device__ __forceinline__ int split_end(int split) const { return min(origin + (split + 1) * split_size, end); }

  /// Whether more than one split has keys.
  __device__ __forceinline__ bool is_split() const { return end - origin > (first_split + 1) * split_size; }

  /// How many splits have keys.
  __device__ __forceinline__ int num_splits() const {
    return begin < end ? (end - origin - first_split * split_size + split_size - 1) / split_size : 0;
  }

  __device__ __forceinline__ int64_t partial_row(const DecodeGrid& grid, int split, int row) const {
    return (index * grid.splits.value + split) * grid.tile_rows + row;
  }
};

/// Where a row of out and lse lies.
template <class Element>
struct DecodeRow {
  int head;
  Element* out;
  float* lse;

  __device__ __forceinline__ DecodeRow(const ForwardParams& p, const DecodeGrid& grid, const Sequence& sequence,
                                       int row) {
    const int64_t query = grid.group.quotient(row);
    head = sequence.head + row - static_cast<int>(query) * static_cast<int>(grid.group.value);
    out = static_cast<Element*>(p.out.data) + sequence.batch * p.out.batch_stride +
          (sequence.q_begin + query) * p.out.row_stride + head * p.out.head_stride;
    lse = static_cast<float*>(p.lse.data) + sequence.batch * p.lse.batch_stride + head * p.lse.head_stride +
          sequence.q_begin + query;
  }
};

/// Stores eight results of a row, times `scale`.
template <class Element>
__device__ __forceinline__ void store_eight(Element* target, const float (&values)[8], float scale) {
  if constexpr (sizeof(Element) == 4) {
    float4* float4s = reinterpret_cast<float4*>(target);
    float4s[0] = make_float4(values[0] * scale, values[1] * scale, values[2] * scale, values[3] * scale);
    float4s[1] = make_float4(values[4] * scale, values[5] * scale, values[6] * scale, values[7] * scale);
  } else {
    *reinterpret_cast<uint4*>(target) = make_uint4(ptx::pack2<Element>(values[0] * scale, values[1] * scale),
                                                   ptx::pack2<Element>(values[2] * scale, values[3] * scale),
                                                   ptx::pack2<Element>(values[4] * scale, values[5] * scale),
                                                   ptx::pack2<Element>(values[6] * scale, values[7] * scale));
  }
}

}  // namespace flash_ext::sm80
