// Descriptions of tensors for TMA.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels/launch.h"
#include "kernels/params.h"
#include "matrix_descriptor.h"

namespace flash_ext::sm90 {

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

/// cuTensorMapEncodeTiled comes with the driver, not with the runtime that the library is linked to.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    constexpr unsigned kIntroduced = 12000;
    check_cuda(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kIntroduced, cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
#else
    check_cuda(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
#endif
    if (found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("flash_ext: the CUDA driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

/// That of the current device becomes that of the thread, as the runtime does in many other calls.
inline void make_context_current() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
}

inline CUtensorMap encode_tensor_map(CUtensorMapDataType type, void* data, const cuuint64_t (&sizes)[4],
                                     const cuuint64_t (&strides)[3], const cuuint32_t (&box)[4]) {
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const auto encode = [&] {
    return tensor_map_encoder()(&map, type, 4, data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = encode();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {  // it asks for a context, and a new thread has none
    make_context_current();
    status = encode();
  }
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("flash_ext: cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(status)));
  }
  return map;
}

/// For copies of box_rows rows and one panel of columns, in the order (column, row, head, batch).
inline CUtensorMap encode_tensor_map(const TensorView& view, const TensorShape& shape, DType dtype, int box_rows) {
  constexpr int kRank = 4, kElementBytes = 2;
  constexpr int64_t kAnyStride = 8;
  const auto stride = [](int64_t size, int64_t elements) {
    return static_cast<cuuint64_t>((size > 1 ? elements : kAnyStride) * kElementBytes);
  };
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n > 0 ? n : 1); };
  const cuuint64_t sizes[kRank] = {size(shape.dim), size(shape.rows), size(shape.heads), size(shape.batch)};
  const cuuint64_t strides[kRank - 1] = {stride(shape.rows, view.row_stride), stride(shape.heads, view.head_stride),
                                         stride(shape.batch, view.batch_stride)};
  const cuuint32_t box[kRank] = {kPanelColumns, static_cast<cuuint32_t>(box_rows), 1, 1};
  const CUtensorMapDataType type =
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode_tensor_map(type, view.data, sizes, strides, box);
}

/// Of a bias of 16 bits whose rows are made of pieces of 16 bytes: copies of kPanelColumns keys of box_rows rows, in
/// the order (key, query, head, batch). What is the same for all of a dimension has one place in it; for all keys,
/// those of a copy.
inline CUtensorMap encode_bias_map(const AttentionParams& p, int box_rows) {
  constexpr int kRank = 4, kElementBytes = 2;
  const ScoreView& bias = p.bias;
  const CUtensorMapDataType type =
      bias.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto size = [](int64_t n, int64_t stride) { return static_cast<cuuint64_t>(stride == 0 ? 1 : n); };
  const auto stride = [&](int64_t elements) {
    return static_cast<cuuint64_t>(elements == 0 ? 16 : elements * kElementBytes);
  };
  const int64_t keys = bias.col_stride == 0 ? kPanelColumns : p.seqlen_k;
  const cuuint64_t sizes[kRank] = {static_cast<cuuint64_t>(keys), size(p.seqlen_q, bias.row_stride),
                                   size(p.heads_q, bias.head_stride), size(p.batch, bias.batch_stride)};
  const cuuint64_t strides[kRank - 1] = {stride(bias.row_stride), stride(bias.head_stride), stride(bias.batch_stride)};
  const cuuint32_t box[kRank] = {kPanelColumns, static_cast<cuuint32_t>(box_rows), 1, 1};
  return encode_tensor_map(type, bias.data, sizes, strides, box);
}

}  // namespace flash_ext::sm90
