// Floats as sums of three bfloat16, which is what wgmma multiplies, and the pieces of shared memory that hold them:
//
//   x = x0 + x1 + x2 exactly, |x1| < 2^-7 |x|, |x2| < 2^-15 |x|     (8 bits each of a float's 24)
//   x y = x0 y0 + (x0 y1 + x1 y0) + (x1 y1 + x0 y2 + x2 y0)         (to about 2^-23, without drift)
//
// x0 is truncated, so that no number becomes Inf; what it leaves is rounded to nearest, so that the products that are
// left out have either sign.
#pragma once

#include <cuda_bf16.h>

#include "../common/non_finite.cuh"
#include "../ptx/arithmetic.h"
#include "matrix_descriptor.h"

namespace flash_ext::sm90 {

constexpr int kParts = 3;

/// A product is the sum of those of these parts, the smallest ones first. Tensor cores round towards zero whatever they
/// add to: the last product alone is added to what is large.
constexpr int kPartProducts = 6;
FLASH_EXT_HOST_DEVICE constexpr int part_of_a(int product) { return product == 0 ? 2 : product == 2 || product == 3; }
FLASH_EXT_HOST_DEVICE constexpr int part_of_b(int product) { return product == 1 ? 2 : product == 2 || product == 4; }

/// A piece: 64 rows of 64 columns, as a panel (matrix_descriptor.h) of each part.
constexpr int kPieceRows = 64;
constexpr int kPartBytes = panel_bytes(kPieceRows);
constexpr int kPieceBytes = kParts * kPartBytes;
using PieceDescriptor = TileDescriptor<kPieceRows>;

/// Parts of two floats, `x` in the low half. Of Inf and NaN, part 0 may be any of them; part 1 is NaN.
__device__ __forceinline__ void split(float x, float y, uint32_t (&parts)[kParts]) {
  const uint32_t x_bits = __float_as_uint(x), y_bits = __float_as_uint(y);
  parts[0] = __byte_perm(x_bits, y_bits, 0x7632);
  x -= __uint_as_float(x_bits & 0xFFFF0000u);
  y -= __uint_as_float(y_bits & 0xFFFF0000u);
  parts[1] = ptx::pack2<__nv_bfloat16>(x, y);
  const float2 next = ptx::unpack2<__nv_bfloat16>(parts[1]);
  parts[2] = ptx::pack2<__nv_bfloat16>(x - next.x, y - next.y);
}

/// Eight columns of a row.
struct FloatOctet {
  float4 low, high;

  __device__ __forceinline__ static FloatOctet load(const float* g_source, bool valid) {
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto* const g_quads = reinterpret_cast<const float4*>(g_source);
    return {valid ? __ldg(g_quads) : zero, valid ? __ldg(g_quads + 1) : zero};
  }
};

/// How a warpgroup goes through a piece: a thread has eight columns of every sixteenth row.
struct PieceThread {
  static constexpr int kOctets = kPieceRows / 16;
  static constexpr int kRowStep = 16;

  int row, column;   // of the first octet
  uint32_t address;  // of it, within a part

  __device__ __forceinline__ explicit PieceThread(int thread)
      : row(thread / 8),
        column(thread % 8 * 8),
        address(static_cast<uint32_t>(row * kPanelRowBytes + ((thread % 8 ^ row % 8) << 4))) {}

  __device__ __forceinline__ char* place(char* s_piece, int octet) const {
    return s_piece + address + octet * kRowStep * kPanelRowBytes;
  }

  /// Writes the parts. NaN in `trace` if there is Inf or NaN.
  __device__ __forceinline__ void store(char* s_piece, int octet, const FloatOctet& x, __nv_bfloat162& trace) const {
    uint32_t words[4][kParts];
    split(x.low.x, x.low.y, words[0]);
    split(x.low.z, x.low.w, words[1]);
    split(x.high.x, x.high.y, words[2]);
    split(x.high.z, x.high.w, words[3]);
#pragma unroll
    for (int k = 0; k < 4; ++k) trace = __hmax2_nan(trace, reinterpret_cast<const __nv_bfloat162&>(words[k][1]));
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      *reinterpret_cast<uint4*>(place(s_piece, octet) + part * kPartBytes) =
          uint4{words[0][part], words[1][part], words[2][part], words[3][part]};
  }

  /// Makes Inf and NaN among what the thread wrote 0.
  __device__ __forceinline__ void take_out_non_finite(char* s_piece) const {
#pragma unroll 1
    for (int word = 0; word < 4 * kOctets; ++word) {
      char* const s_word = place(s_piece, word / 4) + word % 4 * 4;
      const auto part = [&](int k) -> uint32_t& { return *reinterpret_cast<uint32_t*>(s_word + k * kPartBytes); };
      const uint32_t finite = ~((NonFinite<__nv_bfloat16>::in_word(part(1)) >> 15) * 0xFFFFu);
      for (int k = 0; k < kParts; ++k) part(k) &= finite;
    }
  }
};

/// Whether split() met Inf or NaN.
__device__ __forceinline__ bool is_nan(__nv_bfloat162 trace) { return !__hbeq2(trace, trace); }

}  // namespace flash_ext::sm90
