// The bias of one head in global memory, read element by element.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/common/sequence.cuh"
#include "kernels/params.h"

namespace flash_ext {

/// The bias of one head.
class BiasRows {
 public:
  __device__ __forceinline__ BiasRows(const ScoreView& bias, const Sequence& sequence)
      : data_(static_cast<const char*>(bias.data)),
        row_stride_(bias.row_stride),
        col_stride_(bias.col_stride),
        dtype_(bias.dtype) {
    const int64_t size = dtype_ == DType::kFloat32 ? 4 : dtype_ == DType::kFloat64 ? 8 : 2;
    if (data_) data_ += size * (sequence.batch * bias.batch_stride + sequence.head * bias.head_stride);
  }

  __device__ __forceinline__ bool present() const { return data_ != nullptr; }

  template <class T>
  __device__ __forceinline__ float load(int i, int j) const {
    return static_cast<float>(reinterpret_cast<const T*>(data_)[i * row_stride_ + j * col_stride_]);
  }

  /// Calls run(T()) for the element type T, so that the switch is taken once for a whole tile.
  template <class Run>
  __device__ __forceinline__ void with_type(Run run) const {
    switch (dtype_) {
      case DType::kFloat16:
        return run(__half());
      case DType::kBFloat16:
        return run(__nv_bfloat16());
      case DType::kFloat32:
        return run(float());
      case DType::kFloat64:
        return run(double());
    }
  }

 private:
  const char* data_;
  int64_t row_stride_, col_stride_;
  DType dtype_;
};

}  // namespace flash_ext
