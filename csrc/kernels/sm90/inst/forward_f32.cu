#include "../../common/head_dim.h"
#include "../forward_f32.h"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
template <int kHeadDim>
void run_forward_f32(const ForwardParams& params, cudaStream_t stream);

void forward_f32(const ForwardParams& params, cudaStream_t stream) {
  kernel_head_dim(params.head_dim, params.head_dim_v) == 64 ? run_forward_f32<64>(params, stream)
                                                            : run_forward_f32<128>(params, stream);
}

}  // namespace flash_ext::sm90
