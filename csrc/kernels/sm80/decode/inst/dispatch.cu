// Which kernels a call of decode() runs.
#include "kernels/common/head_dim.h"
#include "kernels/sm80/common/element.h"
#include "kernels/sm80/decode/combine.cuh"
#include "kernels/sm80/decode/decode.h"
#include "kernels/sm80/decode/scheduler.cuh"

namespace flash_ext::sm80 {

template <class Element, int kHeadDim>
void run_decode(const ForwardParams& params, const DecodeGrid& grid, const DecodePartials& partials, bool after_append,
                cudaStream_t stream);

namespace {

template <class Element>
void run(const ForwardParams& params, void* workspace, bool after_append, cudaStream_t stream) {
  const DecodeGrid grid(params, ScoreUnit<Element>::kPerNatural);
  float* out = static_cast<float*>(workspace);
  const DecodePartials partials{out, out + grid.partial_rows() * params.head_dim_v};
  with_kernel_head_dim(params.head_dim, params.head_dim_v, [&](auto head_dim) {
    run_decode<Element, decltype(head_dim)::value>(params, grid, partials, after_append, stream);
  });
  if (grid.splits.value > 1) run_combine<Element>(params, grid, partials, stream);
}

bool is_empty(const ForwardParams& params) { return params.batch == 0 || params.seqlen_q == 0; }

}  // namespace

int64_t decode_workspace_bytes(const ForwardParams& params) {
  if (is_empty(params)) return 0;
  return DecodeGrid(params).partial_rows() * (params.head_dim_v + 1) * static_cast<int64_t>(sizeof(float));
}

void decode(const ForwardParams& params, void* workspace, cudaStream_t stream, bool after_append) {
  if (is_empty(params)) return;
  with_element(params.dtype, [&](auto element) { run<decltype(element)>(params, workspace, after_append, stream); });
}

}  // namespace flash_ext::sm80
