// What turns q and k into scores, as operators receive it: checked, described to the planner, handed to kernels.
#pragma once

#include "checks.h"
#include "option_lists.h"
#include "plan/plan.h"

namespace flash_ext::api {

struct ScoreOptions {
  FLASH_EXT_SCORE_OPTION_LIST(FLASH_EXT_FIRST_MEMBER, FLASH_EXT_MEMBER)
};

/// The sizes of a call, as q, k and v agree upon them.
struct Geometry {
  bool varlen_q = false;
  bool varlen_k = false;
  int64_t batch = 0;
  int64_t seqlen_q = 0;  // varlen: max_seqlen_q
  int64_t seqlen_k = 0;  // varlen: max_seqlen_k; cache: the rows that a sequence can hold
  int64_t total_q = 0;   // rows of q in memory (dense: of each batch entry)
  int64_t total_k = 0;
  int64_t heads_q = 0;
  int64_t heads_kv = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;  // 0 where there is no v

  Shape out_shape() const;
  Shape lse_shape() const;
  Shape score_shape() const { return {batch, heads_q, seqlen_q, seqlen_k}; }
};

/// Sizes, dtype and strides of q; the batch comes from cu_seqlens_q where there is one.
void read_query(const Argument& q, const OptionalTensor& cu_seqlens_q, int64_t max_seqlen_q, Geometry& geometry);

/// Shapes, dtypes and devices of all tensors in the options. Numbers are the planner's matter.
void check_options(const Argument& q, const Geometry& geometry, const ScoreOptions& options);

/// max_seqlen_q or max_seqlen_k of packed sequences.
void check_max_seqlen(const char* name, int64_t max_seqlen);

/// An absent tensor passes.
void check_index_tensor(const char* name, const OptionalTensor& tensor, const Argument& q, const Shape& shape,
                        const char* axes);

plan::Problem describe(plan::Operation operation, const Tensor& q, const Geometry& geometry,
                       const ScoreOptions& options);

/// The plan; raises with the planner's reason where there is none.
plan::Plan plan_or_fail(const plan::Problem& problem);

/// Everything but the views of k and v. What had to be converted is kept alive by `owned`.
AttentionParams to_params(const Tensor& q, const Geometry& geometry, const ScoreOptions& options,
                          const plan::Plan& plan, std::vector<Tensor>& owned);

}  // namespace flash_ext::api
