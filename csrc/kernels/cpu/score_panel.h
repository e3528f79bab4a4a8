// From products q . k to scores, a panel at a time:
//   s = cap(q . k * scale) - slope * |i + offset - j| + bias,   -inf where key j is not visible to query i.
// A score that is hidden is replaced, never added to: NaN - inf would stay NaN.
#pragma once

#include "kernels/common/score/softcap.h"
#include "key_tiles.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

/// The terms of the score formula that are the same for the whole call.
template <class T>
struct ScoreRules {
  const AttentionParams& params;
  T q_factor;  // multiplies q when it is loaded
  T cap;       // 0 without softcap

  explicit ScoreRules(const AttentionParams& p)
      : params(p),
        q_factor(static_cast<T>(p.softcap > 0 ? p.softmax_scale / p.softcap : p.softmax_scale)),
        cap(static_cast<T>(p.softcap)) {}
};

/// A panel of scores: rows = keys [begin, end) of a tile, counted from the tile's first key; columns = queries.
template <class T>
struct ScorePanel {
  static constexpr int kPanel = Shape<T>::kPanel;
  static constexpr int kLanes = Shape<T>::kLanes;

  T* s;
  int64_t begin;
  int64_t end;

  template <class Function>
  FLASH_EXT_INLINE void for_each_vector(const Function& function) const {
    for (int64_t n = begin; n < end; ++n) {
      for (int c = 0; c < kPanel; c += kLanes) function(n, c, s + n * kPanel + c);
    }
  }
};

/// s = cap * tanh(s); `slope`, if wanted, receives the derivative 1 - tanh^2.
template <class T>
void apply_softcap(const ScorePanel<T>& scores, T cap, T* slope) {
  constexpr int kPanel = Shape<T>::kPanel;
  scores.for_each_vector([=](int64_t n, int c, T* s) {
    const Vec<T> t = tanh<T>(load(s));
    store(s, t * cap);
    if (slope != nullptr) store(slope + n * kPanel + c, softcap_slope<T>(t));
  });
}

template <class T>
void add_alibi(const ScorePanel<T>& scores, const AttentionParams& p, const Panel<T>& panel, const Sequence& seq,
               int64_t first_key) {
  constexpr int kPanel = Shape<T>::kPanel;
  alignas(64) T slope[kPanel] = {};
  alignas(64) T position[kPanel] = {};  // of the diagonal, counted from the tile's first key
  for (int lane = 0; lane < panel.count; ++lane) {
    slope[lane] = p.alibi_slopes[seq.batch * p.alibi_batch_stride + panel.head[lane]];
    position[lane] = static_cast<T>(panel.query[lane] + seq.window.offset - first_key);
  }
  scores.for_each_vector([&](int64_t n, int c, T* s) {
    const Vec<T> distance = load(position + c) - static_cast<T>(n);
    store(s, load(s) - load(slope + c) * (distance < T(0) ? -distance : distance));
  });
}

/// Loads `count` numbers of a bias, converted.
template <class T>
FLASH_EXT_INLINE void load_bias(T* to, const ScoreView& bias, int64_t first, int64_t count) {
  const bool loads_as_row = size_of(bias.dtype) == sizeof(T) || (sizeof(T) == 4 && size_of(bias.dtype) == 2);
  if (bias.col_stride == 1 && loads_as_row) {
    const char* from = static_cast<const char*>(bias.data) + first * size_of(bias.dtype);
    prefetch_row(from + kBlockN * size_of(bias.dtype), count * size_of(bias.dtype));  // of the next tile
    load_row(to, from, bias.dtype, count);
    return;
  }
  for (int64_t n = 0; n < count; ++n) to[n] = load_value<T>(bias.data, bias.dtype, first + n * bias.col_stride);
}

