// The options that turn q and k into scores: their checks, their description to the plan, and the kernel parameters.
#pragma once

#include "checks.h"
#include "option_lists.h"
#include "plan/plan.h"

namespace flash_ext::api {

struct ScoreOptions {
  FLASH_EXT_SCORE_OPTION_LIST(FLASH_EXT_FIRST_MEMBER, FLASH_EXT_MEMBER)
};

/// The sizes of a call, on which q, k and v agree.
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

/// Checks sizes, dtype and strides of q, and reads its sizes. The batch comes from cu_seqlens_q if given.
void read_query(const Argument& q, const OptionalTensor& cu_seqlens_q, int64_t max_seqlen_q, Geometry& geometry);

/// Checks shapes, dtypes and devices of all tensors in the options. The plan checks numbers.
void check_options(const Argument& q, const Geometry& geometry, const ScoreOptions& options);

/// Checks max_seqlen_q or max_seqlen_k of packed sequences.
void check_max_seqlen(const char* name, int64_t max_seqlen);

/// Checks an int32 index tensor; an absent one passes.
void check_index_tensor(const char* name, const OptionalTensor& tensor, const Argument& q, const Shape& shape,
                        const char* axes);

plan::Problem describe(plan::Operation operation, const Tensor& q, const Geometry& geometry,
                       const ScoreOptions& options);

/// The bias as the kernels of an operation read it. On CUDA the forward and the backward get a copy if keys are apart
/// in memory (the bias of T5 is a view with the heads innermost), or if rows do not consist of 16-byte chunks: reading
/// such a bias element by element takes longer than copying it. Broadcast dimensions stay broadcast. The copy is no
/// larger than the memory that the bias spans, apart from padding at the ends of rows.
std::optional<Tensor> bias_in_chunks(plan::Operation operation, const OptionalTensor& bias);

/// The plan of a problem; raises with plan::supports()' reason if it cannot run.
plan::Plan plan_or_fail(const plan::Problem& problem);

/// All parameters except the views of k and v. `owned` keeps converted tensors alive.
AttentionParams to_params(const Tensor& q, const Geometry& geometry, const ScoreOptions& options,
                          const plan::Plan& plan, std::vector<Tensor>& owned);

}  // namespace flash_ext::api
