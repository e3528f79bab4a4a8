// Whether this process may use the matrix units of its CPU.
#pragma once

namespace flash_ext::cpu {

/// Whether the CPU has AMX with bfloat16 and the conversions of AVX-512 to bfloat16, and Linux keeps the tile registers
/// of threads of this process. Linux does so only for a process that has asked; this function asks, for the whole
/// process.
bool may_use_matrix_units();

}  // namespace flash_ext::cpu
