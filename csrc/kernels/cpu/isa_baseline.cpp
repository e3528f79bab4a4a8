#include "instruction_set.h"

namespace flash_ext::cpu {

const InstructionSet kBaseline = {baseline::kernels<float>(), baseline::kernels<double>()};

}  // namespace flash_ext::cpu
