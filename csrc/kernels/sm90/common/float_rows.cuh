// Rows of floats to pieces of their parts (float_parts.cuh).
#pragma once

#include "float_parts.cuh"
#include "kernels/common/sequence.cuh"

namespace flash_ext::sm90 {

/// NaN made 0, and Inf a large number (NonFinite::bounded()).
__device__ __forceinline__ FloatOctet bounded(FloatOctet x) {
  const auto bound = [](float& y) { y = __uint_as_float(NonFinite<float>::bounded(__float_as_uint(y))); };
  for (float4* const quad : {&x.low, &x.high}) bound(quad->x), bound(quad->y), bound(quad->z), bound(quad->w);
  return x;
}

/// 64 rows from first_row on, kPanels pieces one behind the other, of zeros behind end_row and `columns`. By a
/// warpgroup; the pieces may be in memory of any kind. kBounded: no Inf and no NaN gets there.
template <int kPanels, bool kBounded, class Element>
__device__ __forceinline__ void load_pieces(char* pieces, const RowSource<Element, false>& rows, int first_row,
                                            int end_row, int columns, int thread) {
  const PieceThread at(thread);
  __nv_bfloat162 trace = __float2bfloat162_rn(0.0f);  // of no account here
#pragma unroll 1
  for (int panel = 0; panel < kPanels; ++panel) {
    FloatOctet x[PieceThread::kOctets];
    const int column = panel * kPanelColumns + at.column;
#pragma unroll
    for (int octet = 0; octet < PieceThread::kOctets; ++octet) {
      const int row = first_row + at.row + octet * PieceThread::kRowStep;
      x[octet] = FloatOctet::load(rows.row(row) + column, row < end_row && column < columns);
    }
#pragma unroll
    for (int octet = 0; octet < PieceThread::kOctets; ++octet)
      at.store(pieces + panel * kPieceBytes, octet, kBounded ? bounded(x[octet]) : x[octet], trace);
  }
}

}  // namespace flash_ext::sm90
