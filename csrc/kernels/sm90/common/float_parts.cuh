// Floats as sums of three bfloat16, which is what wgmma multiplies, and the subtiles of shared memory that hold them:
//
//   x = x0 + x1 + x2 exactly, |x1| < 2^-7 |x|, |x2| < 2^-15 |x|     (8 bits each of a float's 24)
//   x y = x0 y0 + (x0 y1 + x1 y0) + (x1 y1 + x0 y2 + x2 y0)         (to about 2^-23, without drift)
//
// x0 is truncated, so that no finite number becomes Inf. The remainders are rounded to nearest, so that the neglected
// products have either sign.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "kernels/common/sanitise.cuh"
#include "kernels/ptx/arithmetic.h"
#include "matrix_descriptor.h"
#include "warpgroup.h"

namespace flash_ext::sm90 {

constexpr int kFloatParts = 3;

/// A product of floats is the sum of six products of parts, the smallest ones first. Tensor cores round every sum
/// towards zero, so only the last product is added to a large sum.
constexpr int kPartProducts = 6;
FLASH_EXT_HOST_DEVICE constexpr int part_of_a(int product) { return product == 0 ? 2 : product == 2 || product == 3; }
FLASH_EXT_HOST_DEVICE constexpr int part_of_b(int product) { return product == 1 ? 2 : product == 2 || product == 4; }

/// A subtile: kSide rows of as many columns. Its parts lie one after the other.
template <int kSide>
struct FloatSubtile {
  static_assert(kSide == 64 || kSide == 32, "the rows that swizzles are made for");
  static constexpr int kRowBytes = 2 * kSide;
  static constexpr int kPartBytes = kSide * kRowBytes;
  static constexpr int kBytes = kFloatParts * kPartBytes;
};

/// 64 rows of 64 columns: a part is a panel (kernels/common/panels.h).
constexpr int kSubtileRows = 64;
constexpr int kPartBytes = FloatSubtile<kSubtileRows>::kPartBytes;
constexpr int kSubtileBytes = FloatSubtile<kSubtileRows>::kBytes;
using SubtileDescriptor = TileDescriptor<kSubtileRows>;

/// 32 rows of 32 columns, in the 64-byte swizzle: eight rows are 512 bytes, and the 16-byte chunks of a row are
/// exchanged by bits 1 and 2 of the row's index. The parts follow each other like rows.
constexpr int kSmallSubtileRows = 32;
struct SmallSubtileDescriptor {
  static constexpr uint32_t kSwizzle64 = 2u << 30;
  static constexpr uint32_t kEightRows = 8 * FloatSubtile<kSmallSubtileRows>::kRowBytes / 16;

  __device__ __forceinline__ static uint32_t lower_half(uint32_t s_subtile) { return s_subtile >> 4; }
  /// The descriptor of the part that begins `offset` bytes after the start of the subtile.
  __device__ __forceinline__ static uint64_t at(uint32_t lower_half, uint32_t offset) {
    return uint64_t{kSwizzle64 | kEightRows} << 32 | (lower_half + offset / 16);
  }
  /// Where the columns [16 step, + 16) begin.
  static constexpr uint32_t along_row(int step) { return step * 32; }
  /// Where the rows [16 step, + 16) begin.
  static constexpr uint32_t down_rows(int step) { return step * 16 * FloatSubtile<kSmallSubtileRows>::kRowBytes; }
};

template <int kSide>
using DescriptorOfSubtile = std::conditional_t<kSide == kSubtileRows, SubtileDescriptor, SmallSubtileDescriptor>;

/// Splits two floats into parts, x in the low half. Part 0 of an Inf or NaN is Inf or NaN; part 1 is NaN.
__device__ __forceinline__ void split(float x, float y, uint32_t (&parts)[kFloatParts]) {
  const uint32_t x_bits = __float_as_uint(x), y_bits = __float_as_uint(y);
  parts[0] = __byte_perm(x_bits, y_bits, 0x7632);
  x -= __uint_as_float(x_bits & 0xFFFF0000u);
  y -= __uint_as_float(y_bits & 0xFFFF0000u);
  parts[1] = ptx::pack2<__nv_bfloat16>(x, y);
  const float2 next = ptx::unpack2<__nv_bfloat16>(parts[1]);
  parts[2] = ptx::pack2<__nv_bfloat16>(x - next.x, y - next.y);
}

/// Eight columns of a row.
struct Float8 {
  float4 low, high;

