#include "matrix_units.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flash_ext::cpu {

#if defined(__x86_64__) && defined(__linux__)
namespace {

bool has_instructions() {
  constexpr unsigned kBfloat16TileProducts = 1u << 22, kTileUnit = 1u << 24, kBfloat16Vectors = 1u << 5;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kBfloat16TileProducts) == 0 || (edx & kTileUnit) == 0) return false;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kBfloat16Vectors) != 0;
}

/// See Documentation/arch/x86/xstate.rst of Linux.
bool ask_for_tile_registers() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool may_use_matrix_units() { return has_instructions() && ask_for_tile_registers(); }
#else
bool may_use_matrix_units() { return false; }
#endif

}  // namespace flash_ext::cpu
