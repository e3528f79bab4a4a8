// torch's scaled_dot_product_attention (SDPA) overridden at the autograd key, for no more than to find out in a
// fraction of a microsecond which calls are torch's own matter. Those are composed of aten's operators by torch, as if
// nothing were overridden; all others go on to Python (flash_ext/integrations/sdpa_routing.py).
//
// Both ways lead through the dispatcher's C++ function `redispatch` of this operator, which is no part of torch's
// stable ABI: only it lets exceptions pass unchanged, those of Python among them. Python looks it up, and another one
// that tells tensors of tracers apart, by names that spell out all their arguments (flash_ext/torch_private.py). Where
// a torch has no functions of these names, SDPA is overridden in Python alone.
#pragma once

#include <cstdint>
#include <string>

namespace flash_ext::api {

/// Overrides SDPA for a dispatch key until restore_aten(). `composed` and `routed` are the keysets, as c10 represents
/// them, under which the dispatcher finds torch's composition and the kernel in Python; `redispatch` and `has_dispatch`
/// the addresses of torch's functions.
void override_sdpa(std::string dispatch_key, int64_t composed, int64_t routed, int64_t redispatch,
                   int64_t has_dispatch);

}  // namespace flash_ext::api
