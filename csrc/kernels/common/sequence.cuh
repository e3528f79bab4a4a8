// One sequence and head: where its rows lie (dense, varlen, paged, left-padded), its lengths, and which keys and
// queries its window lets see each other. Lengths and indices that lie on the device are clamped to what the tensors
// hold.
#pragma once

#include "kernels/common/mask/tile_range.h"
#include "kernels/params.h"

namespace flash_ext {

/// Addresses of the rows of one sequence and head.
template <class Element, bool kPaged>
struct RowSource {
  Element* base;
  int64_t row_stride;

  __device__ __forceinline__ static bool evenly_spaced() { return true; }
  __device__ __forceinline__ Element* row(int index) const { return base + index * row_stride; }
};

template <class Element>
struct RowSource<Element, true> {
  Element* base;
  int64_t row_stride;
  const int32_t* pages;  // of this sequence; null = rows are row_stride apart
  int64_t page_stride;
  int page_size;
  int num_pages;
  int first_row;

  __device__ __forceinline__ bool evenly_spaced() const { return pages == nullptr; }
  __device__ __forceinline__ Element* row(int index) const {
    if (pages == nullptr) return base + index * row_stride;
    const int position = first_row + index;
    const int page = min(max(pages[position / page_size], 0), num_pages - 1);
    return base + page * page_stride + position % page_size * row_stride;
  }
};

/// A TileRange in 32 bits.
struct TileSpan {
  int begin, end, full_begin, full_end;
};

/// How far a side of a window reaches; unlimited is farther than any distance in the sequence.
FLASH_EXT_HOST_DEVICE int window_reach(int64_t side, int seqlen_q, int seqlen_k) {
  const int farthest = seqlen_q + seqlen_k;
  return side < 0 || side > farthest ? farthest : static_cast<int>(side);
}

/// What all sequences of a call share, where the host knows their lengths.
struct EqualSequences {
  int seqlen_q, seqlen_k;
  int left, right, offset;  // as Sequence has them
  int group;                // query heads of a key head

  explicit EqualSequences(const AttentionParams& p)
      : seqlen_q(static_cast<int>(p.seqlen_q)),
        seqlen_k(static_cast<int>(p.seqlen_k)),
        left(window_reach(p.window.left, seqlen_q, seqlen_k)),
        right(window_reach(p.window.right, seqlen_q, seqlen_k)),
        offset(p.window.top_left ? 0 : seqlen_k - seqlen_q),
        group(static_cast<int>(p.heads_q / p.heads_kv)) {}
};

/// A sequence of a call, and one of its query heads.
struct Sequence {
  int batch, head, head_kv;
  int seqlen_q, seqlen_k;
  int leftpad;
  int cache_row;             // batch entry of k and v
  int64_t q_begin, k_begin;  // rows before the sequence
  int left, right;           // of the window; unlimited is larger than any distance
  int offset;                // key that query 0 is aligned with

  __device__ __forceinline__ Sequence(const AttentionParams& p, int batch, int head)
      : Sequence(p, batch, head, SizesOfTensors()) {
    read(p);
    take_window(p);
  }

  /// Selects a constructor that jumps over read() where it would find nothing. Fewer instructions are then fetched,
  /// which counts at the start of the Hopper forward.
  struct SkipsReading {};
  __device__ __forceinline__ Sequence(const AttentionParams& p, int batch, int head, SkipsReading)
      : Sequence(p, batch, head, SizesOfTensors()) {
    leftpad = 0;
    cache_row = batch;
    if (lie_on_device(p.seq)) read(p);
    take_window(p);
  }

  /// Takes what the host has computed.
  __device__ __forceinline__ Sequence(const EqualSequences& all, int batch, int head)
      : batch(batch),
        head(head),
        head_kv(all.group == 1 ? head : head / all.group),
        seqlen_q(all.seqlen_q),
        seqlen_k(all.seqlen_k),
        leftpad(0),
        cache_row(batch),
        q_begin(0),
        k_begin(0),
        left(all.left),
        right(all.right),
        offset(all.offset) {}

  __device__ __forceinline__ int64_t lse_offset(const LseView& lse) const {
    return batch * lse.batch_stride + head * lse.head_stride + q_begin;
  }

  /// Leaves out the first queries.
  __device__ __forceinline__ void skip_queries(int count) {
    q_begin += count;
    seqlen_q -= count;
    offset += count;
  }

  __device__ __forceinline__ Window window() const { return {left, right, offset}; }

  /// tile_range() of the queries [first, end), in 32 bits: it stands at the start of every CTA.
  template <int kBlockN>
  __device__ __forceinline__ TileSpan key_tiles(int first, int end) const {
    const int some_begin = keys_begin(first), some_end = keys_end(end - 1);
    if (first >= end || some_begin >= some_end) return {0, 0, 0, 0};
    TileSpan tiles;
    tiles.begin = some_begin / kBlockN;
    tiles.end = (some_end + kBlockN - 1) / kBlockN;
    tiles.full_begin = min((keys_begin(end - 1) + kBlockN - 1) / kBlockN, tiles.end);
    tiles.full_end = max(max(keys_end(first), 0) / kBlockN, tiles.full_begin);
    return tiles;
  }

  /// The same for the tiles of queries that see the keys [first, end).
  template <int kBlockM>
  __device__ __forceinline__ TileSpan query_tiles(int first, int end) const {
    const int some_begin = queries_begin(first), some_end = queries_end(end - 1);
    if (first >= end || some_begin >= some_end) return {0, 0, 0, 0};
    TileSpan tiles;
    tiles.begin = some_begin / kBlockM;
    tiles.end = (some_end + kBlockM - 1) / kBlockM;
    tiles.full_begin = min((queries_begin(end - 1) + kBlockM - 1) / kBlockM, tiles.end);
    tiles.full_end = max(max(queries_end(first), 0) / kBlockM, tiles.full_begin);
    return tiles;
  }

