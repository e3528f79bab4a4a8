// Dropout drawn ahead: while products are under way, each lane finds out which weights of its accumulators stay, a bit
// for each, and clears the others when P is packed.
#pragma once

#include <cstdint>

#include "../common/host_device.h"
#include "../common/philox.h"
#include "../ptx/packed.h"

namespace flash_ext::sm90 {

/// Comparison of two halves of 16 bits with the threshold: min(x, limit) + lift has the upper bit of a half set where
/// x is kept. That is so up to 1/2.
struct PackedDropout {
  uint32_t limit = 0, lift = 0;

  PackedDropout() = default;
  explicit PackedDropout(uint32_t threshold) : limit(threshold * 0x10001u), lift((0x8000u - threshold) * 0x10001u) {}
  static bool serves(uint32_t threshold) { return threshold <= 0x8000u; }
};

/// Philox for one row of a work, and the one 8 below it, in the registers of a lane: loads from shared memory would
/// wait behind the products that it runs beside.
class Draw {
 public:
  __device__ __forceinline__ Draw(PhiloxKey key, uint32_t batch_head, int row)
      : low_(__shfl_sync(~0u, key.seed_lo, 0)),
        high_(__shfl_sync(~0u, key.seed_hi, 0)),
        offset_(__shfl_sync(~0u, key.offset_lo, 0)),
        batch_head_(batch_head),
        query_group_(static_cast<uint32_t>(row / 16 * 8 + row % 8)) {}

  /// Of 64 keys: bit n of byte 2 r + c says whether the weight of key 8 n + 2 (lane % 4) + c stays, of row 8 r. They
  /// begin at key_group, which is as dropout_words() has it.
  __device__ __forceinline__ uint32_t kept(const PackedDropout& dropout, uint32_t key_group) const {
    constexpr uint32_t kUpperBits = 0x80008000u;
    uint32_t kept = 0;
#pragma unroll 1
    for (uint32_t c = 0; c < 2; ++c) {  // even columns, then odd ones
      uint32_t words[kCalls][4];
      philox(words, key_group + c);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const uint32_t stays = ptx::min_u16x2(words[n / 4][n % 4], dropout.limit) + dropout.lift;
        kept = (kept >> 1 & ~kUpperBits) | (stays & kUpperBits);
      }
    }
    return kept;
  }

 private:
  static constexpr int kCalls = 2;  // side by side

  /// philox4x32_10 of key groups 8 apart.
  __device__ __forceinline__ void philox(uint32_t (&words)[kCalls][4], uint32_t key_group) const {
#pragma unroll
    for (int call = 0; call < kCalls; ++call) {
      words[call][0] = key_group + 8 * call;
      words[call][1] = query_group_;
      words[call][2] = batch_head_;
      words[call][3] = offset_;
    }
    uint32_t low = low_, high = high_;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
#pragma unroll
      for (int call = 0; call < kCalls; ++call) philox_round(words[call], low, high);
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
  }

  /// As in philox4x32_10().
  __device__ __forceinline__ static void philox_round(uint32_t (&c)[4], uint32_t key_low, uint32_t key_high) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c[0], p1 = static_cast<uint64_t>(0xCD9E8D57u) * c[2];
    c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key_low;
    c[1] = static_cast<uint32_t>(p1);
    c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key_high;
    c[3] = static_cast<uint32_t>(p0);
  }

  uint32_t low_, high_, offset_, batch_head_, query_group_;
};

/// P as an operand of 16-bit pairs.
template <int kSteps, int kParts>
__device__ __forceinline__ void drop_packed(uint32_t (&p)[kSteps][4], const uint32_t (&kept)[kParts]) {
#pragma unroll
  for (int n = 0; n < 2 * kSteps; ++n) {
    const uint32_t signs = kept[n / 8] << (7 - n % 8);
    p[n / 2][n % 2 * 2] &= ptx::permute_bytes<0x9988>(signs, 0);
    p[n / 2][n % 2 * 2 + 1] &= ptx::permute_bytes<0xBBAA>(signs, 0);
  }
}

}  // namespace flash_ext::sm90
