#include "instruction_set.h"

namespace flash_ext::cpu {

const InstructionSet kAvx2 = {avx2::kernels<float>(), avx2::kernels<double>()};

}  // namespace flash_ext::cpu