  /// The keys that query i sees: [keys_begin, keys_end), empty where they cross.
  __device__ __forceinline__ int keys_begin(int i) const { return max(i + offset - left, 0); }
  __device__ __forceinline__ int keys_end(int i) const { return min(i + offset + right + 1, seqlen_k); }
  /// The queries that see key j.
  __device__ __forceinline__ int queries_begin(int j) const { return max(j - offset - right, 0); }
  __device__ __forceinline__ int queries_end(int j) const { return min(j - offset + left + 1, seqlen_q); }

 private:
  struct SizesOfTensors {};
  __device__ __forceinline__ Sequence(const AttentionParams& p, int batch, int head, SizesOfTensors)
      : batch(batch),
        head(head),
        head_kv(p.heads_q == p.heads_kv ? head : head / (static_cast<int>(p.heads_q) / static_cast<int>(p.heads_kv))) {
    q_begin = k_begin = 0;
    seqlen_q = static_cast<int>(p.seqlen_q);
    seqlen_k = static_cast<int>(p.seqlen_k);
  }

  /// Reads the lengths and places that lie on the device.
  __device__ __forceinline__ void read(const AttentionParams& p) {
    const SequenceParams& s = p.seq;
    if (s.cu_seqlens_q) seqlen_q = packed(s.cu_seqlens_q, seqlen_q, p.total_q, q_begin);
    if (s.cu_seqlens_k) seqlen_k = packed(s.cu_seqlens_k, seqlen_k, p.total_k, k_begin);
    if (s.seqused_q) seqlen_q = clamped(s.seqused_q[batch], 0, seqlen_q);
    if (s.seqused_k) seqlen_k = clamped(s.seqused_k[batch], 0, seqlen_k);
    leftpad = s.leftpad_k ? clamped(s.leftpad_k[batch], 0, seqlen_k) : 0;
    seqlen_k -= leftpad;
    cache_row = s.cache_batch_idx ? clamped(s.cache_batch_idx[batch], 0, static_cast<int>(s.cache_batch) - 1) : batch;
  }

  /// Whether read() would find any. It has no branches, because their instructions would have to be fetched.
  __device__ __forceinline__ static bool lie_on_device(const SequenceParams& s) {
    const auto bits = [](const int32_t* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
    return (bits(s.cu_seqlens_q) | bits(s.cu_seqlens_k) | bits(s.seqused_q) | bits(s.seqused_k) | bits(s.leftpad_k) |
            bits(s.cache_batch_idx)) != 0;
  }

  __device__ __forceinline__ void take_window(const AttentionParams& p) {
    offset = p.window.top_left ? 0 : seqlen_k - seqlen_q;
    left = window_reach(p.window.left, seqlen_q, seqlen_k);
    right = window_reach(p.window.right, seqlen_q, seqlen_k);
  }

  __device__ __forceinline__ static int clamped(int x, int low, int high) { return max(min(x, high), low); }

  /// The length of a packed sequence, no longer than max_seqlen says: the grid covers no more.
  __device__ __forceinline__ int packed(const int32_t* cu_seqlens, int max_seqlen, int64_t total,
                                        int64_t& begin) const {
    begin = clamp_index(cu_seqlens[batch], 0, total);
    return static_cast<int>(clamp_index(cu_seqlens[batch + 1] - begin, 0, min(int64_t{max_seqlen}, total - begin)));
  }
};

template <class Element>
__device__ __forceinline__ RowSource<Element, false> query_rows(const TensorView& view, const Sequence& sequence) {
  return {static_cast<Element*>(view.data) + sequence.batch * view.batch_stride + sequence.q_begin * view.row_stride +
              sequence.head * view.head_stride,
          view.row_stride};
}

/// Rows of k or v.
template <class Element, bool kPaged>
__device__ __forceinline__ RowSource<Element, kPaged> key_rows(const AttentionParams& p, const TensorView& view,
                                                               const Sequence& sequence) {
  Element* head_base = static_cast<Element*>(view.data) + sequence.head_kv * view.head_stride;
  Element* first =
      head_base + sequence.cache_row * view.batch_stride + (sequence.k_begin + sequence.leftpad) * view.row_stride;
  if constexpr (kPaged) {
    if (p.seq.block_table) {
      return {head_base,
              view.row_stride,
              p.seq.block_table + sequence.batch * p.seq.block_table_stride,
              view.batch_stride,
              static_cast<int>(p.seq.page_size),
              static_cast<int>(p.seq.num_pages),
              sequence.leftpad};
    }
    return {first, view.row_stride, nullptr, 0, 1, 1, 0};
  } else {
    return {first, view.row_stride};
  }
}

/// Rows of q in memory, for each head.
FLASH_EXT_HOST_DEVICE int64_t rows_of_head(const AttentionParams& p) {
  return p.seq.cu_seqlens_q ? p.total_q : p.batch * p.seqlen_q;
}

/// The place of query i in an array of (heads_q, rows_of_head).
__device__ __forceinline__ int64_t row_of_head(const AttentionParams& p, const Sequence& sequence, int i) {
  const int64_t first = p.seq.cu_seqlens_q ? sequence.q_begin : sequence.batch * p.seqlen_q;
  return sequence.head * rows_of_head(p) + first + i;
}

}  // namespace flash_ext
