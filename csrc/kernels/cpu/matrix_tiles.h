// Products on the matrix units of a CPU (Intel AMX): bfloat16 operands, sums in float32.
//
// A tile register holds 16 rows of 64 bytes. One instruction adds A B to a tile C of 16 x 16 floats, where A has 16
// rows of 32 numbers, and row r of B holds the numbers 2r and 2r + 1 of each of 16 columns side by side: B is made of
// pairs. Eight registers: four of C (32 x 32 floats), two of A, two of B, so each operand that is loaded is used twice.
//
//   scores      S^T = K Q^T       A = rows of K,       B = pairs along head_dim of the queries
//   forward     O^T += V^T P^T    A = V transposed,    B = pairs of keys
//   backward    dQ^T += K^T dS    A = K transposed,    B = pairs of keys
//               dV  += P^T dO     A = rows of P^T,     B = pairs of queries
//
// The units flush subnormal numbers to zero and round to nearest even. Inf and NaN spread as in any product, so rows
// that hold one must be zero where they meet a weight of zero (row_tile.h).
#pragma once

#include "convert.h"
#include "kernels/common/mask/tile_range.h"
#include "tile_sizes.h"
#include "transpose.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

#if defined(__AMX_BF16__)
template <class T>
constexpr bool kHasMatrixUnits = sizeof(T) == sizeof(float);
#else
template <class T>
constexpr bool kHasMatrixUnits = false;
#endif

constexpr int64_t kTileSide = 16;                                   // rows of a tile; columns of C
constexpr int64_t kTileDepth = 32;                                  // numbers in a row of A
constexpr int64_t kTileBytes = 1024;                                // of a whole tile
constexpr int64_t kTileWords = kTileBytes / sizeof(uint32_t);       // pairs in a tile of B
constexpr int64_t kBlockSide = 2 * kTileSide;                       // rows and columns of the four tiles of C
constexpr int64_t kKeyTileDepths = kBlockN / kTileDepth;            // depths of a tile of keys
constexpr int64_t kKeyPairWords = kKeyTileDepths * 2 * kTileWords;  // pairs of keys of a panel

/// Numbers that a row of `dim` takes as an operand: whole depths, the rest zero.
FLASH_EXT_INLINE int64_t padded_dim(int64_t dim) { return round_up(dim, kTileDepth); }

// The following functions are defined, and called, only with matrix units.

/// S[begin:end] = A[begin:end] B. Rows of A are `stride` numbers apart; B holds a panel's pairs along `depths` depths.
/// S is computed in whole blocks of 32 rows, so other rows of these blocks may change, too.
template <int kCols>
void multiply_tiles(float* s, const uint16_t* a, int64_t stride, const uint32_t* b, int64_t depths, int64_t begin,
                    int64_t end);
/// O[0:num_rows] += A P over the keys [begin, end), in whole blocks of 32 rows of O. Row d of A holds number d of all
/// keys of a tile. P holds pairs of keys, and is zero outside [begin, end).
template <int kCols>
void accumulate_key_pairs(float* o, const uint16_t* a, const uint32_t* p, int64_t begin, int64_t end, int64_t num_rows);
/// C[0:num_rows, 0:num_cols] += sum over panels of A[panel] B[panel], in whole blocks of 32 rows. A has a tile's keys
/// as rows and a panel's queries as columns, and is zero outside keys[panel]. B holds pairs of a panel's queries.
inline void accumulate_query_pairs(float* c, int64_t stride, const uint16_t* a, const Interval* keys,
                                   int64_t num_panels, const uint32_t* b, int64_t num_rows, int64_t num_cols);
/// Packs a panel's 32 rows as the operand B whose columns are these rows, in pairs along the numbers of a row.
inline void pack_lanes(uint32_t* to, const uint16_t* rows, int64_t stride);
/// Packs a panel's 32 rows as the operand B whose columns are their numbers, in pairs of rows.
inline void pack_row_pairs(uint32_t* to, const uint16_t* rows, int64_t stride);
/// Packs a panel (keys x 32 queries) in pairs of keys, rounded, for the depths that the keys [begin, end) touch. Other
/// keys become zero.
inline void pack_key_pairs(uint32_t* to, const float* panel, int64_t begin, int64_t end);
/// Unpacks the pairs of pack_key_pairs() to the floats of the panel, for the keys [begin, end).
inline void unpack_key_pairs(float* panel, const uint32_t* pairs, int64_t begin, int64_t end);
/// Transposes 64 rows: row d of the result holds number d of each.
inline void transpose_rows(uint16_t* to, const uint16_t* rows, int64_t stride);
/// Rounds a panel (64 keys x 32 queries) to bfloat16.
inline void round_panel(uint16_t* to, const float* panel);
/// Copies a row of bfloat16 and fills it up with zeros. Returns whether it holds an Inf or a NaN.
inline bool copy_halves(uint16_t* to, const void* from, int64_t count, int64_t padded);

/// Makes the compiler finish earlier stores here: it does not know which memory tile instructions read.
FLASH_EXT_INLINE void finish_stores() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

