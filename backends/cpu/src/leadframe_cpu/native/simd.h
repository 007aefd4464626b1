// Vectors of the width that the machine has, over GCC's vector extensions.
//
// One source serves AVX-512, AVX2 and 128-bit machines. Products are fused only where `fma` says
// so: the library is compiled with -ffp-contract=off, so that a sum is the same in every kernel.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace lf {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats a vector
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LF_AVX2 1
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;   // rows of a register tile
#elif defined(__aarch64__)
constexpr int MAX_ROWS = 8;
#else
constexpr int MAX_ROWS = 6;
#endif
constexpr int PANEL_VECTORS = (W == 4) ? 3 : 2;
constexpr int PANEL = PANEL_VECTORS * W;  // outputs of a weight panel

typedef float vf __attribute__((vector_size(W * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(W * 4), may_alias));
typedef uint32_t vu __attribute__((vector_size(W * 4), may_alias));
typedef float vf_any __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t vi_any __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef int8_t vb_any __attribute__((vector_size(W), aligned(1), may_alias));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Not `vf{} + x`: that is an addition, because it turns -0 into 0.
inline vf splat(float x) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(x);
#elif defined(LF_AVX2)
  return (vf)_mm256_set1_ps(x);
#else
  return vf{x, x, x, x};
#endif
}
inline vi splat_int(int32_t x) { return vi{} + x; }

inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(LF_AVX2)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline vf load(const float* p) { return *(const vf_any*)p; }
inline vi load_int(const void* p) { return *(const vi_any*)p; }
inline void store(float* p, vf x) { *(vf_any*)p = x; }

inline vf load(const bf16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(LF_AVX2)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  return (vf)(__builtin_convertvector(*(const vh_any*)p, vu) << 16);
#endif
}

inline void store(bf16* p, vf x) {
  vu bits = (vu)x;  // to nearest, ties to even; a NaN stays a NaN
  vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  vu quiet = (bits >> 16) | 0x40u;
  vu chosen = (vu)((x == x) ? (vi)rounded : (vi)quiet);
  *(vh_any*)p = __builtin_convertvector(chosen, vh_any);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline float to_float(f16 x) {
  uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31;
  uint32_t fraction = x.bits & 1023, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (fraction << 13);
  } else if (exponent) {
    bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  } else {  // zero or subnormal: exact as a product
    float magnitude = (float)fraction * 5.9604644775390625e-8f;
    std::memcpy(&bits, &magnitude, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline vf load(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(LF_AVX2)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vf r;
  for (int i = 0; i < W; i++) r[i] = to_float(p[i]);
  return r;
#endif
}

inline vf load(const int8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(LF_AVX2)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  return __builtin_convertvector(__builtin_convertvector(*(const vb_any*)p, vi), vf);
#endif
}

template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return bf16{(uint16_t)((bits >> 16) | 0x40)};
  return bf16{(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline vf max(vf a, vf b) { return (a > b) ? a : b; }
inline vf min(vf a, vf b) { return (a < b) ? a : b; }

inline float sum(vf x) {
  float parts[W];
  store(parts, x);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
}

inline float max_of(vf x) {
  float parts[W];
  store(parts, x);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) parts[i] = parts[i] > parts[i + half] ? parts[i] : parts[i + half];
  return parts[0];
}

// e^x to about one unit in the last place; 0 below -87.3, and a NaN stays one.
// Source: Cephes expf, the polynomial.
inline vf exp(vf x) {
  const vf low = splat(-87.3365448f), high = splat(88.3762626f);
  vi vanishes = x < low;
  x = (x > high) ? high : x;
  x = vanishes ? low : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  vf shifted = fma(x, splat(1.44269504f), splat(magic));
  vf n = shifted - magic;
  vf r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  vf y = fma(p, r * r, r + 1.0f);
  vi exponent = ((vi)shifted - (vi)splat(magic) + 127) << 23;
  return vanishes ? vf{} : y * (vf)exponent;
}

// tanh as 1 - 2 / (e^2x + 1); exact limits for large |x|, about 1e-7 absolute elsewhere.
inline vf tanh(vf x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

// Interleaves the low (HIGH 0) or high (HIGH 1) halves of two vectors.
template <int HIGH, size_t... I>
inline vf zip(vf a, vf b, std::index_sequence<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (I % 2 * W + HIGH * W / 2 + I / 2)...);
#else
  return __builtin_shuffle(a, b, vi{(int)(I % 2 * W + HIGH * W / 2 + I / 2)...});
#endif
}

// Transposes a square of W vectors: log2(W) perfect shuffles of the rows.
inline void transpose(vf (&x)[W]) {
  constexpr auto lanes = std::make_index_sequence<W>();
  for (int round = 1; round < W; round *= 2) {
    vf y[W];
    for (int i = 0; i < W / 2; i++) {
      y[2 * i] = zip<0>(x[i], x[i + W / 2], lanes);
      y[2 * i + 1] = zip<1>(x[i], x[i + W / 2], lanes);
    }
    for (int i = 0; i < W; i++) x[i] = y[i];
  }
}

}  // namespace lf
