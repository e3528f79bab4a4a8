#include "instruction_set.h"

namespace flash_ext::cpu {

const InstructionSet kAvx512 = {avx512::kernels<float>(), avx512::kernels<double>()};

}  // namespace flash_ext::cpu
