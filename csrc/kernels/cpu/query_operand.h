// Rows of Q or dO, one per lane of a panel, as the operand B of S^T = K Q^T and dP^T = V dO^T.
#pragma once

#include "row_tile.h"
#include "score_panel.h"
#include "tile_product.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

template <class T>
class QueryOperand {
 public:
  static constexpr int kPanel = Shape<T>::kPanel;

  /// `factor` multiplies what is loaded; with matrix units, which take rows as they are, it multiplies the product.
  void take(Arena& arena, int64_t panels, int64_t dim, T factor, bool in_halves) {
    dim_ = dim;
    factor_ = factor;
    in_halves_ = in_halves;
    if (in_halves) {
      pairs_ = arena.take<uint32_t>(panels * panel_words());
    } else {
      data_ = arena.take<T>(panels * dim * kPanel);
    }
  }

  bool in_halves() const { return in_halves_; }

  /// Loads `count` rows, and zeros into the lanes after them. `row` holds a row, `halves` the rows of a panel for
  /// matrix units.
  template <class Address>
  void load_rows(DType dtype, int64_t count, const Address& address, T* row, uint16_t* halves) {
    for (int64_t first = 0; first < count; first += kPanel) {
      const int64_t lanes = min<int64_t>(count - first, kPanel);
      if (in_halves_) {
        load_halves(first / kPanel, lanes, address, halves);
        continue;
      }
      __builtin_memset(data_ + first * dim_, 0, dim_ * kPanel * sizeof(T));
      for (int64_t r = first; r < first + lanes; ++r) {
        load_row(row, address(r), dtype, dim_);
        set_row(r, row);
      }
    }
  }

  void set_row(int64_t row, const T* values) {
    T* lane = data_ + row / kPanel * dim_ * kPanel + row % kPanel;
    for (int64_t d = 0; d < dim_; ++d) lane[d * kPanel] = values[d] * factor_;
  }

  /// For matrix units: all rows of panel n, (kPanel, padded_dim(dim)).
  void set_panel([[maybe_unused]] int64_t n, [[maybe_unused]] const uint16_t* rows) {
    if constexpr (kHasMatrixUnits<T>) pack_lanes(pairs_ + n * panel_words(), rows, padded_dim(dim_));
  }

  /// S = A B for panel n, of which `vectors` hold lanes in use. `unscaled`: matrix units leave out the factor.
  void multiply(const ScorePanel<T>& scores, const RowTile<T>& a, int64_t n, int vectors = Shape<T>::kCols,
                bool unscaled = false) const {
    if (in_halves_) {
      multiply_halves(scores, a, n, vectors, unscaled);
      return;
    }
    const T* b = data_ + n * dim_ * kPanel;
    if (vectors == 1) {
      flash_ext::cpu::FLASH_EXT_ISA::multiply<T, 1>(scores.s, a.data, a.stride, b, dim_, scores.begin, scores.end);
    } else {
      flash_ext::cpu::FLASH_EXT_ISA::multiply<T>(scores.s, a.data, a.stride, b, dim_, scores.begin, scores.end);
    }
    const auto value = [=](int64_t d, int64_t lane) { return b[d * kPanel + lane]; };
    multiply_exactly(scores.s, a, value, kPanel, scores.begin, scores.end);
  }

 private:
  template <class Address>
  void load_halves(int64_t n, int64_t lanes, const Address& address, uint16_t* rows) {
    if constexpr (kHasMatrixUnits<T>) {
      const int64_t stride = padded_dim(dim_);
      for (int64_t r = 0; r < lanes; ++r) copy_halves(rows + r * stride, address(n * kPanel + r), dim_, stride);
      __builtin_memset(rows + lanes * stride, 0, (kPanel - lanes) * stride * sizeof(uint16_t));
      set_panel(n, rows);
    }
  }

  int64_t panel_words() const { return kPanel * padded_dim(dim_) / 2; }

  void multiply_halves([[maybe_unused]] const ScorePanel<T>& scores, [[maybe_unused]] const RowTile<T>& a,
                       [[maybe_unused]] int64_t n, [[maybe_unused]] int vectors, [[maybe_unused]] bool unscaled) const {
    if constexpr (kHasMatrixUnits<T>) {
      static_assert(kPanel == kBlockSide, "a panel is a block of tiles");
      const uint32_t* b = pairs_ + n * panel_words();
      const int64_t depths = padded_dim(dim_) / kTileDepth;
      if (vectors == 1) {
        multiply_tiles<1>(scores.s, a.halves, a.half_stride, b, depths, scores.begin, scores.end);
      } else {
        multiply_tiles<2>(scores.s, a.halves, a.half_stride, b, depths, scores.begin, scores.end);
      }
      const auto value = [=](int64_t d, int64_t lane) {
        const int64_t tile = lane / kTileSide * depths + d / kTileDepth;
        const uint32_t pair = b[tile * kTileWords + d % kTileDepth / 2 * kTileSide + lane % kTileSide];
        return bfloat16_to_float(static_cast<uint16_t>(d % 2 == 0 ? pair : pair >> 16));
      };
      multiply_exactly(scores.s, a, value, kPanel, scores.begin, scores.end);
      if (unscaled || factor_ == T(1)) return;
      scores.for_each_vector([&](int64_t, int, T* s) { store(s, load(s) * factor_); });
    }
  }

  int64_t dim_ = 0;
  T factor_ = 1;
  bool in_halves_ = false;
  T* data_ = nullptr;          // (panels, dim, kPanel)
  uint32_t* pairs_ = nullptr;  // (panels, two columns of tiles, depths, tile)
};

/// Whether the products of a call go to matrix units.
template <class T>
FLASH_EXT_INLINE bool uses_matrix_units(const AttentionParams& p) {
  return kHasMatrixUnits<T> && p.dtype == DType::kBFloat16;
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
