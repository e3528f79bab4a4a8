// Vectors of the instruction set that this translation unit is compiled for.
//
// Arithmetic is written with the compiler's vector extension, so that one text serves every instruction set. All code
// of the kernels lives in a namespace named after the set, and none of it uses a standard-library template: a merged
// copy of one might hold instructions that the machine lacks.
#pragma once

#include <cstdint>

#if defined(__AVX512F__)
#define FLASH_EXT_ISA avx512
#elif defined(__AVX2__)
#define FLASH_EXT_ISA avx2
#else
#define FLASH_EXT_ISA baseline
#endif

#define FLASH_EXT_INLINE inline __attribute__((always_inline))

namespace flash_ext::cpu::FLASH_EXT_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kVectorRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kVectorRegisters = 16;
#else
constexpr int kVectorBytes = 16;
#if defined(__aarch64__)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif
#endif

constexpr float kInfinity = __builtin_inff();
constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

template <class T>
FLASH_EXT_INLINE constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
FLASH_EXT_INLINE constexpr T max(T a, T b) {
  return a < b ? b : a;
}
FLASH_EXT_INLINE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FLASH_EXT_INLINE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

FLASH_EXT_INLINE float exp(float x) { return __builtin_expf(x); }
FLASH_EXT_INLINE double exp(double x) { return __builtin_exp(x); }
FLASH_EXT_INLINE float log(float x) { return __builtin_logf(x); }
FLASH_EXT_INLINE double log(double x) { return __builtin_log(x); }

template <class To, class From>
FLASH_EXT_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <class T>
struct VectorTypes;

template <>
struct VectorTypes<float> {
  using Int = int32_t;
  typedef float Vec __attribute__((vector_size(kVectorBytes)));
  typedef int32_t IntVec __attribute__((vector_size(kVectorBytes)));
};

template <>
struct VectorTypes<double> {
  using Int = int64_t;
  typedef double Vec __attribute__((vector_size(kVectorBytes)));
  typedef int64_t IntVec __attribute__((vector_size(kVectorBytes)));
};

template <class T>
using Vec = typename VectorTypes<T>::Vec;
template <class T>
using IntVec = typename VectorTypes<T>::IntVec;

/// The register tile of a product: kRows x kCols vectors of accumulators; kPanel scores of neighbouring queries.
template <class T>
struct Shape {
  static constexpr int kLanes = kVectorBytes / sizeof(T);
  static constexpr int kCols = 2 * kLanes < 8 ? 4 : 2;  // a panel holds at least the 8 queries of a dropout group
  static constexpr int kRows = (kVectorRegisters - kCols - 1) / kCols;
  static constexpr int kPanel = kCols * kLanes;
};

template <class T>
FLASH_EXT_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

template <class T, class V>
FLASH_EXT_INLINE void store(T* p, const V& v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

template <class T>
FLASH_EXT_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

/// max that takes b where either is NaN.
template <class V>
FLASH_EXT_INLINE V vector_max(V a, V b) {
  return a > b ? a : b;
}

template <class V>
FLASH_EXT_INLINE bool any(V mask) {
  decltype(mask[0] + 0) bits = 0;
  for (unsigned l = 0; l < sizeof(V) / sizeof(mask[0]); ++l) bits |= mask[l];
  return bits != 0;
}

/// 2^f on [-1/2, 1/2], a polynomial through the Chebyshev nodes of the relative error: 3e-9 (float), 6e-20 (double);
/// exactly 1 at 0.
FLASH_EXT_INLINE Vec<float> exp2_fraction(Vec<float> f) {
  Vec<float> y = 0.00015461444698569129083f * f + 0.001340042817761583794f;
  y = y * f + 0.0096180566785246380754f;
  y = y * f + 0.055503272266703020589f;
  y = y * f + 0.24022650922288758071f;
  y = y * f + 0.69314720670283259577f;
  return y * f + 1.0f;
}

FLASH_EXT_INLINE Vec<double> exp2_fraction(Vec<double> f) {
  Vec<double> y = 2.5733568308756891235e-11 * f + 4.4566753410492058782e-10;
  y = y * f + 7.0548943863483480445e-9;
  y = y * f + 1.017805119296064896e-7;
  y = y * f + 1.3215486815999976975e-6;
  y = y * f + 0.000015252733856293466416;
  y = y * f + 0.00015403530393362755291;
  y = y * f + 0.0013333558146390352775;
  y = y * f + 0.0096181291076284830543;
  y = y * f + 0.055504108664821698992;
  y = y * f + 0.24022650695910071228;
  y = y * f + 0.69314718055994530835;
  return y * f + 1.0;
}

/// e^x: 0 below the normal numbers, inf above them, NaN for NaN.
template <class T>
FLASH_EXT_INLINE Vec<T> exp(Vec<T> x) {
  constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52;
  constexpr int kBias = sizeof(T) == 4 ? 127 : 1023;
  // Adding this leaves round(x log2 e) + kBias in the low bits of the sum.
  constexpr T kRound = static_cast<T>(1.5) * static_cast<T>(int64_t{1} << kMantissa) + kBias;
  // log2 e in two parts: its rounding error would grow with |x|.
  constexpr T kScale = static_cast<T>(kLog2E);
  constexpr T kScaleRest = static_cast<T>(sizeof(T) == 4 ? 1.9259629911266174681e-8 : 2.035527374093103205e-17);
  constexpr T kLow = static_cast<T>(-(kBias + 0.1) * kLn2), kHigh = static_cast<T>((kBias + 1) * kLn2);
  x = kLow > x ? broadcast<T>(kLow) : x;
  x = x > kHigh ? broadcast<T>(kHigh) : x;
  const Vec<T> sum = x * kScale + kRound;
  const IntVec<T> power = bit_cast<IntVec<T>>(sum) << kMantissa;
  const Vec<T> fraction = x * kScaleRest + (x * kScale - (sum - kRound));
  return exp2_fraction(fraction) * bit_cast<Vec<T>>(power);
}

/// tanh, accurate for small x too (rational part: Cephes, tanh.c).
template <class T>
FLASH_EXT_INLINE Vec<T> tanh(Vec<T> x) {
  const Vec<T> z = x * x;
  const Vec<T> p = (T(-0.964399179425052238628) * z + T(-99.2877231001918586564)) * z + T(-1614.68768441708447952);
  const Vec<T> q = ((z + T(112.811678491632931402)) * z + T(2235.48839060100448583)) * z + T(4844.06305325125486048);
  const Vec<T> small = x + x * z * p / q;
  const Vec<T> magnitude = x < T(0) ? -x : x;
  const Vec<T> large = T(1) - T(2) / (exp<T>(magnitude * T(2)) + T(1));
  return magnitude < T(0.625) ? small : (x < T(0) ? -large : large);
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
