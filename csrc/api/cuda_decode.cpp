// Attention over a key-value cache on CUDA: prepare the call, append, run the kernels on torch's current stream.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "cuda_device.h"
#include "decode.h"
#include "kernels/sm80/clear/clear.h"
#include "kernels/sm80/decode/append.h"
#include "kernels/sm80/decode/decode.h"
#include "kernels/sm80/forward/forward.h"
#include "op_arguments.h"
#include "plan/problem_text.h"
#include "tensors.h"

namespace flash_ext::api {
namespace {

using Tensors2 = std::tuple<Tensor, Tensor>;

Tensors2 run(DecodeCall& call, const CudaDevice& device) {
  const bool forward = call.plan.kernel == plan::KernelId::kSm80Forward;  // parts of prompts: it reads caches too
  const int64_t bytes =
      forward ? sm80::forward_workspace_bytes(call.params) : sm80::decode_workspace_bytes(call.params);
  void* workspace = nullptr;  // one split needs none
  if (bytes > 0) workspace = address(call.owned.emplace_back(new_empty(call.out, {bytes}, ScalarType::Byte)));
  if (forward) {
    sm80::clear_forward(call.params, device.stream());
    sm80::forward(call.params, workspace, device.stream());
  } else {
    sm80::decode(call.params, workspace, device.stream(), call.append.has_value());
  }
  return {call.out, call.lse};
}

Tensors2 attention_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, FLASH_EXT_DECODE_PARAMETERS) {
  const CudaDevice device(q);
  DecodeCall call = prepare_decode(q, k_cache, v_cache, std::nullopt, FLASH_EXT_DECODE_OPTIONS);
  return run(call, device);
}

Tensors2 attention_decode_append(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
                                 const Tensor& v, FLASH_EXT_DECODE_PARAMETERS) {
  const CudaDevice device(q);
  DecodeCall call = prepare_decode(q, k_cache, v_cache, NewTokens{k, v}, FLASH_EXT_DECODE_OPTIONS);
  sm80::append(*call.append, device.stream());
  // Copies, where the caches need them, hold what was just appended.
  call.params.k = view_rows(call.owned.emplace_back(with_aligned_rows(k_cache)));
  call.params.v = view_rows(call.owned.emplace_back(with_aligned_rows(v_cache)));
  return run(call, device);
}

std::string attention_decode_describe(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                      FLASH_EXT_DECODE_PARAMETERS) {
  const CudaDevice device(q);
  return plan::text_of(describe_decode(q, k_cache, v_cache, FLASH_EXT_DECODE_OPTIONS));
}

void attention_decode_check(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                            FLASH_EXT_DECODE_PARAMETERS) {
  const CudaDevice device(q);
  prepare_decode(q, k_cache, v_cache, std::nullopt, FLASH_EXT_DECODE_OPTIONS);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
  m.impl("attention_decode", TORCH_BOX(&attention_decode));
  m.impl("attention_decode_append", TORCH_BOX(&attention_decode_append));
  m.impl("attention_decode_describe", TORCH_BOX(&attention_decode_describe));
  m.impl("attention_decode_check", TORCH_BOX(&attention_decode_check));
}

}  // namespace flash_ext::api
