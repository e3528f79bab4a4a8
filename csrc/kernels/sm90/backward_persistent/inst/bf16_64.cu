#include "kernels/sm90/backward_persistent/kernel.cuh"

namespace flash_ext::sm90 {

template int64_t backward_persistent_bytes<__nv_bfloat16, 64, TurnTaking::kNever>(const BackwardParams&);
template void run_backward_persistent<__nv_bfloat16, 64, TurnTaking::kNever>(const BackwardParams&, void*,
                                                                             cudaStream_t);

}  // namespace flash_ext::sm90