template <class T>
void add_bias(const ScorePanel<T>& scores, const ScoreView& bias, const Panel<T>& panel, const Sequence& seq,
              int64_t first_key) {
  constexpr T kHidden = -static_cast<T>(kInfinity);
  const int64_t count = scores.end - scores.begin;
  for (int lane = 0; lane < panel.count; ++lane) {
    T row[kBlockN];
    load_bias(row, bias,
              seq.batch * bias.batch_stride + panel.head[lane] * bias.head_stride +
                  panel.query[lane] * bias.row_stride + (first_key + scores.begin) * bias.col_stride,
              count);
    T* s = scores.s + scores.begin * Shape<T>::kPanel + lane;
    for (int64_t n = 0; n < count; ++n, s += Shape<T>::kPanel) *s = row[n] == kHidden ? kHidden : *s + row[n];
  }
}

template <class T>
void hide_outside_window(const ScorePanel<T>& scores, const Panel<T>& panel, int64_t first_key) {
  using Int = typename VectorTypes<T>::Int;
  constexpr int kPanel = Shape<T>::kPanel;
  alignas(64) Int first[kPanel];
  alignas(64) Int end[kPanel];
  for (int lane = 0; lane < kPanel; ++lane) {
    first[lane] = static_cast<Int>(clamp_index(panel.first_key[lane] - first_key, 0, kBlockN));
    end[lane] = static_cast<Int>(clamp_index(panel.end_key[lane] - first_key, 0, kBlockN));
  }
  scores.for_each_vector([&](int64_t n, int c, T* s) {
    IntVec<T> from, to;
    __builtin_memcpy(&from, first + c, sizeof(from));
    __builtin_memcpy(&to, end + c, sizeof(to));
    const Int key = static_cast<Int>(n);
    const IntVec<T> visible = (from <= key) & (to > key);
    store(s, visible ? load(s) : broadcast<T>(-static_cast<T>(kInfinity)));
  });
}

template <class T>
void hide_masked(const ScorePanel<T>& scores, const ScoreView& mask, const Panel<T>& panel, const Sequence& seq,
                 int64_t first_key) {
  for (int lane = 0; lane < panel.count; ++lane) {
    const bool* row = static_cast<const bool*>(mask.data) + seq.batch * mask.batch_stride +
                      panel.head[lane] * mask.head_stride + panel.query[lane] * mask.row_stride +
                      first_key * mask.col_stride;
    __builtin_prefetch(row + kBlockN * mask.col_stride);  // of the next tile
    for (int64_t n = scores.begin; n < scores.end; ++n) {
      T& s = scores.s[n * Shape<T>::kPanel + lane];
      s = row[n * mask.col_stride] ? s : -static_cast<T>(kInfinity);
    }
  }
}

template <class T>
void hide_by_bitmap(const ScorePanel<T>& scores, const KeyTile& tile, int64_t words_per_row, const Panel<T>& panel) {
  for (int lane = 0; lane < panel.count; ++lane) {
    const int32_t* row = tile.bitmap + (panel.query[lane] - tile.block_query) * words_per_row;
    for (int64_t n = scores.begin; n < scores.end; ++n) {
      const int64_t key = tile.begin + n - tile.block_key;
      T& s = scores.s[n * Shape<T>::kPanel + lane];
      s = (static_cast<uint32_t>(row[key >> 5]) >> (key & 31)) & 1u ? s : -static_cast<T>(kInfinity);
    }
  }
}

/// Turns the products in `scores` into scores. The window is applied only where some query of the panel does not see
/// all these keys, and a block mask only in blocks with a bitmap.
template <class T>
void finish_scores(const ScorePanel<T>& scores, const ScoreRules<T>& rules, const Panel<T>& panel, const Sequence& seq,
                   const KeyTile& tile, T* cap_slope = nullptr) {
  const AttentionParams& p = rules.params;
  if (rules.cap > 0) apply_softcap(scores, rules.cap, cap_slope);
  if (p.alibi_slopes != nullptr) add_alibi(scores, p, panel, seq, tile.begin);
  if (p.bias.data != nullptr) add_bias(scores, p.bias, panel, seq, tile.begin);
  if (!contains(panel.every, {tile.begin + scores.begin, tile.begin + scores.end})) {
    hide_outside_window(scores, panel, tile.begin);
  }
  if (p.mask.data != nullptr) hide_masked(scores, p.mask, panel, seq, tile.begin);
  if (tile.bitmap != nullptr) hide_by_bitmap(scores, tile, p.blocks.block_n / 32, panel);
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
