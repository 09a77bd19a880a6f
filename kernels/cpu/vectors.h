// Vectors of float32, by GCC's and Clang's extension, which both compile for whatever the machine
// has.
#pragma once

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace razor_dist {

#ifdef __AVX512F__
constexpr int WIDTH = 16;
#else
constexpr int WIDTH = 8;
#endif
// Least numbers that are worth a thread of their own.
constexpr int64_t GRAIN = 1 << 14;
// The score of a key that is not seen, and the lse of a query that sees no key.
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef int16_t Shorts __attribute__((vector_size(2 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
typedef uint8_t Unsigned __attribute__((vector_size(WIDTH)));

template <class Vector, class T>
inline Vector read(const T* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// 8-bit integers to 32 bits. GCC 12 converts one number after the other, so that it takes ten times
// as long.
inline Ints integers_of(const int8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32((__m128i)read<Bytes>(from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return __builtin_convertvector(read<Bytes>(from), Ints);
#endif
}

inline Ints integers_of(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32((__m128i)read<Bytes>(from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return __builtin_convertvector(read<Unsigned>(from), Ints);
#endif
}

// The same of 2 WIDTH integers to 16 bits, two in one place.
inline Ints pairs_of(const int8_t* from) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
#else
  int16_t pairs[2 * WIDTH];
  for (int i = 0; i < 2 * WIDTH; ++i) pairs[i] = from[i];
  return read<Ints>(pairs);
#endif
}

// sum + a_low b_low + a_high b_high of pairs of 16-bit integers
inline Ints add_pairs(Ints sum, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// a b + c, with one rounding where the machine has such an instruction. Compilers must not choose
// that themselves (-ffp-contract=off): GCC leaves it out of some loops of the same template, for
// Zen's sake, so that a row's product would depend on how many rows are multiplied with it.
inline float fused(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (int i = 0; i < WIDTH; ++i) c[i] = fused(a[i], b[i], c[i]);
  return c;
#endif
}

// A number in every place. It is not added to zero, which would be an instruction for the sake of
// -0.
inline Floats all(float number) { return number - Floats{}; }

inline Floats load(const float* from) { return read<Floats>(from); }
inline Floats load(const int8_t* from) {
  return __builtin_convertvector(integers_of(from), Floats);
}
inline Floats load(const c10::BFloat16* from) {
  // bfloat16 is the upper half of a float32.
  Bits bits = __builtin_convertvector(read<Halves>(from), Bits) << 16;
  return read<Floats>(&bits);
}

// Numbers in one T: a byte has two of 4 bits, for dimensions 2 d and 2 d + 1. The other operand has
// all even dimensions first (`transform`), so that a vector of bytes is two vectors of adjacent
// numbers.
template <class T>
constexpr int PARTS = std::is_same_v<T, uint8_t> ? 2 : 1;

// The code in the lower or upper half of a byte, which stands for 2 (code - ZERO).
constexpr float ZERO = 7.5f;
inline int code_of(uint8_t codes, int part) { return codes >> 4 * part & 15; }

// WIDTH of each part; codes of 4 bits as they are, for sums can be put right at once.
template <class T>
inline void load_parts(const T* from, Floats (&to)[PARTS<T>]) {
  if constexpr (PARTS<T> == 1) {
    to[0] = load(from);
  } else {
    const Ints codes = integers_of(from);
    to[0] = __builtin_convertvector(codes & 15, Floats);
    to[1] = __builtin_convertvector(codes >> 4, Floats);
  }
}
template <class T>
inline float load_part(T from, int part) {
  if constexpr (PARTS<T> == 1)
    return static_cast<float>(from);
  else
    return code_of(from, part);
}

// The numbers of a row of `dim` codes, in 8 bits.
inline void widen(const uint8_t* from, int64_t dim, int8_t* to) {
  for (int64_t d = 0; d < dim / 2; ++d)
    for (int part = 0; part < 2; ++part) to[2 * d + part] = 2 * code_of(from[d], part) - 15;
}

template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T>
using Four = typename VectorOf<T, 4>::type;
template <class Vector>
using NumberOf = std::decay_t<decltype(Vector{}[0])>;

// The sums of a vector's numbers at i, i + 4, i + 8, ...
template <class Vector>
inline Four<NumberOf<Vector>> quarter(Vector vector) {
  constexpr int HALF = sizeof(Vector) / sizeof(NumberOf<Vector>) / 2;
  using Half = typename VectorOf<NumberOf<Vector>, HALF>::type;
  Half halves[2];
  std::memcpy(halves, &vector, sizeof vector);
  const Half folded = halves[0] + halves[1];
  if constexpr (HALF == 4)
    return folded;
  else
    return quarter(folded);
}

inline float sum(Floats vector) {
  const Four<float> four = quarter(vector);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float sum_of(const float* from, int64_t count) {
  Floats total = {};
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) total += load(from + i);
  float found = sum(total);
  for (; i < count; ++i) found += from[i];
  return found;
}

// The sums of four vectors' numbers.
template <class V>
inline V sums_of(V a, V b, V c, V d) {
  const V ab =
      __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const V cd =
      __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// For j without bit STEP: a[j | FROM], else b[(j without STEP) | FROM].
template <int STEP, int FROM>
inline Floats interleave(Floats a, Floats b) {
  return [&]<int... J>(std::integer_sequence<int, J...>) {
    return __builtin_shufflevector(a, b, (((J & ~STEP) | FROM) + (J & STEP ? WIDTH : 0))...);
  }(std::make_integer_sequence<int, WIDTH>());
}

inline float largest_of(Floats vector) {
  float halves[WIDTH];
  std::memcpy(halves, &vector, sizeof vector);
  for (int half = WIDTH / 2; half; half /= 2)
    for (int i = 0; i < half; ++i)
      halves[i] = halves[i] > halves[half + i] ? halves[i] : halves[half + i];
  return halves[0];
}

constexpr float LOG2_E = 1.44269504f;

// 2^x of WIDTH numbers that are at most 0, to 2 units in the last place; 0 where it would be less
// than 2^-126: products with numbers so small take an Intel core a hundred times as long.
// 2^n 2^f with |f| <= 1/2, 2^f by a polynomial (Cephes).
inline Floats exp2_of_negative(Floats x) {
  const Floats zero = {};
  x = x < zero - 126.0f ? zero - 127.0f : x;               // NaN stays
  const Ints n = __builtin_convertvector(x - 0.5f, Ints);  // rounded, as x <= 0
  const Floats f = x - __builtin_convertvector(n, Floats);
  Floats e = zero + 1.535336188319500e-4f;
  e = fused(e, f, zero + 1.339887440266574e-3f);
  e = fused(e, f, zero + 9.618437357674640e-3f);
  e = fused(e, f, zero + 5.550332471162809e-2f);
  e = fused(e, f, zero + 2.402264791363012e-1f);
  e = fused(e, f, zero + 6.931472028550421e-1f);
  e = fused(e, f, zero + 1.0f);
  const Ints power = (n + 127) << 23;
  return e * read<Floats>(&power);
}

// Make columns of rows, in place. Rows are exchanged by halves, quarters, ... of the square: after
// the step of s, row i has at j what was in row i with bit s of i taken from j.
inline void transpose(Floats (&rows)[WIDTH]) {
  [&]<int... S>(std::integer_sequence<int, S...>) {
    (
        [&] {
          constexpr int STEP = WIDTH / 2 >> S;
          for (int i = 0; i < WIDTH; ++i) {
            if (i & STEP) continue;
            const Floats a = rows[i], b = rows[i + STEP];
            rows[i] = interleave<STEP, 0>(a, b);
            rows[i + STEP] = interleave<STEP, STEP>(a, b);
          }
        }(),
        ...);
  }(std::make_integer_sequence<int, WIDTH == 16 ? 4 : 3>());
}

// The largest of `count` numbers, a multiple of WIDTH.
inline float largest_of(const float* from, int64_t count) {
  Floats most = load(from);
  for (int64_t i = WIDTH; i < count; i += WIDTH) {
    const Floats next = load(from + i);
    most = next > most ? next : most;
  }
  return largest_of(most);
}

// The largest size of some numbers, at least `least`; NaN if one is NaN or infinite.
inline float largest_size(const float* from, int64_t count, float least) {
  Floats most = Floats{} + least, nothing = {};
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) {
    const Floats x = load(from + i), size = x < 0 ? -x : x;
    most = size > most ? size : most;
    nothing += x * 0;
  }
  float largest = largest_of(most), none = sum(nothing);
  for (; i < count; ++i) {
    largest = from[i] < -largest ? -from[i] : from[i] > largest ? from[i] : largest;
    none += from[i] * 0;
  }
  return largest + none;
}

// To the nearest whole number, of two the even one; below 2^22.
template <class Number>
inline Number rounded(Number x) {
  constexpr float TO_WHOLE = 12582912;  // float32 from here to its double has no fractions
  return (x + TO_WHOLE) - TO_WHOLE;
}

// to = from / step + zero, rounded to whole numbers of T
template <class T>
inline void round_by(const float* from, int64_t count, float step, float zero, T* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(rounded(from[i] / step) + zero);
}

// razor_dist.kernels.quantized.hadamard, in place.
inline void hadamard(float* x, int64_t dim) {
  const int64_t block = dim & -dim;
  for (int64_t half = 1; half < block; half *= 2) {
    for (int64_t i = 0; i < dim; i += 2 * half) {
      for (int64_t j = i; j < i + half; ++j) {
        const float a = x[j], b = x[j + half];
        x[j] = a + b, x[j + half] = a - b;
      }
    }
  }
}

// A query becomes its transform, its even dimensions first.
inline void transform(float* x, int64_t dim) {
  hadamard(x, dim);
  std::vector<float> odd(dim / 2);
  for (int64_t d = 0; d < dim / 2; ++d) odd[d] = x[2 * d + 1], x[d] = x[2 * d];
  std::copy(odd.begin(), odd.end(), x + dim / 2);
}

// The inverse for a result, which has its even dimensions first.
inline void transform_back(float* x, int64_t dim) {
  const std::vector<float> halves(x, x + dim);
  for (int64_t d = 0; d < dim; ++d) x[d] = halves[d / 2 + d % 2 * (dim / 2)];
  hadamard(x, dim);
}

// x becomes its transform, `to` its levels of 4 bits; return their scale.
inline float round_to_4_bits(float* x, int64_t dim, uint8_t* to) {
  hadamard(x, dim);
  const float scale = largest_size(x, dim, 0) / 15;
  const float step = std::max(2 * scale, std::numeric_limits<float>::min());
  auto code = [&](float number) { return static_cast<uint8_t>(rounded(number / step - 0.5f) + 8); };
  for (int64_t d = 0; d < dim / 2; ++d) to[d] = code(x[2 * d]) | code(x[2 * d + 1]) << 4;
  return scale / (dim & -dim);
}

// to = from / step, rounded, for the least step that 16 bits allow; return it, NaN if a number is
// NaN or infinite. `count` is a multiple of WIDTH.
inline float round_to_16_bits(const float* from, int64_t count, int16_t* to) {
  const float largest = largest_size(from, count, 1e-30f), by = 32767 / largest;
  for (int64_t i = 0; i < count; i += WIDTH) {
    const Ints whole = __builtin_convertvector(rounded(load(from + i) * by), Ints);
    const Shorts codes = __builtin_convertvector(whole, Shorts);
    std::memcpy(to + i, &codes, sizeof codes);
  }
  return largest / 32767;
}

}  // namespace razor_dist
