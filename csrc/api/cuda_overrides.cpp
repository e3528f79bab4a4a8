// The operators that put the kernels of aten_overrides.h in place on CUDA.
#include <torch/csrc/stable/library.h>

#include "aten_overrides.h"

namespace flash_ext::api {

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CompositeExplicitAutograd, m) {
  m.impl("override_aten_by_cuda", TORCH_BOX(&override_aten));
  m.impl("restore_aten_by_cuda", TORCH_BOX(&restore_aten));
  m.impl("fill_fused_attention_by_cuda", TORCH_BOX(&fill_fused_attention));
  m.impl("aten_calls_by_cuda", TORCH_BOX(&aten_calls));
}

}  // namespace flash_ext::api
