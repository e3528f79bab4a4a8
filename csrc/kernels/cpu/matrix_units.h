// Whether this process may use the matrix units of its CPU.
#pragma once

namespace flash_ext::cpu {

/// AMX with bfloat16, and the conversions of AVX-512 to it. Asks Linux, once for the whole process, to keep the tile
/// registers of its threads, as it does for no program that has not asked; false where either lacks.
bool may_use_matrix_units();

}  // namespace flash_ext::cpu
