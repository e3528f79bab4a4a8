// From tensors to kernel parameters: views by pointer and strides, and newly allocated results.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "checks.h"
#include "device.h"
#include "python_operators.h"

namespace flash_ext::api {

/// The address of an input, or of a result that was just allocated. Kernels take void* for both.
inline void* address(const Tensor& tensor) { return const_cast<void*>(tensor.const_data_ptr()); }

inline const int32_t* int32_address(const OptionalTensor& tensor) {
  return tensor ? static_cast<const int32_t*>(tensor->const_data_ptr()) : nullptr;
}

/// (batch, rows, heads, dim), or (rows, heads, dim) with batch_stride 0.
inline TensorView view_rows(const Tensor& tensor) {
  const int64_t first = tensor.dim() - 3;
  return {address(tensor), first > 0 ? tensor.stride(first - 1) : 0, tensor.stride(first), tensor.stride(first + 1)};
}

/// The same for an argument that is written to.
inline TensorView view_rows_for_writing(const Tensor& tensor) {
  TensorView view = view_rows(tensor);
  view.data = tensor.mutable_data_ptr();
  return view;
}

/// (batch, heads, rows), or (heads, rows) with batch_stride 0.
inline LseView view_lse(const Tensor& tensor) {
  const int64_t heads = tensor.dim() - 2;
  return {address(tensor), heads > 0 ? tensor.stride(heads - 1) : 0, tensor.stride(heads)};
}

/// (batch, heads, seqlen_q, seqlen_k), each possibly 1, which broadcasts.
inline ScoreView view_scores(const Tensor& tensor) {
  const auto stride = [&](int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); };
  const DType dtype = kernel_dtype(tensor.scalar_type()).value_or(DType::kFloat32);
  return {address(tensor), dtype, stride(0), stride(1), stride(2), stride(3)};
}

/// Whether a dimension repeats the same elements.
inline bool is_broadcast(const Tensor& tensor) {
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) > 1 && tensor.stride(d) == 0) return true;
  return false;
}

/// Like torch::stable::new_empty, which takes three times as long because it looks its operator up by name, and loses
/// the class of torch's error. All memory of operators is allocated here.
inline Tensor new_empty_strided(const Tensor& like, const Shape& shape, const Shape& strides, ScalarType dtype) {
  const int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  int32_t device_type = 0;
  AtenTensorHandle tensor = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const AOTITorchError status =
      aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(), code, device_type,
                               like.get_device_index(), &tensor);
  return status == TORCH_SUCCESS ? Tensor(tensor) : empty_strided_by_python(like, shape, strides, dtype);
}

inline Tensor new_empty(const Tensor& like, const Shape& shape, ScalarType dtype) {
  Shape strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(shape[d], 1);
  }
  return new_empty_strided(like, shape, strides, dtype);
}

/// A contiguous copy.
inline Tensor copied(const Tensor& tensor, ScalarType dtype) {
  Tensor copy = new_empty(tensor, shape_of(tensor), dtype);
  return torch::stable::copy_(copy, tensor);
}

inline Tensor made_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : copied(tensor, tensor.scalar_type());
}

inline Tensor with_dtype(const Tensor& tensor, ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : copied(tensor, dtype);
}

/// The tensor, or a contiguous copy if its rows are not. Gradients from autograd may have any strides; the gradient of
/// out.sum() has strides of 0.
inline Tensor with_contiguous_rows(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return tensor.size(last) == 1 || tensor.stride(last) == 1 ? tensor : made_contiguous(tensor);
}

/// The tensor, or a copy if some row is not aligned to the device's row_alignment().
inline Tensor with_aligned_rows(const Tensor& tensor) {
  const int64_t alignment = row_alignment(), element = static_cast<int64_t>(tensor.element_size());
  bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % alignment == 0;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d)
    aligned = aligned && (tensor.size(d) <= 1 || tensor.stride(d) * element % alignment == 0);
  return aligned ? tensor : copied(tensor, tensor.scalar_type());
}

inline Tensor new_full(const Tensor& like, const Shape& shape, ScalarType dtype, double value) {
  return torch::stable::fill_(new_empty(like, shape, dtype), value);
}

inline Tensor new_zeros(const Tensor& like, const Shape& shape, ScalarType dtype) {
  Tensor zeros = new_empty(like, shape, dtype);
  return torch::stable::zero_(zeros);
}

}  // namespace flash_ext::api
