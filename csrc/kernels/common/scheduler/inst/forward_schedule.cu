#include "kernels/common/scheduler/forward_schedule.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/grid_dependency.h"

namespace flash_ext {
namespace {

__global__ void zero_counter(unsigned long long* counter) {
  ptx::launch_dependents();
  *counter = 0;
}

}  // namespace

void zero_forward_workspace(void* workspace, cudaStream_t stream) {
  launch("schedule of the forward", zero_counter, {dim3(1), dim3(1)}, stream,
         static_cast<unsigned long long*>(workspace));
}

}  // namespace flash_ext
