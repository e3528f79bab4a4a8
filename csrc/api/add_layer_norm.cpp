#include "add_layer_norm.h"

#include "tensors.h"

namespace flash_ext::api {

AddLayerNormCall prepare_add_layer_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                        const OptionalTensor& bias, double eps, bool need_sum) {
  const Argument x_arg("x", x);
  const Shape shape = shape_of(x);
  x_arg.dtype_floating();
  check(!shape.empty() && shape.back() > 0, "x must be (..., width) with a width of at least 1, got shape ",
        to_string(shape));
  Argument("residual", residual).same_device_as(x_arg).same_dtype_as(x_arg).shape_is(shape, "x.shape");

  AddLayerNormCall call{{},
                        need_sum ? new_empty(x, shape, x.scalar_type()) : new_empty(x, {0}, x.scalar_type()),
                        new_empty(x, shape, x.scalar_type()),
                        {}};
  const auto dense = [&](const Tensor& tensor) { return address(call.owned.emplace_back(made_contiguous(tensor))); };
  const auto per_column = [&](const char* name, const OptionalTensor& tensor) -> const void* {
    if (!tensor) return nullptr;
    Argument(name, *tensor).same_device_as(x_arg).same_dtype_as(x_arg).shape_is({shape.back()}, "x.shape[-1:]");
    return dense(*tensor);
  };
  call.params.dtype = *kernel_dtype(x.scalar_type());
  call.params.width = shape.back();
  call.params.rows = static_cast<int64_t>(x.numel()) / shape.back();
  call.params.x = dense(x);
  call.params.residual = dense(residual);
  call.params.weight = per_column("weight", weight);
  call.params.bias = per_column("bias", bias);
  call.params.eps = eps;
  call.params.sum = need_sum ? address(call.sum) : nullptr;
  call.params.out = address(call.out);
  return call;
}

}  // namespace flash_ext::api
