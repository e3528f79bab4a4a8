// Conversion of torch's layout (batch, heads, seqlen, head_dim) to that of the operators and back, without a copy. It
// does what flash_ext/integrations/layouts.py does, for calls that need no Python.
#pragma once

#include "tensors.h"

namespace flash_ext::api {

/// How torch's four dimensions become those of an operator, so that the operator's contiguous results have torch's
/// order.
enum class Arrangement {
  kByRows,      // memory order (batch, seqlen, heads)
  kByHeads,     // memory order (batch, heads, seqlen): a batch of batch * heads, of one head each
  kBySequence,  // memory order (seqlen, batch, heads): a batch of one, with batch * heads heads
};

/// The arrangement whose results have q's memory order, or kByRows where that would take copies of inputs. `scores` is
/// a bias of four dimensions, each possibly 1.
Arrangement arrangement_of(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& scores);

/// Whether the first two dimensions can be seen as one.
bool merges(const Tensor& x);

/// Whether to_rows() of this tensor is a view.
inline bool fits(Arrangement arrangement, const Tensor& x) { return arrangement == Arrangement::kByRows || merges(x); }

/// A view of q, k, v, out or a gradient in the operators' layout. Requires fits().
Tensor to_rows(Arrangement arrangement, const Tensor& x);

/// A view of the bias that arrangement_of() got, in the operators' layout.
Tensor to_scores(Arrangement arrangement, const Tensor& scores);

/// A view of an lse (batch, heads, seqlen) in the operators' layout. Requires that it fits.
Tensor to_lse(Arrangement arrangement, const Tensor& lse);

/// out or a gradient, contiguous, as (batch, heads, seqlen, head_dim).
Tensor from_rows(Arrangement arrangement, const Tensor& rows, int64_t batch, int64_t heads);

/// A view of the same memory, from the same element on or `offset` elements after it.
Tensor with_strides(const Tensor& x, const Shape& sizes, const Shape& strides, int64_t offset = 0);

/// `x` with the memory order of `like`: itself, or a dense copy. `like` must have no stride of 0.
Tensor in_order_of(const Tensor& x, const Tensor& like);

bool has_zero_stride(const Tensor& x);

}  // namespace flash_ext::api
