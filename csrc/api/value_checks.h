// Checks of values in tensors: lengths, pages, block lists. On a GPU they need a synchronisation, so they run only if
// wanted (wants_value_checks() in device.h). Kernels clamp what they read anyway.
#pragma once

#include "score_options.h"

namespace flash_ext::api {

/// The tensor itself, or a copy in host memory, for which the host waits.
OptionalTensor on_host(const OptionalTensor& tensor);

/// Checks cu_seqlens, seqused and the block mask's lists, on any device.
void check_values(const Geometry& geometry, const ScoreOptions& options);

/// The index tensors of a cache, in host memory, and the sizes that they must agree with. Absent tensors pass.
struct CacheIndices {
  const OptionalTensor& cache_seqlens;
  const OptionalTensor& cache_leftpad;
  const OptionalTensor& cache_batch_idx;
  const OptionalTensor& block_table;
  int64_t batch;
  int64_t capacity;     // rows that a sequence can hold
  int64_t cache_batch;  // batch entries of a contiguous cache
  int64_t num_pages;
  int64_t page_size;
  bool append;         // k and v are written after the cached rows
  int64_t seqlen_new;  // rows that are written
};

void check_cache_values(const CacheIndices& cache);

/// What decides which rows of cos and sin rotary embedding reads. Tensors lie in host memory.
struct RotaryPositions {
  OptionalTensor cache_seqlens;
  OptionalTensor cu_seqlens_q;
  int64_t seqlen_q;        // of queries that are not packed
  int64_t seqlen_new;      // rows of k that are turned
  bool turns_by_position;  // query t turns like the t-th new key; else all turn like the first
  int64_t rows;
};

void check_rotary_positions(const RotaryPositions& positions);

}  // namespace flash_ext::api
