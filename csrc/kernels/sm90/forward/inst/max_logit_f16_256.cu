#include "kernels/sm90/forward/variants.cuh"

namespace flash_ext::sm90 {

template void run_forward<ForwardFamily::kMaxLogit, __half, 256>(const ForwardCall&);

}  // namespace flash_ext::sm90
