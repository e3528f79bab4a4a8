// Tiles and shared memory of the backward, in one place that the plan reads too.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash_ext::sm80 {

struct BackwardShape {
  int warps;
  int block_m;  // queries of a tile
  int block_n;  // keys of a CTA
};

/// `has_options`: scores that are more than scaled products within a window. `small`: fits into the shared memory of
/// every GPU.
constexpr BackwardShape backward_shape(int head_dim, bool is_float, bool has_options, bool small) {
  const bool thin = is_float && (head_dim == 256 || (head_dim == 128 && small));
  // In float, options leave registers for half as many columns of dK and dV.
  const bool half = head_dim == 256 || (is_float && has_options && !small);
  const int block_n = thin ? 32 : (half ? 64 : 128) / (small ? 2 : 1);
  // As many queries as registers have room for; options need some too.
  const int block_m = is_float                   ? (head_dim == 64 && !small ? 64 : 32)
                      : head_dim == 64 && !small ? 128
                      : head_dim > 64 && small   ? 32
                                                 : 64;
  return {small || thin ? 4 : 8, block_m, block_n};
}

/// Which of the backward's shapes.
enum class BackwardTiling {
  kPlain,  // scaled products within a window
  kAllOptions,
  kSmall,  // all options in the shared memory of every GPU
  kSlabs,  // where no shape fits: slow (slabs.cuh)
};

constexpr BackwardShape backward_shape(int head_dim, bool is_float, BackwardTiling tiling) {
  return backward_shape(head_dim, is_float, tiling != BackwardTiling::kPlain, tiling == BackwardTiling::kSmall);
}

/// Shared memory of a CTA in bytes, without a bias tile; BackwardConfig lists its parts.
constexpr int backward_shared_bytes(int head_dim, bool is_float, BackwardTiling tiling) {
  const BackwardShape shape = backward_shape(head_dim, is_float, tiling);
  const bool has_options = tiling != BackwardTiling::kPlain;
  const int element = is_float ? 4 : 2, row = head_dim * element, score_row = std::max(shape.block_m * element, 128);
  const int key_groups = shape.block_n / 32, sides = shape.warps / 2 / key_groups;
  const int tiles = (2 * shape.block_n + 3 * shape.block_m) * row + (sides == 1 ? 2 : 3) * shape.block_n * score_row;
  const int words = shape.block_m * key_groups * 4;
  const int kept = (shape.block_n + 63) / 64 * shape.block_m * 8;
  return tiles + 3 * shape.block_m * 4 + (has_options ? words + 2 * kept : 0) + 512;
}

/// The tiling that serves a call on a GPU where a CTA can have `available` bytes of shared memory. bias_bytes: the
/// bytes of a bias tile of kAllOptions.
constexpr BackwardTiling choose_backward_tiling(int head_dim, bool is_float, bool plain, int64_t bias_bytes,
                                                int64_t available) {
  if (plain && available >= backward_shared_bytes(head_dim, is_float, BackwardTiling::kPlain))
    return BackwardTiling::kPlain;
  if (available >= backward_shared_bytes(head_dim, is_float, BackwardTiling::kAllOptions) + bias_bytes)
    return BackwardTiling::kAllOptions;
  return is_float && head_dim == 256 ? BackwardTiling::kSlabs : BackwardTiling::kSmall;
}

}  // namespace flash_ext::sm80
