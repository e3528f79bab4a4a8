// Descriptions of tensors for TMA.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/params.h"
#include "panels.h"

namespace flash_ext {

/// A tensor of 16-bit elements: (batch, rows, heads, dim), varlen with batch 1.
struct TensorShape {
  int64_t dim, rows, heads, batch;
};

inline TensorShape query_shape(const AttentionParams& p, int64_t head_dim) {
  const bool packed = p.seq.cu_seqlens_q != nullptr;
  return {head_dim, packed ? p.total_q : p.seqlen_q, p.heads_q, packed ? 1 : p.batch};
}

inline TensorShape key_shape(const AttentionParams& p, int64_t head_dim) {
  if (p.seq.block_table) return {head_dim, p.seq.page_size, p.heads_kv, p.seq.num_pages};
  if (p.seq.cache_batch > 0) return {head_dim, p.seqlen_k, p.heads_kv, p.seq.cache_batch};
  const bool packed = p.seq.cu_seqlens_k != nullptr;
  return {head_dim, packed ? p.total_k : p.seqlen_k, p.heads_kv, packed ? 1 : p.batch};
}

/// Describes a tensor for copies of box_rows rows and one panel of columns, in the order (column, row, head, batch).
CUtensorMap encode_tensor_map(const TensorView& view, const TensorShape& shape, DType dtype, int box_rows);

/// Describes a 16-bit bias whose rows consist of 16-byte chunks, for copies of box_rows rows of kPanelColumns keys, in
/// the order (key, query, head, batch). A dimension that is broadcast has size 1; that of the keys has the size of a
/// copy.
CUtensorMap encode_bias_map(const AttentionParams& p, int box_rows);

}  // namespace flash_ext
