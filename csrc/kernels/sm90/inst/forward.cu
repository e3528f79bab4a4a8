#include "../dispatch.h"
#include "../forward.h"

namespace flash_ext::sm90 {

template <class Element, int kHeadDim>
void run_forward(const ForwardParams& params, void* workspace,
                 cudaStream_t stream);  // instantiated in the files beside this one

void forward(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  with_kernel_types(params, [&](auto element, auto head_dim) {
    run_forward<decltype(element), decltype(head_dim)::value>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
