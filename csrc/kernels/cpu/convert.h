// Conversion between the dtypes in memory and float (double for float64), in which everything is computed.
#pragma once

#include "kernels/params.h"
#include "simd.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

FLASH_EXT_INLINE int64_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : (dtype == DType::kFloat32 ? 4 : 2);
}

FLASH_EXT_INLINE float bfloat16_to_float(uint16_t x) { return bit_cast<float>(static_cast<uint32_t>(x) << 16); }

/// Rounds to nearest even; NaN stays NaN.
FLASH_EXT_INLINE uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7FC0u : rounded);
}

FLASH_EXT_INLINE float half_to_float(uint16_t x) {
  const uint32_t magnitude = static_cast<uint32_t>(x & 0x7FFFu) << 13;
  uint32_t bits = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);  // rebias, subnormals included
  if (magnitude >= 0x7C00u << 13) bits |= 0x7F800000u;
  return bit_cast<float>(bits | static_cast<uint32_t>(x & 0x8000u) << 16);
}

/// Rounds to nearest even.
FLASH_EXT_INLINE uint16_t float_to_half(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65520 and more
  if (magnitude < 0x38800000u) {  // subnormal: the addition rounds at 2^-24, the last place of a half
    const float sum = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bit_cast<uint32_t>(sum) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

template <class T>
FLASH_EXT_INLINE T load_value(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat16:
      return half_to_float(static_cast<const uint16_t*>(data)[index]);
    case DType::kBFloat16:
      return bfloat16_to_float(static_cast<const uint16_t*>(data)[index]);
    case DType::kFloat32:
      return static_cast<const float*>(data)[index];
    default:
      return static_cast<T>(static_cast<const double*>(data)[index]);
  }
}

template <class T>
FLASH_EXT_INLINE void store_value(void* data, DType dtype, int64_t index, T value) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[index] = float_to_half(static_cast<float>(value));
      break;
    case DType::kBFloat16:
      static_cast<uint16_t*>(data)[index] = float_to_bfloat16(static_cast<float>(value));
      break;
    case DType::kFloat32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    default:
      static_cast<double*>(data)[index] = value;
  }
}

typedef uint16_t HalfVec __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t WordVec __attribute__((vector_size(kVectorBytes)));

FLASH_EXT_INLINE WordVec load_words(const uint16_t* p) {
  HalfVec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, WordVec);
}

FLASH_EXT_INLINE Vec<float> load_bfloat16(const uint16_t* p) { return bit_cast<Vec<float>>(load_words(p) << 16); }

FLASH_EXT_INLINE Vec<float> load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const WordVec x = load_words(p);
  const WordVec magnitude = (x & 0x7FFFu) << 13;
  WordVec bits = bit_cast<WordVec>(bit_cast<Vec<float>>(magnitude) * 0x1p112f);
  bits |= (magnitude >= (0x7C00u << 13)) & 0x7F800000u;
  return bit_cast<Vec<float>>(bits | (x & 0x8000u) << 16);
#endif
}

/// The bits of x * 0, of several x or-ed together. If some x is NaN or infinite, more bits than the sign are set.
template <class T>
using Poison = IntVec<T>;

template <class T>
FLASH_EXT_INLINE bool is_poisoned(const Poison<T>& poison) {
  return any((poison << 1) != 0);
}

/// Copies and converts a row. Returns its poison.
template <class T, class Source, class LoadVector, class LoadOne>
FLASH_EXT_INLINE Poison<T> copy_row(T* to, const Source* from, int64_t count, const LoadVector& load_vector,
                                    const LoadOne& load_one) {
  constexpr int kLanes = Shape<T>::kLanes;
  Poison<T> poison{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec<T> x = load_vector(from + i);
    poison |= bit_cast<IntVec<T>>(x * T(0));
    store(to + i, x);
  }
  for (; i < count; ++i) {
    to[i] = load_one(from[i]);
    poison[0] |= bit_cast<typename VectorTypes<T>::Int>(to[i] * T(0));
  }
  return poison;
}

FLASH_EXT_INLINE Poison<float> load_row(float* to, const void* from, DType dtype, int64_t count) {
  const uint16_t* halves = static_cast<const uint16_t*>(from);
  switch (dtype) {
    case DType::kFloat16:
      return copy_row(to, halves, count, load_half, half_to_float);
    case DType::kBFloat16:
      return copy_row(to, halves, count, load_bfloat16, bfloat16_to_float);
    default:
      return copy_row(to, static_cast<const float*>(from), count, load<float>, [](float x) { return x; });
  }
}

FLASH_EXT_INLINE Poison<double> load_row(double* to, const void* from, DType, int64_t count) {
  return copy_row(to, static_cast<const double*>(from), count, load<double>, [](double x) { return x; });
}

template <class T>
FLASH_EXT_INLINE void store_half_row(uint16_t* to, const T* from, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (sizeof(T) == sizeof(float)) {
    for (; i + 8 <= count; i += 8) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
    }
  }
#endif
  for (; i < count; ++i) to[i] = float_to_half(static_cast<float>(from[i]));
}

template <class T>
FLASH_EXT_INLINE void store_row(void* to, DType dtype, const T* from, int64_t count) {
  switch (dtype) {
    case DType::kFloat16:
      store_half_row(static_cast<uint16_t*>(to), from, count);
      break;
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) {
        static_cast<uint16_t*>(to)[i] = float_to_bfloat16(static_cast<float>(from[i]));
      }
      break;
    default:  // the dtype that is computed in
      __builtin_memcpy(to, from, count * sizeof(T));
  }
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