  __device__ __forceinline__ static Float8 load(const float* g_source, bool valid) {
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto* const g_float4s = reinterpret_cast<const float4*>(g_source);
    return {valid ? __ldg(g_float4s) : zero, valid ? __ldg(g_float4s + 1) : zero};
  }
};

/// How a warpgroup goes through a subtile: a thread has eight columns of every sixteenth row, or of one where the
/// subtile has 32 rows.
template <int kSide>
struct ThreadOfSubtile {
  static constexpr int kThreadsOfRow = kSide / 8;
  static constexpr int kRowStep = kWarpgroupThreads / kThreadsOfRow;
  static constexpr int kFloat8s = kSide / kRowStep;
  static constexpr int kRowBytes = FloatSubtile<kSide>::kRowBytes;
  static constexpr int kPartBytes = FloatSubtile<kSide>::kPartBytes;

  int row, column;   // of the first group of 8 floats
  uint32_t address;  // of this group, within a part

  __device__ __forceinline__ explicit ThreadOfSubtile(int thread)
      : row(thread / kThreadsOfRow),
        column(thread % kThreadsOfRow * 8),
        address(static_cast<uint32_t>(row * kRowBytes + ((thread % kThreadsOfRow ^ exchange(row)) << 4))) {}

  /// The number by which the swizzle exchanges the chunks of a row. It consists of bits 7 and up of an address.
  __device__ __forceinline__ static int exchange(int row) { return row / (kPanelRowBytes / kRowBytes) % kThreadsOfRow; }

  __device__ __forceinline__ char* address_of(char* s_subtile, int float8_index) const {
    return s_subtile + address + float8_index * kRowStep * kRowBytes;
  }

  /// Splits eight floats and writes their parts. `trace` becomes NaN if one of them is Inf or NaN.
  __device__ __forceinline__ void store(char* s_subtile, int float8_index, const Float8& x,
                                        __nv_bfloat162& trace) const {
    uint32_t words[4][kFloatParts];
    split(x.low.x, x.low.y, words[0]);
    split(x.low.z, x.low.w, words[1]);
    split(x.high.x, x.high.y, words[2]);
    split(x.high.z, x.high.w, words[3]);
#pragma unroll
    for (int k = 0; k < 4; ++k) trace = __hmax2_nan(trace, reinterpret_cast<const __nv_bfloat162&>(words[k][1]));
#pragma unroll
    for (int part = 0; part < kFloatParts; ++part)
      *reinterpret_cast<uint4*>(address_of(s_subtile, float8_index) + part * kPartBytes) =
          uint4{words[0][part], words[1][part], words[2][part], words[3][part]};
  }

  /// Zeroes Inf and NaN among the numbers that the thread wrote.
  __device__ __forceinline__ void remove_non_finite(char* s_subtile) const {
#pragma unroll 1
    for (int word = 0; word < 4 * kFloat8s; ++word) {
      char* const s_word = address_of(s_subtile, word / 4) + word % 4 * 4;
      const auto part = [&](int k) -> uint32_t& { return *reinterpret_cast<uint32_t*>(s_word + k * kPartBytes); };
      const uint32_t finite = ~((NonFinite<__nv_bfloat16>::in_word(part(1)) >> 15) * 0xFFFFu);
      for (int k = 0; k < kFloatParts; ++k) part(k) &= finite;
    }
  }
};

using SubtileThread = ThreadOfSubtile<kSubtileRows>;

/// Whether split() met Inf or NaN.
__device__ __forceinline__ bool is_nan(__nv_bfloat162 trace) { return !__hbeq2(trace, trace); }

}  // namespace flash_ext::sm90
