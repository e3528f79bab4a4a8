// A warp's position in a ring of stages: the stage, and the parity of its current use, in one register.
#pragma once

#include <cstdint>

namespace flash_ext {

/// For any number of stages.
template <int kStages>
class RingPosition {
 public:
  __device__ __forceinline__ int stage() const { return index_ % kStages; }
  __device__ __forceinline__ uint32_t parity() const { return index_ / kStages; }
  __device__ __forceinline__ void advance() { index_ = index_ + 1 == 2 * kStages ? 0 : index_ + 1; }

 private:
  uint32_t index_ = 0;
};

/// For powers of 2, where advancing takes one instruction.
template <int kStages>
struct RingCount {
  static_assert((kStages & (kStages - 1)) == 0);
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t parity() const { return count / kStages % 2; }
  __device__ __forceinline__ void advance() { ++count; }
};

}  // namespace flash_ext
