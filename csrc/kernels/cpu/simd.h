// Vectors of the instruction set that this translation unit is compiled for.
//
// Arithmetic is written with the compiler's vector extension, so that one text serves every instruction set. All code
// of the kernels lives in a namespace named after the set, and none of it uses a standard-library template: the linker
// merges copies of one, and the copy that it keeps might hold instructions that the machine lacks.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AMX_BF16__)
#define FLASH_EXT_ISA amx
#elif defined(__AVX512F__)
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

FLASH_EXT_INLINE void prefetch_row(const char* row, int64_t bytes) {
  constexpr int64_t kCacheLine = 64;
  for (int64_t b = 0; b < bytes; b += kCacheLine) __builtin_prefetch(row + b);
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

// vector_max is a > b ? a : b, and vector_min is a < b ? a : b, so both give b where a or b is NaN. x86 has an
// instruction for each. Compilers do not find it, since it is neither IEEE's maximum nor the C library's.
#if defined(__AVX512F__)
FLASH_EXT_INLINE Vec<float> vector_max(Vec<float> a, Vec<float> b) { return _mm512_max_ps(a, b); }
FLASH_EXT_INLINE Vec<float> vector_min(Vec<float> a, Vec<float> b) { return _mm512_min_ps(a, b); }
FLASH_EXT_INLINE Vec<double> vector_max(Vec<double> a, Vec<double> b) { return _mm512_max_pd(a, b); }
FLASH_EXT_INLINE Vec<double> vector_min(Vec<double> a, Vec<double> b) { return _mm512_min_pd(a, b); }
#elif defined(__AVX2__)
FLASH_EXT_INLINE Vec<float> vector_max(Vec<float> a, Vec<float> b) { return _mm256_max_ps(a, b); }
FLASH_EXT_INLINE Vec<float> vector_min(Vec<float> a, Vec<float> b) { return _mm256_min_ps(a, b); }
FLASH_EXT_INLINE Vec<double> vector_max(Vec<double> a, Vec<double> b) { return _mm256_max_pd(a, b); }
FLASH_EXT_INLINE Vec<double> vector_min(Vec<double> a, Vec<double> b) { return _mm256_min_pd(a, b); }
#else
template <class V>
FLASH_EXT_INLINE V vector_max(V a, V b) {
  return a > b ? a : b;
}
template <class V>
FLASH_EXT_INLINE V vector_min(V a, V b) {
  return a < b ? a : b;
}
#endif

template <class V>
FLASH_EXT_INLINE bool any(V mask) {
  decltype(mask[0] + 0) bits = 0;
  for (unsigned l = 0; l < sizeof(V) / sizeof(mask[0]); ++l) bits |= mask[l];
  return bits != 0;
}

/// The sum of a vector in memory, by halves.
template <class T, int kBytes>
FLASH_EXT_INLINE T sum_of_bytes(const void* vector) {
  if constexpr (kBytes > 16) {
    typedef T Half __attribute__((vector_size(kBytes / 2)));
    Half half[2];
    __builtin_memcpy(half, vector, sizeof(half));
    half[0] += half[1];
    return sum_of_bytes<T, kBytes / 2>(half);
  } else {
    T lane[kBytes / sizeof(T)];
    __builtin_memcpy(lane, vector, sizeof(lane));
    T sum = lane[0];
    for (unsigned l = 1; l < kBytes / sizeof(T); ++l) sum += lane[l];
    return sum;
  }
}

/// The sum of all lanes.
template <class T>
FLASH_EXT_INLINE T horizontal_sum(const Vec<T>& v) {
  return sum_of_bytes<T, sizeof(v)>(&v);
}

/// e^r on [-ln 2 / 2, ln 2 / 2], a polynomial through the Chebyshev nodes of the relative error: 3e-9 (float), 6e-20
/// (double); exactly 1 at 0.
FLASH_EXT_INLINE Vec<float> exp_of_rest(Vec<float> r) {
  Vec<float> y = 0.0013941108433972674608f * r + 0.008375126398153335682f;
  y = y * r + 0.041666352896775156786f;
  y = y * r + 0.16666415514653275427f;
  y = y * r + 0.50000000471177576744f;
  y = y * r + 1.0000000377162138425f;
  return y * r + 1.0f;
}

FLASH_EXT_INLINE Vec<double> exp_of_rest(Vec<double> r) {
  Vec<double> y = 2.0921579964950300073e-9 * r + 2.5114869528657764941e-8;
  y = y * r + 2.7557251904174912593e-7;
  y = y * r + 2.7557224958392622686e-6;
  y = y * r + 0.00002480158735011079562;
  y = y * r + 0.00019841269909217101366;
  y = y * r + 0.001388888888887188822;
  y = y * r + 0.0083333333333095270794;
  y = y * r + 0.041666666666666692193;
  y = y * r + 0.16666666666666702412;
  y = y * r + 0.49999999999999999989;
  y = y * r + 0.99999999999999999847;
  return y * r + 1.0;
}

/// e^x: 0 below the normal numbers, inf from the last half octave on (2^127.5 in float), NaN for NaN.
template <class T>
FLASH_EXT_INLINE Vec<T> exp(Vec<T> x) {
  constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52;
  constexpr int kExponentBias = sizeof(T) == 4 ? 127 : 1023;
  // Adding this leaves n + kExponentBias in the low bits of the sum, n = round(x / ln 2).
  constexpr T kRound = static_cast<T>(1.5) * static_cast<T>(int64_t{1} << kMantissa) + kExponentBias;
  constexpr T kInverse = static_cast<T>(1 / kLn2);
  // ln 2 in two parts, the first with so few bits that n times it is exact (Cody and Waite 1980).
  constexpr T kHigh = static_cast<T>(sizeof(T) == 4 ? 0.693359375 : 0.693145751953125);
  constexpr T kRest = static_cast<T>(sizeof(T) == 4 ? -2.12194440054690583e-4 : 1.42860682030941723212e-6);
  constexpr T kSmallest = static_cast<T>(-(kExponentBias + 0.1) * kLn2),
              kLargest = static_cast<T>((kExponentBias + 1) * kLn2);
  x = vector_min(broadcast<T>(kLargest), vector_max(broadcast<T>(kSmallest), x));
  const Vec<T> sum = x * kInverse + kRound;
  const Vec<T> n = sum - kRound;
  const IntVec<T> power = bit_cast<IntVec<T>>(sum) << kMantissa;
  return exp_of_rest(x - n * kHigh - n * kRest) * bit_cast<Vec<T>>(power);
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
