#include <algorithm>

#include "kernels/common/scheduler/work_list.cuh"
#include "kernels/sm80/common/dispatch.h"
#include "kernels/sm80/forward/forward.h"
#include "kernels/sm80/forward/mask_bits.cuh"

namespace flash_ext::sm80 {

// Instantiated in the files beside this one.
template <class Element, int kHeadDim>
void run_forward(const ForwardParams& params, const ForwardMasks& masks, void* list, cudaStream_t stream);

namespace {

/// Bytes of the work list, whichever query tile the kernel has.
int64_t list_bytes(const ForwardParams& params) {
  int64_t bytes = 0;
  for (const int block_m : {32, 64, 128}) bytes = std::max(bytes, forward_work_list(params, block_m).bytes());
  return (bytes + 127) / 128 * 128;
}

/// Bytes of the boolean mask, to the next line of 128.
int64_t mask_bytes(const ForwardParams& params) { return (MaskSizes(params).bytes() + 127) / 128 * 128; }

}  // namespace

int64_t forward_workspace_bytes(const ForwardParams& params) {
  return list_bytes(params) + mask_bytes(params) + BlockSizes(params).bytes();
}

void forward(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  char* const memory = static_cast<char*>(workspace) + list_bytes(params);
  const ForwardMasks masks = {make_mask_bits(params, memory, stream),
                              make_block_bits(params, memory + mask_bytes(params), stream)};
  with_kernel_types(params, [&](auto element, auto head_dim) {
    run_forward<decltype(element), decltype(head_dim)::value>(params, masks, workspace, stream);
  });
}

}  // namespace flash_ext::sm80
