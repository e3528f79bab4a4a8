#include "kernels/sm90/forward/variants.cuh"

namespace flash_ext::sm90 {

template void run_forward<ForwardFamily::kRange, __half, 96>(const ForwardCall&);

}  // namespace flash_ext::sm90
