// Scratch memory of the backward. Query rows lie in it tile by tile, each sequence filled up to whole tiles, so that
// every tile of every head starts aligned and has its rows to itself.
#pragma once

#include <cstdint>

#include "../common/host_device.h"
#include "../params.h"

namespace flash_ext::sm80 {

constexpr int kDqWarps = 8;  // the most that share a tile of dQ

struct BackwardWorkspace {
  int64_t tiles_per_head = 0;
  float* lse = nullptr;          // (heads_q, tiles_per_head, block_m), to base 2; inf where a row has no weights
  float* minus_delta = nullptr;  // (heads_q, tiles_per_head, block_m): dlse - rowsum(dO * O)
  float* dq = nullptr;           // (heads_q, tiles_per_head, block_m * head_dim) in the order of backward_dq.cuh
  int32_t* turns = nullptr;      // (heads_q, tiles_per_head, kDqWarps): additions to a tile of dQ so far
  int32_t* ticket = nullptr;     // (1): blocks started so far
  int64_t bytes = 0;

  BackwardWorkspace(const BackwardParams& p, int block_m, int head_dim, void* memory) {
    tiles_per_head = p.seq.cu_seqlens_q ? p.total_q / block_m + p.batch : p.batch * tiles_of(p.seqlen_q, block_m);
    const int64_t tiles = p.heads_q * tiles_per_head;
    lse = take<float>(memory, tiles * block_m);
    minus_delta = take<float>(memory, tiles * block_m);
    if (p.dq.data) dq = take<float>(memory, tiles * block_m * head_dim);
    if (p.deterministic && p.dq.data && p.seqlen_q > 0) {
      turns = take<int32_t>(memory, tiles * kDqWarps);
      ticket = take<int32_t>(memory, 1);
    }
  }

  static FLASH_EXT_HOST_DEVICE int64_t tiles_of(int64_t rows, int block_m) { return (rows + block_m - 1) / block_m; }

  /// Tile `tile` of a sequence, in the order of memory. Packed sequences: q_begin / block_m + batch leaves each room
  /// for one tile that is not whole.
  FLASH_EXT_HOST_DEVICE int64_t tile_index(const AttentionParams& p, int64_t batch, int64_t head, int64_t q_begin,
                                           int64_t tile, int block_m) const {
    const int64_t first = p.seq.cu_seqlens_q ? q_begin / block_m + batch : batch * tiles_of(p.seqlen_q, block_m);
    return head * tiles_per_head + first + tile;
  }

 private:
  template <class T>
  T* take(void* memory, int64_t count) {
    T* const taken = reinterpret_cast<T*>(static_cast<char*>(memory) + bytes);
    bytes += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return taken;
  }
};

}  // namespace flash_ext::sm80