/// Gives this thread tile registers of full size while it lives.
class TileRegisters {
 public:
  explicit TileRegisters([[maybe_unused]] bool wanted) {
#if defined(__AMX_BF16__)
    wanted_ = wanted;
    if (!wanted_) return;
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof(config) == 64, "the layout that the instruction reads");
    finish_stores();
    _tile_loadconfig(&config);
#endif
  }
  ~TileRegisters() {
#if defined(__AMX_BF16__)
    if (wanted_) _tile_release();
#endif
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

 private:
  [[maybe_unused]] bool wanted_ = false;
};

#if defined(__AMX_BF16__)

/// Where the tiles of an operand lie: distances in bytes to the next row, to the second tile and to the next depth.
struct TileOperand {
  const void* data;
  int64_t row_bytes;
  int64_t tile_bytes;
  int64_t depth_bytes;

  const char* tile(int64_t depth, int64_t n) const {
    return static_cast<const char*>(data) + depth * depth_bytes + n * tile_bytes;
  }
};

/// 32 x (16 kCols) floats of C in the registers 0 to 3, row by row.
template <int kCols>
struct TileSums {
  FLASH_EXT_INLINE static void zero() {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (kCols == 2) _tile_zero(1);
    if constexpr (kCols == 2) _tile_zero(3);
  }

  FLASH_EXT_INLINE static void load_from(const float* c, int64_t stride) {
    const int64_t row_bytes = stride * static_cast<int64_t>(sizeof(float));
    _tile_loadd(0, c, row_bytes);
    _tile_loadd(2, c + kTileSide * stride, row_bytes);
    if constexpr (kCols == 2) _tile_loadd(1, c + kTileSide, row_bytes);
    if constexpr (kCols == 2) _tile_loadd(3, c + kTileSide * stride + kTileSide, row_bytes);
  }

  FLASH_EXT_INLINE static void store_to(float* c, int64_t stride) {
    const int64_t row_bytes = stride * static_cast<int64_t>(sizeof(float));
    _tile_stored(0, c, row_bytes);
    _tile_stored(2, c + kTileSide * stride, row_bytes);
    if constexpr (kCols == 2) _tile_stored(1, c + kTileSide, row_bytes);
    if constexpr (kCols == 2) _tile_stored(3, c + kTileSide * stride + kTileSide, row_bytes);
  }

  FLASH_EXT_INLINE static void add_products(const TileOperand& a, const TileOperand& b, int64_t begin, int64_t end) {
    for (int64_t depth = begin; depth < end; ++depth) {
      _tile_loadd(4, a.tile(depth, 0), a.row_bytes);
      _tile_loadd(6, b.tile(depth, 0), b.row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kCols == 2) _tile_loadd(7, b.tile(depth, 1), b.row_bytes);
      if constexpr (kCols == 2) _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a.tile(depth, 1), a.row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kCols == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
};

/// Tiles of B that lie one after another: all depths of the first column of tiles, then all of the second.
FLASH_EXT_INLINE TileOperand pairs_operand(const uint32_t* pairs, int64_t depths) {
  return {pairs, kTileSide * static_cast<int64_t>(sizeof(uint32_t)), depths * kTileBytes, kTileBytes};
}

template <int kCols>
void multiply_tiles(float* s, const uint16_t* a, int64_t stride, const uint32_t* b, int64_t depths, int64_t begin,
                    int64_t end) {
  finish_stores();
  const int64_t row_bytes = stride * static_cast<int64_t>(sizeof(uint16_t));
  for (int64_t row = begin / kBlockSide * kBlockSide; row < end; row += kBlockSide) {
    const TileOperand rows{a + row * stride, row_bytes, kTileSide * row_bytes, kTileDepth * int64_t{sizeof(uint16_t)}};
    TileSums<kCols>::zero();
    TileSums<kCols>::add_products(rows, pairs_operand(b, depths), 0, depths);
    TileSums<kCols>::store_to(s + row * kBlockSide, kBlockSide);
  }
  finish_stores();
}

template <int kCols>
void accumulate_key_pairs(float* o, const uint16_t* a, const uint32_t* p, int64_t begin, int64_t end,
                          int64_t num_rows) {
  finish_stores();
  constexpr int64_t kRowBytes = kBlockN * sizeof(uint16_t);
  for (int64_t row = 0; row < num_rows; row += kBlockSide) {
    const TileOperand rows{a + row * kBlockN, kRowBytes, kTileSide * kRowBytes, kTileDepth * int64_t{sizeof(uint16_t)}};
    TileSums<kCols>::load_from(o + row * kBlockSide, kBlockSide);
    TileSums<kCols>::add_products(rows, pairs_operand(p, kKeyTileDepths), begin / kTileDepth,
                                  ceil_div(end, kTileDepth));
    TileSums<kCols>::store_to(o + row * kBlockSide, kBlockSide);
  }
  finish_stores();
}

void accumulate_query_pairs(float* c, int64_t stride, const uint16_t* a, const Interval* keys, int64_t num_panels,
                            const uint32_t* b, int64_t num_rows, int64_t num_cols) {
  finish_stores();
  constexpr int64_t kRowBytes = kBlockSide * sizeof(uint16_t);
  const int64_t panel_words = num_cols / kTileSide * kTileWords;
  for (int64_t row = 0; row < num_rows; row += kBlockSide) {
    for (int64_t col = 0; col < num_cols; col += kBlockSide) {
      float* sums = c + row * stride + col;
      TileSums<2>::load_from(sums, stride);
      for (int64_t n = 0; n < num_panels; ++n) {
        if (keys[n].begin >= row + kBlockSide || keys[n].end <= row) continue;
        const TileOperand rows{a + (n * kBlockN + row) * kBlockSide, kRowBytes, kTileSide * kRowBytes, 0};
        const uint32_t* pairs = b + n * panel_words + col / kTileSide * kTileWords;
        TileSums<2>::add_products(rows, pairs_operand(pairs, 1), 0, 1);
      }
      TileSums<2>::store_to(sums, stride);
    }
  }
  finish_stores();
}

/// The 16-bit numbers of two halves of a vector, taken in turns.
FLASH_EXT_INLINE __m512i interleave(__m512i halves) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves);
}

