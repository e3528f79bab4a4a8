#include "operators.h"

namespace flash_ext::api {
namespace {

Tensors2 add_layer_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, bool need_sum) {
  const DeviceScope scope(x);
  const Argument x_arg("x", x);
  const Shape shape = shape_of(x);
  check_dtype(x_arg);
  check(!shape.empty() && shape.back() > 0, "x must be (..., width) with a width of at least 1, got shape ",
        to_string(shape));
  Argument("residual", residual).same_device_as(x_arg).same_dtype_as(x_arg).shape_is(shape, "x.shape");

  const Tensor sum = new_empty(x, need_sum ? shape : Shape{0}, x.scalar_type());
  const Tensor out = new_empty(x, shape, x.scalar_type());
  std::vector<Tensor> owned;
  const auto dense = [&](const Tensor& tensor) { return address(owned.emplace_back(made_contiguous(tensor))); };
  const auto per_column = [&](const char* name, const OptionalTensor& tensor) -> const void* {
    if (!tensor) return nullptr;
    Argument(name, *tensor).same_device_as(x_arg).same_dtype_as(x_arg).shape_is({shape.back()}, "x.shape[-1:]");
    return dense(*tensor);
  };
  AddLayerNormParams params;
  params.dtype = *kernel_dtype(x.scalar_type());
  params.width = shape.back();
  params.rows = static_cast<int64_t>(x.numel()) / shape.back();
  params.x = dense(x);
  params.residual = dense(residual);
  params.weight = per_column("weight", weight);
  params.bias = per_column("bias", bias);
  params.eps = eps;
  params.sum = need_sum ? address(sum) : nullptr;
  params.out = address(out);
  run_add_layer_norm(x, params);
  return {sum, out};
}

}  // namespace

FLASH_EXT_OPERATORS(m) { m.impl("add_layer_norm", TORCH_BOX(&add_layer_norm)); }

}  // namespace flash_ext::api
