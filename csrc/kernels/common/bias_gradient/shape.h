// Tiles of the gradient of a bias, in one place that the plan reads too.
#pragma once

namespace flash_ext {

/// A tile of dbias and of scores, and the part of it that is a warp's.
struct BiasTileShape {
  int rows, keys, warp_rows, warp_keys;

  constexpr int key_warps() const { return keys / warp_keys; }
  constexpr int warps() const { return rows / warp_rows * key_warps(); }
};

/// Larger tiles load Q, K, V and dO less often. Sums, scores and dP of 32 x 64 pairs take 192 registers of a thread;
/// products of floats leave no more than half of that.
constexpr BiasTileShape bias_tile_shape(bool is_float) {
  return is_float ? BiasTileShape{64, 64, 16, 64} : BiasTileShape{64, 128, 32, 64};
}

constexpr int kBiasCtasPerSm = 2;  // one computes products while the other does something else

}  // namespace flash_ext
