#include "tensor_map.h"

#include <string>

#include "kernels/launch.h"

namespace flash_ext {
namespace {

/// cuTensorMapEncodeTiled comes with the driver, not with the runtime that the library is linked to.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
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
      fail("the CUDA driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

/// Makes the context of the current device that of the thread, as the runtime does in many other calls.
void make_context_current() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
}

CUtensorMap encode_tensor_map(CUtensorMapDataType type, void* data, const cuuint64_t (&sizes)[4],
                              const cuuint64_t (&strides)[3], const cuuint32_t (&box)[4]) {
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const auto encode = [&] {
    return tensor_map_encoder()(&map, type, 4, data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = encode();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {  // the encoder needs a context, and a new thread has none
    make_context_current();
    status = encode();
  }
  if (status != CUDA_SUCCESS) {
    fail(("cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(status))).c_str());
  }
  return map;
}

}  // namespace

CUtensorMap encode_tensor_map(const TensorView& view, const TensorShape& shape, DType dtype, int box_rows) {
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

CUtensorMap encode_bias_map(const AttentionParams& p, int box_rows) {
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

}  // namespace flash_ext
