// Checks of arguments. Every message names the argument, what was expected, and what came.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/params.h"
#include "plan/text.h"

namespace flash_ext::api {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors2 = std::tuple<Tensor, Tensor>;
using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

/// Throws std::runtime_error, which Python sees as RuntimeError: "flash_ext: " and the parts of the message.
/// (STD_TORCH_CHECK would put the path of the source file in front.)
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error(text("flash_ext: ", parts...));
}

/// Calls fail() unless ok. For messages whose parts are cheap to evaluate.
template <class... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) fail(parts...);
}

using Shape = std::vector<int64_t>;

Shape shape_of(const Tensor& tensor);
std::string to_string(const Shape& shape);      // "(2, 128, 8, 64)"
std::string dtype_name(ScalarType dtype);       // "float32"
std::string device_name(const Tensor& tensor);  // "cuda:0"

/// The kernels' enum value of a floating dtype; nothing for any other.
std::optional<DType> kernel_dtype(ScalarType dtype);

/// The dtype of scores, sums and log-sum-exps: float32, or float64 for float64 inputs.
ScalarType accumulate_dtype(ScalarType dtype);

/// A tensor with the name that the caller knows. Each check returns the argument, so that checks chain.
class Argument {
 public:
  Argument(const char* name, const Tensor& tensor) : name_(name), tensor_(tensor) {}

  const char* name() const { return name_; }
  const Tensor& tensor() const { return tensor_; }

  const Argument& dtype_is(ScalarType expected) const;
  const Argument& dtype_in(std::initializer_list<ScalarType> allowed) const;
  const Argument& dtype_floating() const;

  /// `axes` names the dimensions: "(batch, seqlen_q, heads_q, head_dim)".
  const Argument& rank_is(int64_t rank, const char* axes) const;
  const Argument& shape_is(const Shape& expected, const char* axes) const;
  /// Each dimension is the expected one or 1.
  const Argument& shape_broadcasts_to(const Shape& expected, const char* axes) const;
  /// `whose` says where the expected size comes from: "q.size(3)".
  const Argument& size_is(int64_t dim, int64_t expected, const char* whose) const;

  /// The size of a dimension fits 32 bits, in which kernels and index tensors count. `what` names its items: "pages".
  const Argument& counts(int64_t dim, const char* what) const;

  const Argument& last_dim_contiguous() const;
  const Argument& contiguous() const;
  const Argument& no_internal_overlap() const;
  const Argument& same_device_as(const Argument& other) const;
  const Argument& same_dtype_as(const Argument& other) const;

 private:
  const char* name_;
  const Tensor& tensor_;
};

}  // namespace flash_ext::api
