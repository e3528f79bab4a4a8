#include "value_checks.h"

#include <algorithm>
#include <limits>

#include "tensors.h"

namespace flash_ext::api {
namespace {

/// One side (queries or keys) of the sequences of a batch.
struct Side {
  const char* cu_seqlens_name;
  const OptionalTensor& cu_seqlens;
  const char* seqused_name;
  const OptionalTensor& seqused;
  const char* max_seqlen_name;
  int64_t total;   // rows of the tensor (dense: per batch entry)
  int64_t seqlen;  // dense: the length; varlen: max_seqlen
};

void check_cu_seqlens(const Side& side, int64_t batch) {
  const int32_t* cu = int32_address(side.cu_seqlens);
  int64_t previous = 0;
  for (int64_t b = 0; b <= batch; ++b) {
    check(cu[b] >= previous, side.cu_seqlens_name, " must not decrease (sequences would overlap): entry ", b,
          " must be at least ", previous, ", got ", cu[b]);
    previous = cu[b];
  }
  check(previous <= side.total, side.cu_seqlens_name, " must not exceed the tensor's ", side.total,
        " rows: the last entry is ", previous);
}

void check_side(const Side& side, int64_t batch) {
  if (side.cu_seqlens) check_cu_seqlens(side, batch);
  const int32_t* cu = int32_address(side.cu_seqlens);
  const int32_t* used = int32_address(side.seqused);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = cu ? cu[b + 1] - cu[b] : side.seqlen;
    if (used) {
      check(used[b] >= 0 && used[b] <= length, side.seqused_name, "[", b, "] must be from 0 to the sequence's length ",
            length, ", got ", used[b]);
    }
    const int64_t rows = used ? used[b] : length;
    check(rows <= side.seqlen, side.max_seqlen_name, " = ", side.seqlen,
          " must not be less than the length of sequence ", b, ", which is ", rows);
  }
}

/// The key blocks that lists may name. Those of packed sequences may be made for more keys than there are: kernels cut
/// each list to the keys of its sequence, and only what no sequence can hold is wrong.
struct KeyBlocks {
  int64_t count;
  const char* how;

  KeyBlocks(const Geometry& g, int64_t block_n)
      : count(((g.varlen_k ? std::numeric_limits<int32_t>::max() : g.seqlen_k) + block_n - 1) / block_n),
        how(g.varlen_k ? "ceil((2^31 - 1) / block_n)" : "ceil(seqlen_k / block_n)") {}
};

/// One row of blocks: entries [begin, end) of the lists.
void check_block_row(const int32_t* indices, const int32_t* bitmap_ids, int64_t begin, int64_t end,
                     const KeyBlocks& key_blocks, int64_t num_bitmaps) {
  int64_t previous = -1;
  for (int64_t n = begin; n < end; ++n) {
    check(indices[n] > previous && indices[n] < key_blocks.count,
          "block_indices must ascend within a row and be below ", key_blocks.how, " = ", key_blocks.count, ": entry ",
          n, " is ", indices[n]);
    previous = indices[n];
    check(bitmap_ids[n] >= -1 && bitmap_ids[n] < num_bitmaps,
          "block_bitmap_ids must be from -1 to num_bitmaps - 1 = ", num_bitmaps - 1, ": entry ", n, " is ",
          bitmap_ids[n]);
  }
}

void check_block_lists(const Geometry& g, const ScoreOptions& options) {
  const Tensor offsets = *on_host(options.block_offsets);
  const OptionalTensor host_indices = on_host(options.block_indices), host_ids = on_host(options.block_bitmap_ids);
  const int32_t* indices = int32_address(host_indices);
  const int32_t* bitmap_ids = int32_address(host_ids);
  const int64_t num_blocks = options.block_indices->size(0);
  const KeyBlocks key_blocks(g, options.block_bitmaps->size(2) * 32);
  for (int64_t b = 0; b < offsets.size(0); ++b) {
    for (int64_t h = 0; h < offsets.size(1); ++h) {
      const int32_t* row = int32_address(offsets) + b * offsets.stride(0) + h * offsets.stride(1);
      for (int64_t m = 0; m + 1 < offsets.size(2); ++m) {
        check(row[m] >= 0 && row[m] <= row[m + 1] && row[m + 1] <= num_blocks,
              "block_offsets must not decrease and stay within [0, block_indices.size(0) = ", num_blocks, "]: entries ",
              m, " and ", m + 1, " of batch ", b, ", head ", h, " are ", row[m], " and ", row[m + 1]);
        check_block_row(indices, bitmap_ids, row[m], row[m + 1], key_blocks, options.block_bitmaps->size(0));
      }
    }
  }
}

void check_distinct_rows(const int32_t* batch_idx, int64_t batch) {
  std::vector<int32_t> rows(batch_idx, batch_idx + batch);
  std::sort(rows.begin(), rows.end());
  const auto twice = std::adjacent_find(rows.begin(), rows.end());
  check(twice == rows.end(),
        "cache_batch_idx must name each cache row once when k and v are appended: ", twice == rows.end() ? 0 : *twice,
        " comes twice");
}

/// Pages that hold rows [begin, end) of a sequence.
void check_pages(const Tensor& block_table, int64_t b, int64_t begin, int64_t end, const CacheIndices& cache) {
  const int32_t* pages = int32_address(block_table) + b * block_table.stride(0);
  for (int64_t n = begin / cache.page_size; n * cache.page_size < end; ++n) {
    check(pages[n] >= 0 && pages[n] < cache.num_pages, "block_table[", b, ", ", n, "] must be a page from 0 to ",
          cache.num_pages - 1, ", got ", pages[n]);
  }
}

/// Rows [begin, end) of a page.
struct PageRows {
  int64_t page, begin, end;
};

/// The rows that an append writes through the block table, page by page.
std::vector<PageRows> written_rows(const CacheIndices& cache) {
  std::vector<PageRows> written;
  for (int64_t b = 0; b < cache.batch; ++b) {
    const int32_t* pages = int32_address(cache.block_table) + b * cache.block_table->stride(0);
    const int64_t end = int32_address(cache.cache_seqlens)[b] + cache.seqlen_new;
    for (int64_t row = end - cache.seqlen_new; row < end;) {
      const int64_t slot = row % cache.page_size;
      const int64_t count = std::min(cache.page_size - slot, end - row);
      written.push_back({pages[row / cache.page_size], slot, slot + count});
      row += count;
    }
  }
  return written;
}

void check_distinct_pages(const CacheIndices& cache) {
  std::vector<PageRows> written = written_rows(cache);
  std::sort(written.begin(), written.end(), [](const PageRows& a, const PageRows& b) {
    return a.page != b.page ? a.page < b.page : a.begin < b.begin;
  });
  const auto twice = std::adjacent_find(written.begin(), written.end(), [](const PageRows& a, const PageRows& b) {
    return a.page == b.page && b.begin < a.end;
  });
  if (twice == written.end()) return;
  fail("block_table must give each appended row of k and v a place of its own: row ", (twice + 1)->begin, " of page ",
       twice->page, " is written twice");
}

}  // namespace

