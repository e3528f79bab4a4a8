#include "python_operators.h"

#include <torch/csrc/stable/library.h>

namespace flash_ext::api {

using torch::stable::detail::from;
using torch::stable::detail::to;

void throw_if_any(const Tensor& exception) {
  if (exception.numel() == 0) return;
  const auto* numbers = static_cast<const int64_t*>(exception.const_data_ptr());
  reinterpret_cast<void (*)(int64_t)>(numbers[0])(numbers[1]);
}

Tensor empty_strided_by_python(const Tensor& like, const Shape& shape, const Shape& strides, ScalarType dtype) {
  StableIValue stack[] = {from(like), from(shape), from(strides), from(dtype)};
  const auto status = torch_call_dispatcher("flash_ext_python::empty_strided", "", stack, TORCH_ABI_VERSION);
  // A program without Python has no such operator.
  check(status == TORCH_SUCCESS, "could not allocate a tensor of shape ", to_string(shape), " and dtype ",
        dtype_name(dtype), " on ", device_name(like));
  Tensor tensor = to<Tensor>(stack[0]);
  throw_if_any(to<Tensor>(stack[1]));
  return tensor;
}

}  // namespace flash_ext::api
