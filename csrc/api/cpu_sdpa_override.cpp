#include "cpu_sdpa_override.h"

#include <torch/csrc/stable/library.h>

#include <array>
#include <atomic>
#include <optional>

#include "aten_overrides.h"
#include "checks.h"

namespace flash_ext::api {
namespace {

// ---- torch's C++ function -------------------------------------------------------------------------------------------

/// at::Tensor, which is a counted pointer. Returned in memory, as what has a destructor is.
struct ReturnedTensor {
  void* impl;
  ~ReturnedTensor() {}  // the handle made of it counts
};

using BorrowedTensor = void*;  // at::Tensor in a std::optional that is only read

/// at::_ops::scaled_dot_product_attention::redispatch. A keyset is one word.
using Redispatch = ReturnedTensor (*)(uint64_t keyset, const void* query, const void* key, const void* value,
                                      const std::optional<BorrowedTensor>& attn_mask, double dropout_p, bool is_causal,
                                      std::optional<double> scale, bool enable_gqa);

/// at::impl::tensor_has_dispatch: whether Python stands behind a tensor.
using HasDispatch = bool (*)(const void* tensor);

/// What override_sdpa() was given.
struct Registered {
  std::atomic<Redispatch> redispatch{nullptr};
  std::atomic<HasDispatch> has_dispatch{nullptr};
  std::atomic<uint64_t> composed{0}, routed{0};
} registered;

/// SDPA's arguments, as the dispatcher hands them over.
struct Arguments {
  Tensor query, key, value;
  OptionalTensor attn_mask;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;
};

Tensor redispatch(uint64_t keyset, const Arguments& a) {
  std::optional<BorrowedTensor> mask;
  if (a.attn_mask) mask = *reinterpret_cast<BorrowedTensor*>(a.attn_mask->get());
  const Redispatch function = registered.redispatch;
  const ReturnedTensor out = function(keyset, a.query.get(), a.key.get(), a.value.get(), mask, a.dropout_p, a.is_causal,
                                      a.scale, a.enable_gqa);
  return Tensor(reinterpret_cast<AtenTensorHandle>(new void*(out.impl)));
}

// ---- Whose call it is -----------------------------------------------------------------------------------------------

struct Shape4 {
  std::array<int64_t, 4> sizes;
  bool has_dense_rows;

  bool operator==(const Shape4& other) const { return sizes == other.sizes; }
};

/// Of a tensor of four dimensions. Nothing of one that stands for another while somebody traces: to ask its sizes would
/// fix them.
std::optional<Shape4> shape4_of(const Tensor& x) {
  const HasDispatch has_dispatch = registered.has_dispatch;
  if (has_dispatch(x.get()) || x.dim() != 4) return std::nullopt;
  const auto sizes = x.sizes();
  return Shape4{{sizes[0], sizes[1], sizes[2], sizes[3]}, x.stride(3) == 1};
}

bool has_half_precision(const Tensor& x) {
  const ScalarType dtype = x.scalar_type();
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

/// Whether torch sends the call to a fused operator, or to math where math was asked for. On CUDA, whether it takes
/// float32 depends on the backends that are allowed, so that is for Python to ask.
bool is_torchs(const Arguments& a) {
  if (a.attn_mask || a.dropout_p != 0) return false;
  const auto q = shape4_of(a.query), k = shape4_of(a.key), v = shape4_of(a.value);
  if (!q || !k || !v || !(*k == *v) || !q->has_dense_rows || !k->has_dense_rows || !v->has_dense_rows) return false;
  const bool same_length = q->sizes[2] == k->sizes[2];
  if (q->sizes[0] != k->sizes[0] || q->sizes[1] != k->sizes[1] || q->sizes[3] != k->sizes[3]) return false;
  return (same_length || !a.is_causal) && (!a.query.is_cuda() || has_half_precision(a.query));
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

void run(StableIValue* stack, uint64_t /*num_arguments*/, uint64_t /*num_results*/) {
  using torch::stable::detail::to;
  const Arguments a{to<Tensor>(stack[0]),
                    to<Tensor>(stack[1]),
                    to<Tensor>(stack[2]),
                    to<OptionalTensor>(stack[3]),
                    to<double>(stack[4]),
                    to<bool>(stack[5]),
                    to<std::optional<double>>(stack[6]),
                    to<bool>(stack[7])};
  const Tensor out = redispatch(is_torchs(a) ? registered.composed : registered.routed, a);
  stack[0] = torch::stable::detail::from(out);
}

}  // namespace

void override_sdpa(std::string dispatch_key, int64_t composed, int64_t routed, int64_t redispatch,
                   int64_t has_dispatch) {
  registered.composed = static_cast<uint64_t>(composed);
  registered.routed = static_cast<uint64_t>(routed);
  registered.redispatch = reinterpret_cast<Redispatch>(redispatch);
  registered.has_dispatch = reinterpret_cast<HasDispatch>(has_dispatch);
  register_in_aten("scaled_dot_product_attention", dispatch_key, &run);
}

}  // namespace flash_ext::api