OptionalTensor on_host(const OptionalTensor& tensor) {
  if (!tensor || tensor->is_cpu()) return tensor;
  return torch::stable::to(*tensor, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

void check_values(const Geometry& g, const ScoreOptions& options) {
  const OptionalTensor cu_seqlens_q = on_host(options.cu_seqlens_q), cu_seqlens_k = on_host(options.cu_seqlens_k);
  const OptionalTensor seqused_q = on_host(options.seqused_q), seqused_k = on_host(options.seqused_k);
  check_side({"cu_seqlens_q", cu_seqlens_q, "seqused_q", seqused_q, "max_seqlen_q", g.total_q, g.seqlen_q}, g.batch);
  check_side({"cu_seqlens_k", cu_seqlens_k, "seqused_k", seqused_k, "max_seqlen_k", g.total_k, g.seqlen_k}, g.batch);
  if (options.block_offsets) check_block_lists(g, options);
}

void check_cache_values(const CacheIndices& cache) {
  const int32_t* used = int32_address(cache.cache_seqlens);
  const int32_t* leftpad = int32_address(cache.cache_leftpad);
  const int32_t* batch_idx = int32_address(cache.cache_batch_idx);
  for (int64_t b = 0; b < cache.batch; ++b) {
    const int64_t rows = used ? used[b] : cache.capacity;
    check(rows >= 0 && rows <= cache.capacity, "cache_seqlens[", b, "] must be from 0 to the ", cache.capacity,
          " rows of the cache, got ", rows);
    check(rows + cache.seqlen_new <= cache.capacity, "cache_seqlens[", b, "] = ", rows, " leaves no room for ",
          cache.seqlen_new, " rows of k and v in a cache of ", cache.capacity);
    const int64_t skipped = leftpad ? leftpad[b] : 0;
    check(skipped >= 0 && skipped <= rows, "cache_leftpad[", b, "] must be from 0 to cache_seqlens = ", rows, ", got ",
          skipped);
    if (batch_idx) {
      check(batch_idx[b] >= 0 && batch_idx[b] < cache.cache_batch, "cache_batch_idx[", b, "] must be from 0 to ",
            cache.cache_batch - 1, ", got ", batch_idx[b]);
    }
    if (cache.block_table) check_pages(*cache.block_table, b, skipped, rows + cache.seqlen_new, cache);
  }
  if (batch_idx && cache.append) check_distinct_rows(batch_idx, cache.batch);
  if (cache.block_table && cache.append) check_distinct_pages(cache);
}

void check_rotary_positions(const RotaryPositions& p) {
  const int32_t* const used = int32_address(p.cache_seqlens);
  const int32_t* const cu_seqlens_q = int32_address(p.cu_seqlens_q);
  for (int64_t b = 0; b < p.cache_seqlens->size(0); ++b) {
    const int64_t queries = cu_seqlens_q ? cu_seqlens_q[b + 1] - cu_seqlens_q[b] : p.seqlen_q;
    const int64_t positions = std::max(p.seqlen_new, p.turns_by_position ? queries : std::min<int64_t>(queries, 1));
    check(used[b] + positions <= p.rows, "rotary_cos and rotary_sin must have a row for each position: expected at ",
          "least ", used[b] + positions, " rows for batch entry ", b, ", got ", p.rows);
  }
}

}  // namespace flash_ext::api
