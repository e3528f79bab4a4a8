#include "instruction_set.h"

namespace flash_ext::cpu {

const Kernels kAmxKernels = amx::kernels<float>();

}  // namespace flash_ext::cpu
