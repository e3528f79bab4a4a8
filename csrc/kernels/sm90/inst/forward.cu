#include "../dispatch.h"
#include "../forward.h"
#include "../tensor_map.h"

namespace flash_ext::sm90 {

template <class Element, int kHeadDim>
void run_forward(const ForwardParams& params, void* workspace,
                 cudaStream_t stream);  // instantiated in the files beside this one

bool forward_takes_strides(const ForwardParams& p) {
  return takes_strides(p.q, query_shape(p)) && takes_strides(p.k, key_shape(p, p.head_dim)) &&
         takes_strides(p.v, key_shape(p, p.head_dim_v));
}

void forward(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  with_kernel_types(params, [&](auto element, auto head_dim) {
    run_forward<decltype(element), decltype(head_dim)::value>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
