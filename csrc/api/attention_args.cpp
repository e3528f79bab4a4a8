#include "attention_args.h"

#include "plan/names.h"
#include "plan/problem_text.h"
#include "tensors.h"
#include "value_checks.h"

namespace flash_ext::api {
namespace {

void read_key(const Argument& q, const Argument& k, const ScoreOptions& options, Geometry& g) {
  k.same_device_as(q).same_dtype_as(q).last_dim_contiguous();
  g.varlen_k = options.cu_seqlens_k.has_value();
  if (g.varlen_k) {
    k.rank_is(3, "(total_k, heads_kv, head_dim) with cu_seqlens_k");
    check_max_seqlen("max_seqlen_k", options.max_seqlen_k);
    g.seqlen_k = options.max_seqlen_k;
  } else {
    k.rank_is(4, "(batch, seqlen_k, heads_kv, head_dim)").size_is(0, g.batch, "q.size(0)");
    g.seqlen_k = k.tensor().size(1);
    check(options.max_seqlen_k == 0 || options.max_seqlen_k == g.seqlen_k,
          "max_seqlen_k belongs to cu_seqlens_k: without it expected 0 or k.size(1) = ", g.seqlen_k, ", got ",
          options.max_seqlen_k);
  }
  const int64_t rows = g.varlen_k ? 0 : 1;
  k.counts(rows, "rows").counts(rows + 1, "heads");
  g.total_k = k.tensor().size(rows);
  g.heads_kv = k.tensor().size(rows + 1);
  k.size_is(rows + 2, g.head_dim, g.varlen_q ? "q.size(2)" : "q.size(3)");
}

void read_value(const Argument& q, const Argument& k, const Argument& v, Geometry& g) {
  v.same_device_as(q).same_dtype_as(q).last_dim_contiguous();
  const int64_t rank = k.tensor().dim();
  v.rank_is(rank, g.varlen_k ? "(total_k, heads_kv, head_dim_v)" : "(batch, seqlen_k, heads_kv, head_dim_v)");
  const char* const sizes_of_k[] = {"k.size(0)", "k.size(1)", "k.size(2)"};
  for (int64_t d = 0; d + 1 < rank; ++d) v.size_is(d, k.tensor().size(d), sizes_of_k[d]);
  g.head_dim_v = v.tensor().size(rank - 1);
  check(g.head_dim_v > 0, "v.size(", rank - 1, ") must be a multiple of 8 from 8 to 256, got 0");
}

}  // namespace

DescribedCall describe_attention(plan::Operation operation, const Tensor& q, const Tensor& k, const OptionalTensor& v,
                                 const ScoreOptions& options, bool deterministic, bool wants_max_logit) {
  Geometry g;
  const Argument q_arg("q", q), k_arg("k", k);
  check(options.cu_seqlens_q.has_value() == options.cu_seqlens_k.has_value(),
        "cu_seqlens_q and cu_seqlens_k must be given together, got only ",
        options.cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_k");
  read_query(q_arg, options.cu_seqlens_q, options.max_seqlen_q, g);
  read_key(q_arg, k_arg, options, g);
  if (v) read_value(q_arg, k_arg, Argument("v", *v), g);
  check_options(q_arg, g, options);

  plan::Problem problem = describe(operation, q, g, options);
  problem.deterministic = deterministic;
  problem.wants_max_logit = wants_max_logit;
  problem.broadcast = is_broadcast(q) || is_broadcast(k) || (v && is_broadcast(*v));
  return {g, problem};
}

std::string describe_in_text(const std::string& operation, const Tensor& q, const Tensor& k, const OptionalTensor& v,
                             const ScoreOptions& options, bool deterministic, bool wants_max_logit) {
  const auto named = plan::value_of<plan::Operation>("operation", operation);
  const bool forward = named == plan::Operation::kForward, backward = named == plan::Operation::kBackward;
  return plan::text_of(
      describe_attention(named, q, k, v, options, deterministic && backward, wants_max_logit && forward).problem);
}

AttentionCall prepare_attention(plan::Operation operation, const Tensor& q, const Tensor& k, const OptionalTensor& v,
                                const ScoreOptions& options, bool deterministic, bool wants_max_logit) {
  const DescribedCall described = describe_attention(operation, q, k, v, options, deterministic, wants_max_logit);
  AttentionCall call;
  call.owned.reserve(5);  // q, k, v, bias and sink
  const Geometry& g = call.geometry = described.geometry;
  call.plan = plan_or_fail(described.problem);
  if (wants_value_checks(q)) check_values(g, options);
  call.params = to_params(q, g, options, call.plan, call.owned);
  if (const std::optional<Tensor> bias = bias_in_chunks(operation, options.bias))
    call.params.bias = view_scores(call.owned.emplace_back(*bias));
  call.params.k = view_rows(call.owned.emplace_back(with_aligned_rows(k)));
  if (v) call.params.v = view_rows(call.owned.emplace_back(with_aligned_rows(*v)));
  return call;
}

void check_lse(const Argument& q, const Geometry& g, const char* name, const Tensor& lse) {
  Argument(name, lse)
      .same_device_as(q)
      .dtype_is(accumulate_dtype(q.tensor().scalar_type()))
      .shape_is(g.lse_shape(), g.varlen_q ? "(heads_q, total_q)" : "(batch, heads_q, seqlen_q)");
}

void check_dropout_mode(int64_t dropout_mode) {
  check(dropout_mode >= kDropoutIgnore && dropout_mode <= kDropoutNegate,
        "dropout_mode must be 0 (ignore dropout), 1 (apply it) or 2 (negate what is dropped), got ", dropout_mode);
}

}  // namespace flash_ext::api
