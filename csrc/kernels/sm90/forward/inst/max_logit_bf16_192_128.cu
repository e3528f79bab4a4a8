#include "kernels/sm90/forward/variants.cuh"

namespace flash_ext::sm90 {

template void run_forward<ForwardFamily::kMaxLogit, __nv_bfloat16, 192, 128>(const ForwardCall&);

}  // namespace flash_ext::sm90
