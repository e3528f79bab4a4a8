// torch's (batch, heads, seqlen, head_dim), in and out of the layout of the operators, without a copy: what
// flash_ext/integrations/layouts.py does, for the calls that need no Python.
#pragma once

#include "tensors.h"

namespace flash_ext::api {

/// How four dimensions of torch become four of an operator, whose results are contiguous.
enum class Arrangement {
  kByRows,      // memory order (batch, seqlen, heads)
  kByHeads,     // memory order (batch, heads, seqlen): a batch of batch * heads, of one head each
  kBySequence,  // memory order (seqlen, batch, heads): a batch of one, with batch * heads heads
};

/// The arrangement whose results have q's memory order; by rows where that would take copies of inputs. `scores` is a
/// bias of four dimensions, each possibly 1.
Arrangement arrangement_of(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& scores);

/// Whether the first two dimensions can be seen as one.
bool merges(const Tensor& x);

/// Whether to_rows() of this tensor is a view.
inline bool fits(Arrangement arrangement, const Tensor& x) { return arrangement == Arrangement::kByRows || merges(x); }

/// q, k, v, out and their gradients, which fit, as the operators take them.
Tensor to_rows(Arrangement arrangement, const Tensor& x);

/// A bias of four dimensions, as arrangement_of() was given it.
Tensor to_scores(Arrangement arrangement, const Tensor& scores);

/// (batch, heads, seqlen), which fits, as the operators take it.
Tensor to_lse(Arrangement arrangement, const Tensor& lse);

/// out or a gradient, contiguous, as (batch, heads, seqlen, head_dim).
Tensor from_rows(Arrangement arrangement, const Tensor& rows, int64_t batch, int64_t heads);

/// A view of the same memory, from the same element on or `offset` elements behind it.
Tensor with_strides(const Tensor& x, const Shape& sizes, const Shape& strides, int64_t offset = 0);

/// `x`, dense, with the memory order of `like`, which has no stride of 0: copied where it has another.
Tensor in_order_of(const Tensor& x, const Tensor& like);

bool has_zero_stride(const Tensor& x);

}  // namespace flash_ext::api
