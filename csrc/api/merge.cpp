#include "operators.h"

namespace flash_ext::api {
namespace {

constexpr char kOutsAxes[] =
    "(splits, batch, seqlen_q, heads_q, head_dim) or, varlen, (splits, total_q, heads_q, head_dim)";

struct MergeShapes {
  Shape out;   // outs without splits
  Shape lse;   // lses without splits
  Shape lses;  // what lses must be
};

MergeShapes shapes_for(const Argument& outs) {
  const Shape shape = shape_of(outs.tensor());
  if (shape.size() != 4 && shape.size() != 5) {
    fail("outs must be 5-dimensional ", kOutsAxes, ", got shape ", to_string(shape));
  }
  check(shape[0] > 0, "outs.size(0), the number of parts, must be >= 1, got 0");
  MergeShapes result;
  result.out = Shape(shape.begin() + 1, shape.end());
  result.lse = Shape(shape.begin() + 1, shape.end() - 3);
  result.lse.push_back(shape[shape.size() - 2]);
  result.lse.push_back(shape[shape.size() - 3]);
  result.lses = result.lse;
  result.lses.insert(result.lses.begin(), shape[0]);
  return result;
}

void check_inputs(const Argument& outs, const Argument& lses, const MergeShapes& shapes) {
  check_dtype(outs);
  lses.same_device_as(outs).dtype_is(accumulate_dtype(outs.tensor().scalar_type()));
  lses.shape_is(shapes.lses,
                lses.tensor().dim() == 3 ? "(splits, heads_q, total_q)" : "(splits, batch, heads_q, seqlen_q)");
}

/// Fills in sizes and the views of the inputs; copies of inputs whose rows are not contiguous go to `owned`.
void fill_inputs(MergeParams& params, const Tensor& outs, const Tensor& lses, std::vector<Tensor>& owned) {
  const Shape shape = shape_of(outs);
  const size_t rows = shape.size() - 3;
  params.dtype = *kernel_dtype(outs.scalar_type());
  params.splits = shape[0];
  params.batch = rows == 2 ? shape[1] : 1;
  params.seqlen = shape[rows];
  params.heads = shape[rows + 1];
  params.head_dim = shape[rows + 2];

  const Tensor dense_outs = with_contiguous_rows(outs);
  const Tensor dense_lses = with_contiguous_rows(lses);
  owned.insert(owned.end(), {dense_outs, dense_lses});
  params.outs = view_rows(dense_outs);
  params.outs_split_stride = dense_outs.stride(0);
  params.lses = view_lse(dense_lses);
  params.lses_split_stride = dense_lses.stride(0);
}

Tensors2 merge(const Tensor& outs, const Tensor& lses) {
  const DeviceScope scope(outs);
  const Argument outs_arg("outs", outs), lses_arg("lses", lses);
  const MergeShapes shapes = shapes_for(outs_arg);
  check_inputs(outs_arg, lses_arg, shapes);

  const Tensor out = new_empty(outs, shapes.out, outs.scalar_type());
  const Tensor lse = new_empty(lses, shapes.lse, lses.scalar_type());
  std::vector<Tensor> owned;
  MergeParams params;
  fill_inputs(params, outs, lses, owned);
  params.out = view_rows(out);
  params.lse = view_lse(lse);
  run_merge(outs, params);
  return {out, lse};
}

Tensors2 merge_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& outs,
                        const Tensor& lses, const Tensor& out, const Tensor& lse) {
  const DeviceScope scope(outs);
  const Argument outs_arg("outs", outs), lses_arg("lses", lses);
  const MergeShapes shapes = shapes_for(outs_arg);
  check_inputs(outs_arg, lses_arg, shapes);

  const Tensor grad_outs = new_empty(outs, shape_of(outs), outs.scalar_type());
  const Tensor grad_lses = new_empty(lses, shape_of(lses), lses.scalar_type());
  std::vector<Tensor> owned;
  MergeBackwardParams params;
  const auto rows_like_out = [&](const char* name, const Tensor& tensor) {
    Argument(name, tensor).same_device_as(outs_arg).same_dtype_as(outs_arg).shape_is(shapes.out, "outs.shape[1:]");
    return view_rows(owned.emplace_back(with_contiguous_rows(tensor)));
  };
  const auto rows_like_lse = [&](const char* name, const Tensor& tensor) {
    Argument(name, tensor).same_device_as(outs_arg).same_dtype_as(lses_arg).shape_is(shapes.lse, "lses.shape[1:]");
    return view_lse(owned.emplace_back(with_contiguous_rows(tensor)));
  };

  fill_inputs(params, outs, lses, owned);
  params.out = rows_like_out("out", out);
  params.lse = rows_like_lse("lse", lse);
  if (grad_out) params.grad_out = rows_like_out("grad_out", *grad_out);
  if (grad_lse) params.grad_lse = rows_like_lse("grad_lse", *grad_lse);
  params.grad_outs = view_rows(grad_outs);
  params.grad_outs_split_stride = grad_outs.stride(0);
  params.grad_lses = view_lse(grad_lses);
  params.grad_lses_split_stride = grad_lses.stride(0);
  run_merge_backward(outs, params);
  return {grad_outs, grad_lses};
}

}  // namespace

FLASH_EXT_OPERATORS(m) {
  m.impl("merge", TORCH_BOX(&merge));
  m.impl("merge_backward", TORCH_BOX(&merge_backward));
}

}  // namespace flash_ext::api
