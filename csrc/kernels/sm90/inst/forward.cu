#include "../dispatch.h"
#include "../forward.h"

namespace flash_ext::sm90 {

template <class Element, int kHeadDim, int kHeadDimV>
void run_forward(const ForwardParams& params, void* workspace,
                 cudaStream_t stream);  // instantiated in the files beside this one

void forward(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  with_forward_types(params, [&](auto element, auto head_dim, auto head_dim_v) {
    run_forward<decltype(element), decltype(head_dim)::value, decltype(head_dim_v)::value>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
