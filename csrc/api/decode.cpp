#include "decode.h"

#include <algorithm>
#include <utility>

#include "op_arguments.h"
#include "operators.h"
#include "plan/problem_text.h"
#include "value_checks.h"

namespace flash_ext::api {
namespace {

/// New keys and values, (batch, seqlen_new, heads_kv, head_dim or head_dim_v).
struct NewTokens {
  const Tensor& k;
  const Tensor& v;
};

struct DecodeCall {
  plan::Plan plan;
  std::optional<AppendParams> append;  // must run first: it writes what params reads
  ForwardParams params;
  Tensor out;
  Tensor lse;
  std::vector<Tensor> owned;
};

/// How the cache is laid out.
struct CacheShape {
  bool paged = false;
  int64_t cache_batch = 0;  // contiguous: batch entries
  int64_t num_pages = 0;
  int64_t page_size = 0;
  int64_t max_pages = 0;  // columns of block_table
  int64_t capacity = 0;   // rows that a sequence can hold
};

void check_cache_tensor(const Argument& q, const Argument& cache, bool paged, bool written) {
  cache.same_device_as(q).same_dtype_as(q).last_dim_contiguous();
  cache.rank_is(4, paged ? "(num_pages, page_size, heads_kv, head_dim) with block_table"
                         : "(batch_cache, seqlen_cache, heads_kv, head_dim)");
  if (written) cache.no_internal_overlap();
}

/// The argument that the batch size comes from.
const char* batch_source(const Geometry& g) { return g.varlen_q ? "cu_seqlens_q.size(0) - 1" : "q.size(0)"; }

void check_block_table(const Argument& q, const Argument& table, const Geometry& g) {
  table.same_device_as(q).dtype_is(ScalarType::Int).rank_is(2, "(batch, max_pages)").last_dim_contiguous();
  table.size_is(0, g.batch, batch_source(g)).counts(1, "pages of a sequence");
}

CacheShape cache_shape(const Argument& q, const Tensor& k_cache, const DecodeOptions& options, const Geometry& g) {
  CacheShape cache;
  const Argument k("k_cache", k_cache);
  cache.paged = options.block_table.has_value();
  if (cache.paged) {
    check(!options.cache_batch_idx, "cache_batch_idx belongs to a contiguous cache: expected None with block_table");
    check_block_table(q, Argument("block_table", *options.block_table), g);
    k.counts(0, "pages").counts(1, "rows of a page");
    cache.num_pages = k_cache.size(0);
    cache.page_size = k_cache.size(1);
    cache.max_pages = options.block_table->size(1);
    check(cache.page_size > 0, "k_cache.size(1), the page size, must be >= 1, got 0");
    cache.capacity = cache.max_pages * cache.page_size;
    check(cache.num_pages > 0 || cache.capacity == 0 || g.batch == 0,
          "k_cache.size(0), the number of pages, must be >= 1 where block_table has columns, got 0");
  } else {
    k.counts(0, "batch entries").counts(1, "rows");
    cache.cache_batch = k_cache.size(0);
    cache.capacity = k_cache.size(1);
    check(cache.cache_batch > 0 || g.batch == 0, "k_cache.size(0) must be >= 1 with cache_batch_idx, got 0");
    if (!options.cache_batch_idx) k.size_is(0, g.batch, batch_source(g));
  }
  return cache;
}

/// Whether two tensors of the same dtype and leading sizes certainly share no element: their addresses are apart, or
/// they interleave as two slices of one larger tensor would.
bool are_disjoint(const Tensor& a, const Tensor& b) {
  const int64_t element = static_cast<int64_t>(a.element_size());
  const int64_t distance_bytes = static_cast<const char*>(address(b)) - static_cast<const char*>(address(a));
  if (distance_bytes < 0) return are_disjoint(b, a);
  if (distance_bytes % element != 0) return false;
  const int64_t distance = distance_bytes / element;
  const int64_t last = a.dim() - 1;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size), smallest stride first
  int64_t span_a = a.size(last);
  bool same_strides = true;
  for (int64_t d = 0; d < last; ++d) {
    if (a.size(d) == 1) continue;
    span_a += (a.size(d) - 1) * a.stride(d);
    same_strides = same_strides && a.stride(d) == b.stride(d);
    dims.emplace_back(a.stride(d), a.size(d));
  }
  if (distance >= span_a) return true;
  if (!same_strides) return false;
  std::sort(dims.begin(), dims.end());
  int64_t extent_a = a.size(last), extent_b = b.size(last);
  size_t d = 0;
  for (; d < dims.size() && dims[d].first <= distance; ++d) {
    extent_a += (dims[d].second - 1) * dims[d].first;
    extent_b += (dims[d].second - 1) * dims[d].first;
  }
  // `distance` is the stride of the dimension that tells them apart.
  if (distance < extent_a) return false;
  int64_t extent = distance + extent_b;
  for (; d < dims.size(); ++d) {
    if (dims[d].first < extent) return false;
    extent += (dims[d].second - 1) * dims[d].first;
  }
  return true;
}

void check_v_cache(const Tensor& k_cache, const Argument& v_cache, bool written) {
  const char* const sizes_of_k[] = {"k_cache.size(0)", "k_cache.size(1)", "k_cache.size(2)"};
  for (int64_t d = 0; d < 3; ++d) v_cache.size_is(d, k_cache.size(d), sizes_of_k[d]);
  check(v_cache.tensor().size(3) > 0, "v_cache.size(3) must be a multiple of 8 from 8 to 256, got 0");
  check(!written || v_cache.tensor().numel() == 0 || are_disjoint(k_cache, v_cache.tensor()),
        "v_cache must not share memory with k_cache when k and v are appended");
}

/// Checks the caches and completes the geometry from their sizes.
CacheShape read_cache(const Argument& q, const Tensor& k_cache, const Tensor& v_cache, const DecodeOptions& options,
                      bool append, Geometry& g) {
  const Argument k("k_cache", k_cache), v("v_cache", v_cache);
  check_cache_tensor(q, k, options.block_table.has_value(), append);
  check_cache_tensor(q, v, options.block_table.has_value(), append);
  const CacheShape cache = cache_shape(q, k_cache, options, g);
  k.size_is(3, g.head_dim, g.varlen_q ? "q.size(2)" : "q.size(3)");
  check_v_cache(k_cache, v, append);
  g.seqlen_k = cache.capacity;
  g.total_k = k_cache.size(1);
  g.heads_kv = k.counts(2, "heads").tensor().size(2);
  g.head_dim_v = v_cache.size(3);
  return cache;
}

void check_cache_indices(const Argument& q, int64_t batch, const DecodeOptions& options) {
  check_index_tensor("cache_seqlens", options.cache_seqlens, q, {batch}, "(batch)");
  check_index_tensor("cache_leftpad", options.cache_leftpad, q, {batch}, "(batch)");
  check_index_tensor("cache_batch_idx", options.cache_batch_idx, q, {batch}, "(batch)");
}

void check_new_tokens(const Argument& q, const Geometry& g, const NewTokens& tokens, const DecodeOptions& options) {
  const Argument k("k", tokens.k), v("v", tokens.v);
  k.rank_is(4, "(batch, seqlen_new, heads_kv, head_dim)");
  const int64_t seqlen_new = tokens.k.size(1);
  k.same_device_as(q).same_dtype_as(q).shape_is({g.batch, seqlen_new, g.heads_kv, g.head_dim},
                                                "(batch, seqlen_new, heads_kv, head_dim)");
  v.same_device_as(q).same_dtype_as(q).shape_is({g.batch, seqlen_new, g.heads_kv, g.head_dim_v},
                                                "(batch, seqlen_new, heads_kv, head_dim_v)");
  k.last_dim_contiguous();
  v.last_dim_contiguous();
  check(seqlen_new <= g.seqlen_k || g.batch == 0, "k.size(1), the rows to append, must be at most ", g.seqlen_k,
        ", which is what a sequence of the cache can hold, got ", seqlen_new);
  check(options.cache_seqlens.has_value(),
        "cache_seqlens must be given to append k and v: without it the whole cache counts as in use");
}

void check_rotary(const Argument& q, const Geometry& g, bool append, const DecodeOptions& options) {
  if (!options.rotary_cos && !options.rotary_sin) return;
  check(options.rotary_cos && options.rotary_sin, "rotary_cos and rotary_sin must be given together, got only ",
        options.rotary_cos ? "rotary_cos" : "rotary_sin");
  check(append, "rotary_cos and rotary_sin apply to k and v that are appended: expected None without them");
  const Argument cos("rotary_cos", *options.rotary_cos), sin("rotary_sin", *options.rotary_sin);
  cos.same_device_as(q).same_dtype_as(q).rank_is(2, "(seqlen_rotary, rotary_dim / 2)").last_dim_contiguous();
  sin.same_device_as(q).same_dtype_as(q).shape_is(shape_of(cos.tensor()), "rotary_cos.shape").last_dim_contiguous();
  const int64_t rotary_dim = 2 * cos.tensor().size(1);
  check(cos.tensor().size(0) > 0, "rotary_cos.size(0), the positions, must be >= 1, got 0");
  check(rotary_dim <= g.head_dim, "rotary_cos.size(1) must be at most head_dim / 2 = ", g.head_dim / 2, ", got ",
        cos.tensor().size(1));
}

/// flash-attn's rule: with a window, causal included, query t is rotated as the t-th new key; without, all are rotated
/// as the first.
bool rotates_by_position(const DecodeOptions& options) { return options.window_left >= 0 || options.window_right >= 0; }

ScoreOptions score_options(const DecodeOptions& options) {
  ScoreOptions scores;
  scores.sink = options.sink;
  scores.alibi_slopes = options.alibi_slopes;
  scores.cu_seqlens_q = options.cu_seqlens_q;
  scores.max_seqlen_q = options.max_seqlen_q;
  scores.softmax_scale = options.softmax_scale;
  scores.softcap = options.softcap;
  scores.window_left = options.window_left;
  scores.window_right = options.window_right;
  scores.allow_tf32 = options.allow_tf32;
  return scores;
}

plan::Problem problem_of(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Geometry& g,
                         const CacheShape& cache, const ScoreOptions& scores, const DecodeOptions& options) {
  plan::Problem problem = describe(plan::Operation::kDecode, q, g, scores);
  problem.varlen = problem.varlen || options.cache_seqlens || options.cache_leftpad;
  problem.paged = cache.paged;
  problem.page_size = cache.page_size;
  problem.has_leftpad = options.cache_leftpad.has_value();
  problem.broadcast = is_broadcast(q) || is_broadcast(k_cache) || is_broadcast(v_cache);
  problem.num_splits = options.num_splits;
  problem.batch_invariant = options.batch_invariant;
  return problem;
}

void check_device_values(const Geometry& g, const CacheShape& cache, const ScoreOptions& scores, bool append,
                         int64_t seqlen_new, const DecodeOptions& options) {
  check_values(g, scores);
  const OptionalTensor cache_seqlens = on_host(options.cache_seqlens);
  check_cache_values({cache_seqlens, on_host(options.cache_leftpad), on_host(options.cache_batch_idx),
                      on_host(options.block_table), g.batch, cache.capacity, cache.cache_batch, cache.num_pages,
                      cache.page_size, append, seqlen_new});
  if (options.rotary_cos) {
    check_rotary_positions({cache_seqlens, on_host(options.cu_seqlens_q), g.seqlen_q, seqlen_new,
                            rotates_by_position(options), options.rotary_cos->size(0)});
  }
}

SequenceParams cache_sequence_params(const DecodeOptions& options, const CacheShape& cache) {
  SequenceParams seq;
  seq.cu_seqlens_q = int32_address(options.cu_seqlens_q);
  seq.seqused_k = int32_address(options.cache_seqlens);
  seq.leftpad_k = int32_address(options.cache_leftpad);
  seq.cache_batch_idx = int32_address(options.cache_batch_idx);
  seq.cache_batch = cache.cache_batch;
  if (cache.paged) {
    seq.block_table = int32_address(options.block_table);
    seq.block_table_stride = options.block_table->stride(0);
    seq.max_pages = cache.max_pages;
    seq.num_pages = cache.num_pages;
    seq.page_size = cache.page_size;
  }
  return seq;
}

/// Parameters of the append, which also lengthens params.seq.seqused_k and rotates params.q.
AppendParams append_params(const Tensor& q, const NewTokens& tokens, const Geometry& g, const CacheShape& cache,
                           const DecodeOptions& options, DecodeCall& call) {
  AppendParams append;
  append.dtype = call.params.dtype;
  append.batch = g.batch;
  append.heads_q = g.heads_q;
  append.heads_kv = g.heads_kv;
  append.head_dim = g.head_dim;
  append.head_dim_v = g.head_dim_v;
  append.seqlen_q = call.params.seqlen_q;
  append.total_q = call.params.total_q;
  append.seqlen_new = tokens.k.size(1);
  append.seqlen_cache = cache.capacity;
  append.k = view_rows(tokens.k);
  append.v = view_rows(tokens.v);
  append.q = call.params.q;
  append.seq = call.params.seq;

  const Tensor& after = call.owned.emplace_back(new_empty(q, {g.batch}, ScalarType::Int));
  append.seqused_k_after = static_cast<int32_t*>(address(after));
  call.params.seq.seqused_k = append.seqused_k_after;
  if (options.rotary_cos) {
    append.cos = address(*options.rotary_cos);
    append.sin = address(*options.rotary_sin);
    append.cos_row_stride = options.rotary_cos->stride(0);
    append.sin_row_stride = options.rotary_sin->stride(0);
    append.rotary_rows = options.rotary_cos->size(0);
    append.rotary_dim = 2 * options.rotary_cos->size(1);
    append.rotary_interleaved = options.rotary_interleaved;
    append.rotate_q_by_position = rotates_by_position(options);
    append.q_rotated = view_rows(call.owned.emplace_back(new_empty(q, shape_of(q), q.scalar_type())));
    call.params.q = append.q_rotated;
  }
  return append;
}

/// A checked call.
struct DescribedDecode {
  Geometry geometry;
  CacheShape cache;
  ScoreOptions scores;
  plan::Problem problem;
};

DescribedDecode check_and_describe(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                   const std::optional<NewTokens>& tokens, const DecodeOptions& options) {
  const Argument q_arg("q", q);
  const bool append = tokens.has_value();
  Geometry g;
  read_query(q_arg, options.cu_seqlens_q, options.max_seqlen_q, g);
  const CacheShape cache = read_cache(q_arg, k_cache, v_cache, options, append, g);
  check_cache_indices(q_arg, g.batch, options);
  if (append) check_new_tokens(q_arg, g, *tokens, options);
  check_rotary(q_arg, g, append, options);
  ScoreOptions scores = score_options(options);
  check_options(q_arg, g, scores);
  plan::Problem problem = problem_of(q, k_cache, v_cache, g, cache, scores, options);
  return {g, cache, std::move(scores), problem};
}

/// Points the parameters at the caches, or at copies where rows are not aligned.
void view_caches(DecodeCall& call, const Tensor& k_cache, const Tensor& v_cache) {
  call.params.k = view_rows(call.owned.emplace_back(with_aligned_rows(k_cache)));
  call.params.v = view_rows(call.owned.emplace_back(with_aligned_rows(v_cache)));
}

/// Checks and plans a call. With `tokens`, the caller calls view_caches() after they are appended: a cache may need a
/// copy, and the copy must hold them.
DecodeCall prepare_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                          const std::optional<NewTokens>& tokens, const DecodeOptions& options) {
  const bool append = tokens.has_value();
  const auto [g, cache, scores, problem] = check_and_describe(q, k_cache, v_cache, tokens, options);
  const plan::Plan plan = plan_or_fail(problem);
  if (wants_value_checks(q)) check_device_values(g, cache, scores, append, append ? tokens->k.size(1) : 0, options);

  DecodeCall call{plan,
                  std::nullopt,
                  {},
                  new_empty(q, g.out_shape(), q.scalar_type()),
                  new_empty(q, g.lse_shape(), accumulate_dtype(q.scalar_type())),
                  {}};
  static_cast<AttentionParams&>(call.params) = to_params(q, g, scores, plan, call.owned);
  call.params.seq = cache_sequence_params(options, cache);
  call.params.out = view_rows(call.out);
  call.params.lse = view_lse(call.lse);
  call.params.num_splits = plan.num_splits;
  call.params.split_size = plan.split_size;
  if (append) {
    call.append = append_params(q, *tokens, g, cache, options, call);
    call.append->k_cache = view_rows_for_writing(k_cache);
    call.append->v_cache = view_rows_for_writing(v_cache);
  } else {
    view_caches(call, k_cache, v_cache);
  }
  return call;
}

