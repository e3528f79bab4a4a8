#include "../merge.cuh"
#include "../merge.h"

namespace flash_ext::sm80 {
namespace {

/// Calls run with a value of the dtype's C++ type.
template <class Run>
void with_type(DType dtype, Run run) {
  switch (dtype) {
    case DType::kFloat16:
      return run(__half());
    case DType::kBFloat16:
      return run(__nv_bfloat16());
    case DType::kFloat32:
      return run(float());
    case DType::kFloat64:
      break;
  }
  throw std::runtime_error("flash_ext: merge on CUDA takes float16, bfloat16 and float32");
}

}  // namespace

void merge(const MergeParams& params, cudaStream_t stream) {
  with_type(params.dtype, [&](auto type) { run_merge<decltype(type)>(params, stream); });
}

void merge_backward(const MergeBackwardParams& params, cudaStream_t stream) {
  with_type(params.dtype, [&](auto type) { run_merge_backward<decltype(type)>(params, stream); });
}

}  // namespace flash_ext::sm80
