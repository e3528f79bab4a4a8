// Which calls of aten's attention operators become calls of ours by views alone, and how they run
// (flash_ext/integrations/aten_calls.py serves all calls).
#pragma once

#include <optional>

#include "aten_attention.h"
#include "aten_layouts.h"
#include "attention.h"

namespace flash_ext::api {

/// A call of an operator of aten: (batch, heads, seqlen, head_dim) tensors and their options.
struct AtenCall {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  OptionalTensor scores;  // bool: a mask, else a bias
  double dropout_p;
  bool causal;
  bool top_left;
  std::optional<double> scale;
  OptionalTensor rng_state = std::nullopt;
};

/// Whether our operators take the tensors as they are; the scores are not looked at.
bool fits_operators(const AtenCall& call);

/// Whether our operators take the whole call: tensors and scores, without dropout.
bool is_served(const AtenCall& call);

inline OptionalTensor defined(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

/// The scores with leading dimensions of 1, four dimensions in all.
OptionalTensor four_dimensions(const OptionalTensor& scores);

/// The arrangement whose results have the query's memory order, or kByRows.
Arrangement arrange(const AtenCall& call, const OptionalTensor& scores);

/// out and lse (batch, heads, seqlen_q).
Tensors2 attend_arranged(const AtenCall& call, Arrangement arrangement, const OptionalTensor& scores);

/// Whether these have the form of results of the call, and can be arranged like its inputs without a copy.
bool belong(const AtenCall& call, Arrangement arrangement, const Tensor& grad_out, const Tensor& out,
            const Tensor& lse);

BackwardCall differentiate_arranged(const AtenCall& call, Arrangement arrangement, const OptionalTensor& scores,
                                    const Tensor& grad_out, const Tensor& out, const Tensor& lse, const Needed& needed);

/// Gradients of q, k and v.
Tensors3 all_gradients(const AtenCall& call, Arrangement arrangement, const OptionalTensor& scores,
                       const Tensor& grad_out, const Tensor& out, const Tensor& lse);

/// torch's nine results: out, lse, the lengths and the tensors of dropout, which torch returns without dropout, too.
FlashResults with_lengths(const AtenCall& call, const Tensor& out, const Tensor& lse, const Tensor& seed,
                          const Tensor& offset, const Tensor& debug_mask);
}  // namespace flash_ext::api
