// Tiles of the backward, in one place that the plan reads too.
#pragma once

namespace flash_ext::sm80 {

struct BackwardShape {
  int warps;
  int block_m;  // queries of a tile
  int block_n;  // keys of a CTA
};

/// `general`: scores that are more than scaled products within a window. `small`: fits into the shared memory of every
/// GPU.
constexpr BackwardShape backward_shape(int head_dim, bool is_float, bool general, bool small) {
  const bool thin = is_float && (head_dim == 256 || (head_dim == 128 && small));
  // In float, options leave registers for half as many columns of dK and dV.
  const bool half = head_dim == 256 || (is_float && general && !small);
  const int block_n = thin ? 32 : (half ? 64 : 128) / (small ? 2 : 1);
  // As many queries as registers have room for; options need some too.
  const int block_m = is_float                   ? (head_dim == 64 && !small ? 64 : 32)
                      : head_dim == 64 && !small ? 128
                      : head_dim > 64 && small   ? 32
                                                 : 64;
  return {small || thin ? 4 : 8, block_m, block_n};
}

}  // namespace flash_ext::sm80
