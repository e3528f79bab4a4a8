// Tiles, stages and registers of the forward, in one table that the plan reads too.
#pragma once

#include <cstdint>

namespace flash_ext::sm90 {

constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kGroupWarps = 4;
constexpr int kGroupRows = 64;  // of wgmma

struct ForwardShape {
  int groups;            // warpgroups that compute
  int block_n;           // keys of a tile
  int stages;            // of K and of V
  bool out_in_keys;      // out leaves through a stage of K instead of memory of its own
  int registers;         // of a thread that computes
  int loader_registers;  // of the others
};

constexpr ForwardShape forward_shape(int head_dim) {
  switch (head_dim) {
    case 64:  // bound by the exponentials: many keys spread what a tile costs beside them
      return {3, 128, 4, false, 160, 32};
    case 128:  // 64 registers of out, 40 of S, 20 of P and what addresses need are what three warpgroups can have
      return {3, 80, 3, false, 160, 32};
    default:  // out takes 128 registers, so two warpgroups; shared memory has room for two stages of 80 keys
      return {2, 80, 2, true, 232, 40};
  }
}

}  // namespace flash_ext::sm90
