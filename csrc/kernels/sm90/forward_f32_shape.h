// Tiles, stages and registers of the float32 forward, which the plan reads too. Q, K and V lie in shared memory as
// pieces of 64 rows and 64 columns (float_parts.cuh).
#pragma once

#include <cstdint>

namespace flash_ext::sm90 {

struct ForwardF32Shape {
  int groups;            // warpgroups that compute
  int stages;            // pieces of the ring of K and V
  int registers;         // of a thread that computes
  int loader_registers;  // of the others
};

constexpr int kForwardF32Keys = 64;  // of a tile
constexpr int kMostForwardF32HeadDim = 128;

constexpr ForwardF32Shape forward_f32_shape(int64_t head_dim) {
  return head_dim <= 64 ? ForwardF32Shape{3, 6, 136, 104} : ForwardF32Shape{2, 5, 200, 104};
}

}  // namespace flash_ext::sm90
