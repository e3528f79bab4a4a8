// What can run at all: sizes, numbers, devices.
#include <cmath>
#include <limits>

#include "kernel_table.h"
#include "plan.h"
#include "text.h"

namespace flash_ext::plan {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kHeadDimStep = 8;
constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();  // what cu_seqlens can count to

/// A compute capability as NVIDIA writes it: "9.0".
std::string dotted(int64_t capability) { return text(capability / 10, ".", capability % 10); }

template <class... Parts>
Support refuse(const Parts&... parts) {
  return {false, text(parts...)};
}

Support check_sizes(const Problem& p) {
  const struct {
    const char* name;
    int64_t value;
  } sizes[] = {{"batch", p.batch}, {"seqlen_q", p.seqlen_q}, {"seqlen_k", p.seqlen_k}};
  for (const auto& size : sizes) {
    if (size.value < 0) return refuse(size.name, " must be >= 0, got ", size.value);
    if (size.value > kMaxSize) return refuse(size.name, " must be at most ", kMaxSize, ", got ", size.value);
  }
  if (p.heads_q < 1 || p.heads_kv < 1) {
    return refuse("heads must be >= 1, got ", p.heads_q, " heads in q and ", p.heads_kv, " in k and v");
  }
  if (p.heads_q > kMaxSize) return refuse("the heads of q must be at most ", kMaxSize, ", got ", p.heads_q);
  if (p.heads_q % p.heads_kv != 0) {
    return refuse("the heads of k and v must divide those of q: got ", p.heads_q, " heads in q and ", p.heads_kv,
                  " in k and v");
  }
  const struct {
    const char* name;
    int64_t value;
  } dims[] = {{"head_dim of q and k", p.head_dim}, {"head_dim of v", p.head_dim_v}};
  for (const auto& dim : dims) {
    if (dim.value < kHeadDimStep || dim.value > kMaxHeadDim || dim.value % kHeadDimStep != 0) {
      return refuse(dim.name, " must be a multiple of ", kHeadDimStep, " from ", kHeadDimStep, " to ", kMaxHeadDim,
                    ", got ", dim.value);
    }
  }
  return {};
}

/// Scores are computed as  softcap * tanh(q k * (softmax_scale / softcap)): each factor must be a number of T.
template <class T>
Support check_score_factors(const Problem& p) {
  const double largest = std::numeric_limits<T>::max(), smallest = std::numeric_limits<T>::min();
  if (std::abs(p.softmax_scale) > largest)
    return refuse("softmax_scale must be at most ", largest, ", got ", p.softmax_scale);
  if (p.softcap == 0) return {};
  if (p.softcap < smallest || p.softcap > largest) {
    return refuse("softcap must be 0 (off) or from ", smallest, " to ", largest, ", got ", p.softcap);
  }
  if (std::abs(p.softmax_scale / p.softcap) > largest) {
    return refuse("softmax_scale / softcap must be at most ", largest, ", got ", p.softmax_scale, " / ", p.softcap);
  }
  return {};
}

Support check_scale(const Problem& p) {
  return p.dtype == DType::kFloat64 ? check_score_factors<double>(p) : check_score_factors<float>(p);
}

Support check_options(const Problem& p) {
  if (!std::isfinite(p.softmax_scale)) return refuse("softmax_scale must be finite, got ", p.softmax_scale);
  if (!std::isfinite(p.softcap) || p.softcap < 0) {
    return refuse("softcap must be finite and >= 0 (0 = off), got ", p.softcap);
  }
  if (!(p.dropout_p >= 0 && p.dropout_p <= 1)) return refuse("dropout_p must be in [0, 1], got ", p.dropout_p);
  if (p.window_left < -1)
    return refuse("window_left (window_size[0]) must be >= -1 (-1 = unlimited), got ", p.window_left);
  if (p.window_right < -1)
    return refuse("window_right (window_size[1]) must be >= -1 (-1 = unlimited), got ", p.window_right);
  if (p.num_splits < 0) return refuse("num_splits must be >= 0 (0 = the library decides), got ", p.num_splits);
  if (p.batch_invariant && p.num_splits > 1) {
    return refuse("batch_invariant=True fixes how keys are split: num_splits must be 0 or 1, got ", p.num_splits);
  }
  return {};
}

Support check_device(const Problem& p) {
  if (p.num_workers < 1) return refuse("num_workers must be >= 1, got ", p.num_workers);
  if (p.device == Device::kCpu) return {};
  if (p.dtype == DType::kFloat64) return refuse("float64 is supported on CPU only");
  if (p.compute_capability < first_compute_capability()) {
    return refuse("CUDA kernels run on GPUs of compute capability ", dotted(first_compute_capability()),
                  " (Ampere) and later, this one has ", dotted(p.compute_capability));
  }
  const struct {
    const char* name;
    int64_t value, most;
  } sizes[] = {{"batch", p.batch, kMaxCudaBatch},
               {"seqlen_q", p.seqlen_q, p.total_q > 0 ? kMaxCudaSeqlenK : kMaxCudaSeqlenQ},
               {"seqlen_k", p.seqlen_k, kMaxCudaSeqlenK}};
  for (const auto& size : sizes) {
    if (size.value > size.most) return refuse(size.name, " on CUDA must be at most ", size.most, ", got ", size.value);
  }
  const int64_t rows_of_key_head = p.seqlen_q * (p.heads_q / p.heads_kv);
  if (p.operation == Operation::kDecode && rows_of_key_head > kMaxSize) {
    return refuse("decoding on CUDA takes at most ", kMaxSize, " queries and heads with the same key head, got ",
                  p.seqlen_q, " queries of ", p.heads_q / p.heads_kv, " heads");
  }
  return {};
}

}  // namespace

Support supports(const Problem& problem) {
  for (const auto rule : {check_sizes, check_options, check_scale, check_device}) {
    const Support support = rule(problem);
    if (!support.ok) return support;
  }
  return {};
}

}  // namespace flash_ext::plan
