// Vectors of float32, by GCC's and Clang's extension, which both compile for whatever the machine
// has.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace razor_dist {

#ifdef __AVX512F__
constexpr int WIDTH = 16;
#else
constexpr int WIDTH = 8;
#endif
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef int8_t Bytes __attribute__((vector_size(WIDTH)));

template <class Vector, class T>
inline Vector read(const T* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

inline Floats load(const float* from) { return read<Floats>(from); }
inline Floats load(const int8_t* from) {
  // GCC 12 converts one number after the other, so that it takes ten times as long.
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)read<Bytes>(from)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  return __builtin_convertvector(read<Bytes>(from), Floats);
#endif
}
inline Floats load(const c10::BFloat16* from) {
  // bfloat16 is the upper half of a float32.
  Bits bits = __builtin_convertvector(read<Halves>(from), Bits) << 16;
  return read<Floats>(&bits);
}

typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));

template <class Half, class Vector>
inline Half folded(Vector vector) {
  Half halves[2];
  std::memcpy(halves, &vector, sizeof vector);
  return halves[0] + halves[1];
}

inline Four quarter(Eight vector) { return folded<Four>(vector); }
template <class Vector>
inline Four quarter(Vector vector) {
  return folded<Four>(folded<Eight>(vector));
}

inline float sum(Floats vector) {
  const Four four = quarter(vector);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// The sums of four vectors' numbers.
inline Four sums_of(Four a, Four b, Four c, Four d) {
  const Four ab =
      __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Four cd =
      __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// exp of WIDTH numbers that are at most 0, to 2 units in the last place; exp(-87) for all below.
// 2^n e^r with |r| <= ln 2 / 2, e^r by a polynomial (Cephes).
inline Floats exp_of_negative(Floats x) {
  const Floats zero = {};
  x = x < zero - 87.0f ? zero - 87.0f : x;                               // NaN stays
  const Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);  // rounded, as x <= 0
  const Floats whole = __builtin_convertvector(n, Floats);
  const Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats e = zero + 1.9875691500e-4f;
  e = e * r + 1.3981999507e-3f;
  e = e * r + 8.3334519073e-3f;
  e = e * r + 4.1665795894e-2f;
  e = e * r + 1.6666665459e-1f;
  e = e * r + 5.0000001201e-1f;
  e = e * r * r + r + 1.0f;
  const Ints power = (n + 127) << 23;
  return e * read<Floats>(&power);
}

}  // namespace razor_dist