/// Numbers [0, 16) of two rows, in pairs.
FLASH_EXT_INLINE __m512i pairs_of(const uint16_t* first, const uint16_t* second) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
  return interleave(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

void pack_lanes(uint32_t* to, const uint16_t* rows, int64_t stride) {
  const int64_t depths = stride / kTileDepth;
  for (int64_t tile = 0; tile < 2 * depths; ++tile, to += kTileWords) {
    const uint16_t* from = rows + tile / depths * kTileSide * stride + tile % depths * kTileDepth;
    __m512i row[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) row[r] = _mm512_loadu_si512(from + r * stride);
    store_transposed(to, kTileSide, row);
  }
}

void pack_row_pairs(uint32_t* to, const uint16_t* rows, int64_t stride) {
  for (int64_t col = 0; col < stride; col += kTileSide) {
    for (int64_t r = 0; r < kBlockSide; r += 2, to += kTileSide) {
      _mm512_storeu_si512(to, pairs_of(rows + r * stride + col, rows + (r + 1) * stride + col));
    }
  }
}

void transpose_rows(uint16_t* to, const uint16_t* rows, int64_t stride) {
  for (int64_t first = 0; first < kBlockN; first += kTileDepth) {
    for (int64_t col = 0; col < stride; col += kTileSide) {
      const uint16_t* from = rows + first * stride + col;
      __m512i row[16];
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) row[r] = pairs_of(from + 2 * r * stride, from + (2 * r + 1) * stride);
      store_transposed(reinterpret_cast<uint32_t*>(to + col * kBlockN + first), kBlockN / 2, row);
    }
  }
}

/// Two vectors of floats, rounded: the first in the lower half.
FLASH_EXT_INLINE __m512i rounded(const float* first, const float* second) {
  return bit_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(second), _mm512_loadu_ps(first)));
}

void pack_key_pairs(uint32_t* to, const float* panel, int64_t begin, int64_t end) {
  alignas(64) static constexpr float kZeros[kTileSide] = {};
  for (int64_t key = begin / kTileDepth * kTileDepth; key < round_up(end, kTileDepth); key += 2) {
    const bool first = key >= begin && key < end, second = key + 1 >= begin && key + 1 < end;
    for (int64_t col = 0; col < 2; ++col) {
      const float* row = panel + key * kBlockSide + col * kTileSide;
      uint32_t* pairs = to + col * kKeyTileDepths * kTileWords + key / 2 * kTileSide;
      _mm512_storeu_si512(pairs, interleave(rounded(first ? row : kZeros, second ? row + kBlockSide : kZeros)));
    }
  }
}

void unpack_key_pairs(float* panel, const uint32_t* pairs, int64_t begin, int64_t end) {
  for (int64_t key = begin; key < end; ++key) {
    for (int64_t lane = 0; lane < kBlockSide; ++lane) {
      const int64_t col = lane / kTileSide * kKeyTileDepths * kTileWords;
      const uint32_t pair = pairs[col + key / 2 * kTileSide + lane % kTileSide];
      panel[key * kBlockSide + lane] = bfloat16_to_float(static_cast<uint16_t>(key % 2 == 0 ? pair : pair >> 16));
    }
  }
}

void round_panel(uint16_t* to, const float* panel) {
  for (int64_t key = 0; key < kBlockN; ++key, panel += kBlockSide, to += kBlockSide) {
    _mm512_storeu_si512(to, rounded(panel, panel + kTileSide));
  }
}

bool copy_halves(uint16_t* to, const void* from, int64_t count, int64_t padded) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  __mmask32 special = 0;
  for (int64_t i = 0; i < padded; i += kTileDepth) {
    const int64_t rest = max<int64_t>(count - i, 0);
    const __mmask32 some = rest >= kTileDepth ? ~__mmask32{0} : static_cast<__mmask32>((uint64_t{1} << rest) - 1);
    const __m512i x = _mm512_maskz_loadu_epi16(some, static_cast<const uint16_t*>(from) + i);
    special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
    _mm512_storeu_si512(to + i, x);
  }
  return special != 0;
}

#endif  // __AMX_BF16__

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
