#include "checks.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace flash_ext::api {

Shape shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return Shape(sizes.begin(), sizes.end());
}

std::string to_string(const Shape& shape) {
  std::string text = "(";
  for (size_t d = 0; d < shape.size(); ++d) text += (d ? ", " : "") + std::to_string(shape[d]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    default:
      return torch::headeronly::toString(dtype);
  }
}

std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  const std::string index = std::to_string(tensor.get_device_index());
  return tensor.is_cuda() ? "cuda:" + index : "another device (index " + index + ")";
}

std::optional<DType> kernel_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      return std::nullopt;
  }
}

ScalarType accumulate_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

const Argument& Argument::dtype_is(ScalarType expected) const { return dtype_in({expected}); }

const Argument& Argument::dtype_in(std::initializer_list<ScalarType> allowed) const {
  const ScalarType dtype = tensor_.scalar_type();
  if (std::find(allowed.begin(), allowed.end(), dtype) != allowed.end()) return *this;
  std::string names;
  for (const ScalarType& one : allowed) {
    const char* const separator = names.empty() ? "" : (&one == allowed.end() - 1 ? " or " : ", ");
    names += separator + dtype_name(one);
  }
  fail(name_, " must be ", names, ", got ", dtype_name(dtype));
}

const Argument& Argument::dtype_floating() const {
  return dtype_in({ScalarType::Half, ScalarType::BFloat16, ScalarType::Float, ScalarType::Double});
}

const Argument& Argument::rank_is(int64_t rank, const char* axes) const {
  if (tensor_.dim() != rank) {
    fail(name_, " must be ", rank, "-dimensional ", axes, ", got shape ", to_string(shape_of(tensor_)));
  }
  return *this;
}

const Argument& Argument::shape_is(const Shape& expected, const char* axes) const {
  const Shape shape = shape_of(tensor_);
  if (shape != expected) {
    fail(name_, " must have shape ", axes, ": expected ", to_string(expected), ", got ", to_string(shape));
  }
  return *this;
}

const Argument& Argument::shape_broadcasts_to(const Shape& expected, const char* axes) const {
  rank_is(static_cast<int64_t>(expected.size()), axes);
  const Shape shape = shape_of(tensor_);
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == expected[d] || shape[d] == 1) continue;
    fail(name_, " must have shape ", axes, ": expected ", to_string(expected), " or 1 in any dimension, got ",
         to_string(shape));
  }
  return *this;
}

const Argument& Argument::size_is(int64_t dim, int64_t expected, const char* whose) const {
  check(tensor_.size(dim) == expected, name_, ".size(", dim, ") must equal ", whose, ": expected ", expected, ", got ",
        tensor_.size(dim));
  return *this;
}

const Argument& Argument::counts(int64_t dim, const char* what) const {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  check(tensor_.size(dim) <= kMost, name_, ".size(", dim, "), the number of ", what, ", must be at most ", kMost,
        ", got ", tensor_.size(dim));
  return *this;
}

const Argument& Argument::last_dim_contiguous() const {
  const int64_t last = tensor_.dim() - 1;
  const bool ok = last < 0 || tensor_.numel() == 0 || tensor_.size(last) == 1 || tensor_.stride(last) == 1;
  if (!ok) {
    fail(name_, "'s last dimension must be contiguous: expected stride 1, got ", tensor_.stride(last), "; pass ", name_,
         ".contiguous()");
  }
  return *this;
}

const Argument& Argument::contiguous() const {
  check(tensor_.is_contiguous(), name_, " must be contiguous; pass ", name_, ".contiguous()");
  return *this;
}

const Argument& Argument::no_internal_overlap() const {
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size), smallest stride first
  for (int64_t d = 0; d < tensor_.dim(); ++d) {
    if (tensor_.size(d) > 1) dims.emplace_back(tensor_.stride(d), tensor_.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : dims) {
    check(stride >= extent, name_, " is written to and must not overlap itself in memory: got a dimension of size ",
          size, " with stride ", stride);
    extent = stride * (size - 1) + extent;
  }
  return *this;
}

const Argument& Argument::same_device_as(const Argument& other) const {
  const bool same = tensor_.is_cpu() == other.tensor_.is_cpu() && tensor_.is_cuda() == other.tensor_.is_cuda() &&
                    tensor_.get_device_index() == other.tensor_.get_device_index();
  if (!same) {
    fail(name_, " must be on the device of ", other.name_, ": expected ", device_name(other.tensor_), ", got ",
         device_name(tensor_));
  }
  return *this;
}

const Argument& Argument::same_dtype_as(const Argument& other) const {
  const ScalarType expected = other.tensor_.scalar_type();
  if (tensor_.scalar_type() != expected) {
    fail(name_, " must have the dtype of ", other.name_, ": expected ", dtype_name(expected), ", got ",
         dtype_name(tensor_.scalar_type()));
  }
  return *this;
}

}  // namespace flash_ext::api