Tensors2 attention_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, FLASH_EXT_DECODE_PARAMETERS) {
  const DeviceScope scope(q);
  const DecodeCall call = prepare_decode(q, k_cache, v_cache, std::nullopt, FLASH_EXT_DECODE_OPTIONS);
  run_decode(q, call.plan, call.params, call.append.has_value());
  return {call.out, call.lse};
}

Tensors2 attention_decode_append(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
                                 const Tensor& v, FLASH_EXT_DECODE_PARAMETERS) {
  const DeviceScope scope(q);
  DecodeCall call = prepare_decode(q, k_cache, v_cache, NewTokens{k, v}, FLASH_EXT_DECODE_OPTIONS);
  run_append(q, *call.append);
  view_caches(call, k_cache, v_cache);
  run_decode(q, call.plan, call.params, call.append.has_value());
  return {call.out, call.lse};
}

std::string attention_decode_describe(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                      FLASH_EXT_DECODE_PARAMETERS) {
  const DeviceScope scope(q);
  return plan::text_of(check_and_describe(q, k_cache, v_cache, std::nullopt, FLASH_EXT_DECODE_OPTIONS).problem);
}

void attention_decode_check(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                            FLASH_EXT_DECODE_PARAMETERS) {
  const DeviceScope scope(q);
  prepare_decode(q, k_cache, v_cache, std::nullopt, FLASH_EXT_DECODE_OPTIONS);
}

}  // namespace

FLASH_EXT_OPERATORS(m) {
  m.impl("attention_decode", TORCH_BOX(&attention_decode));
  m.impl("attention_decode_append", TORCH_BOX(&attention_decode_append));
  m.impl("attention_decode_describe", TORCH_BOX(&attention_decode_describe));
  m.impl("attention_decode_check", TORCH_BOX(&attention_decode_check));
}

}  // namespace flash_ext::api
