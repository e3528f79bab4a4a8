// Overrides of aten's attention operators by the kernels of aten_attention.h. Python decides which operators are
// overridden, and when (flash_ext/integrations/sdpa_provider.py). A call that such a kernel does not serve goes on to
// the operator of the same name in the namespace flash_ext_python, which Python defines with the same schema and one
// result more.
#pragma once

#include <cstdint>
#include <string>

namespace flash_ext::api {

/// Puts our kernel of aten's operator of that name in place for a dispatch key, such as "CUDA".
void override_aten(std::string op, std::string dispatch_key);

/// What the dispatcher calls: a stack, how many arguments lie there and how many results are expected there.
using BoxedKernel = void (*)(uint64_t* stack, uint64_t num_arguments, uint64_t num_results);

/// Puts any kernel in place for aten's operator of that name and a dispatch key.
void register_in_aten(const char* op, const std::string& dispatch_key, BoxedKernel kernel);

/// Removes all overrides: the kernels that were there before are in force again.
void restore_aten();

/// Puts kernels in place for aten::_scaled_dot_product_fused_attention_overrideable and its backward, for a dispatch
/// key and for good. A second call does nothing.
void fill_fused_attention(std::string dispatch_key);

/// How many calls of aten's operator these kernels computed, since the library was loaded.
int64_t aten_calls(std::string op);

}  // namespace flash_ext::api
