/* Sixteen outputs side by side, on whatever vectors the machine has.
 *
 * `Floats` and `Ints` hold one number for each of the 16 outputs of a panel, `Bytes` four codes for each. Every function
 * does the same operation on each lane with one rounding, so results are equal to the bit on all machines.
 */
#ifndef SLIP_LANES_H
#define SLIP_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
/* A tile is compiled for each kind and number of tokens where that is fast, and else once, for it takes minutes. */
#define ONCE static __attribute__((noinline))
#define FLOAT_TILE INLINE
/* Whether instructions multiply many bytes at once, so that fixed point is faster than float32. */
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)) || defined(__ARM_FEATURE_MATMUL_INT8)
#define HAS_BYTE_PRODUCTS 1
#define PLANE_TILE INLINE
#else
#define HAS_BYTE_PRODUCTS 0
#define PLANE_TILE ONCE
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>

typedef __m512 Floats;
typedef __m512i Ints;
typedef __m512i Bytes;

INLINE Floats floats_all(float x) { return _mm512_set1_ps(x); }
INLINE Floats floats_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void floats_store(float *p, Floats a) { _mm512_storeu_ps(p, a); }
INLINE Floats floats_mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats floats_fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats floats_from_half(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE Floats floats_from_u8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE Floats floats_from_s8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE Ints ints_zero(void) { return _mm512_setzero_si512(); }
INLINE Floats ints_to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
INLINE Ints ints_join(Ints high, Ints low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }
INLINE Bytes bytes_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
/* (a >> n) & mask, or (a << -n) & mask, in every byte; the mask keeps what comes from the byte itself. */
INLINE Bytes bytes_field(Bytes a, int n, int mask) {
    a = n > 0 ? _mm512_srli_epi16(a, n) : n < 0 ? _mm512_slli_epi16(a, -n) : a;
    return _mm512_and_si512(a, _mm512_set1_epi8((char)mask));
}
INLINE Bytes bytes_or(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
INLINE Bytes bytes_minus(Bytes a, int n) { return n ? _mm512_sub_epi8(a, _mm512_set1_epi8((char)n)) : a; }
/* The signed byte of each lane's four that belongs to input j. */
INLINE Floats bytes_to_floats(Bytes a, int j) {
    if (j < 3) a = _mm512_slli_epi32(a, 24 - 8 * j);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(a, 24));
}
/* Adds four products a lane: unsigned codes of so many bits times four signed digits, the same for all lanes. */
INLINE Ints ints_dot(int bits, Ints sum, Bytes codes, const int8_t *digits) {
    int32_t four;
    memcpy(&four, digits, 4);
    __m512i x = _mm512_set1_epi32(four);
    (void)bits;
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sum, codes, x);
#else
    /* Two products of 7 bits and 8 fit into 16 bits. */
    if (bits < 8) return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, x), _mm512_set1_epi16(1)));
    __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), odd = _mm512_srai_epi16(x, 8);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(255)), even));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_srli_epi16(codes, 8), odd));
#endif
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

typedef struct { __m256 a, b; } Floats;
typedef struct { __m256i a, b; } Ints;
typedef struct { __m256i a, b; } Bytes;

INLINE Floats floats_all(float x) { return (Floats){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Floats floats_load(const float *p) { return (Floats){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void floats_store(float *p, Floats x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
INLINE Floats floats_mul(Floats x, Floats y) { return (Floats){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE Floats floats_fma(Floats x, Floats y, Floats z) {
    return (Floats){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE Floats floats_from_half(const uint8_t *p) {
    return (Floats){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                    _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16)))};
}
INLINE Floats floats_from_u8(const uint8_t *p) {
    __m128i x = _mm_loadu_si128((const __m128i *)p);
    return (Floats){_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)),
                    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
INLINE Floats floats_from_s8(const uint8_t *p) {
    __m128i x = _mm_loadu_si128((const __m128i *)p);
    return (Floats){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
INLINE Ints ints_zero(void) { return (Ints){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE Floats ints_to_floats(Ints x) { return (Floats){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE Ints ints_join(Ints high, Ints low) {
    return (Ints){_mm256_add_epi32(_mm256_slli_epi32(high.a, 8), low.a),
                  _mm256_add_epi32(_mm256_slli_epi32(high.b, 8), low.b)};
}
INLINE Bytes bytes_load(const uint8_t *p) {
    return (Bytes){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
}
INLINE __m256i half_field(__m256i a, int n, int mask) {
    a = n > 0 ? _mm256_srli_epi16(a, n) : n < 0 ? _mm256_slli_epi16(a, -n) : a;
    return _mm256_and_si256(a, _mm256_set1_epi8((char)mask));
}
INLINE Bytes bytes_field(Bytes x, int n, int mask) { return (Bytes){half_field(x.a, n, mask), half_field(x.b, n, mask)}; }
INLINE Bytes bytes_or(Bytes x, Bytes y) { return (Bytes){_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
INLINE Bytes bytes_minus(Bytes x, int n) {
    __m256i y = _mm256_set1_epi8((char)n);
    return n ? (Bytes){_mm256_sub_epi8(x.a, y), _mm256_sub_epi8(x.b, y)} : x;
}
INLINE __m256 half_to_floats(__m256i a, int j) {
    if (j < 3) a = _mm256_slli_epi32(a, 24 - 8 * j);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(a, 24));
}
INLINE Floats bytes_to_floats(Bytes x, int j) { return (Floats){half_to_floats(x.a, j), half_to_floats(x.b, j)}; }
INLINE __m256i half_dot(int bits, __m256i sum, __m256i codes, __m256i x) {
    (void)bits;
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, codes, x);
#else
    if (bits < 8) return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd = _mm256_srai_epi16(x, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(255)), even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), odd));
#endif
}
INLINE Ints ints_dot(int bits, Ints sum, Bytes codes, const int8_t *digits) {
    int32_t four;
    memcpy(&four, digits, 4);
    __m256i x = _mm256_set1_epi32(four);
    return (Ints){half_dot(bits, sum.a, codes.a, x), half_dot(bits, sum.b, codes.b, x)};
}

#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>

typedef struct { float32x4_t v[4]; } Floats;
typedef struct { int32x4_t v[4]; } Ints;
typedef struct { uint8x16_t v[4]; } Bytes;
#define EACH _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)

INLINE Floats floats_all(float x) { Floats r; EACH r.v[i] = vdupq_n_f32(x); return r; }
INLINE Floats floats_load(const float *p) { Floats r; EACH r.v[i] = vld1q_f32(p + 4 * i); return r; }
INLINE void floats_store(float *p, Floats a) { EACH vst1q_f32(p + 4 * i, a.v[i]); }
INLINE Floats floats_mul(Floats a, Floats b) { EACH a.v[i] = vmulq_f32(a.v[i], b.v[i]); return a; }
INLINE Floats floats_fma(Floats a, Floats b, Floats c) { EACH c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]); return c; }
INLINE Floats floats_from_half(const uint8_t *p) {
    Floats r;
    EACH r.v[i] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i)));
    return r;
}
INLINE Ints ints_from_shorts(int16x8_t low, int16x8_t high) {
    return (Ints){{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
}
INLINE Floats ints_to_floats(Ints a) { Floats r; EACH r.v[i] = vcvtq_f32_s32(a.v[i]); return r; }
INLINE Floats floats_from_u8(const uint8_t *p) {
    uint8x16_t x = vld1q_u8(p);
    int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(x))), high = vreinterpretq_s16_u16(vmovl_high_u8(x));
    return ints_to_floats(ints_from_shorts(low, high));
}
INLINE Floats floats_from_s8(const uint8_t *p) {
    int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(p));
    return ints_to_floats(ints_from_shorts(vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x)));
}
INLINE Ints ints_zero(void) { Ints r; EACH r.v[i] = vdupq_n_s32(0); return r; }
INLINE Ints ints_join(Ints high, Ints low) { EACH low.v[i] = vaddq_s32(vshlq_n_s32(high.v[i], 8), low.v[i]); return low; }
INLINE Bytes bytes_load(const uint8_t *p) { Bytes r; EACH r.v[i] = vld1q_u8(p + 16 * i); return r; }
INLINE Bytes bytes_field(Bytes a, int n, int mask) {
    EACH a.v[i] = vandq_u8(vshlq_u8(a.v[i], vdupq_n_s8((int8_t)-n)), vdupq_n_u8((uint8_t)mask));
    return a;
}
INLINE Bytes bytes_or(Bytes a, Bytes b) { EACH a.v[i] = vorrq_u8(a.v[i], b.v[i]); return a; }
INLINE Bytes bytes_minus(Bytes a, int n) { EACH a.v[i] = vsubq_u8(a.v[i], vdupq_n_u8((uint8_t)n)); return a; }
INLINE Floats bytes_to_floats(Bytes a, int j) {
    Ints r;
    EACH r.v[i] = vshrq_n_s32(vshlq_s32(vreinterpretq_s32_u8(a.v[i]), vdupq_n_s32(24 - 8 * j)), 24);
    return ints_to_floats(r);
}
INLINE Ints ints_dot(int bits, Ints sum, Bytes codes, const int8_t *digits) {
    int32_t four;
    (void)bits;
    memcpy(&four, digits, 4);
    int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
#if defined(__ARM_FEATURE_MATMUL_INT8)
    EACH sum.v[i] = vusdotq_s32(sum.v[i], codes.v[i], x);
#else
    int16x8_t wide = vmovl_s8(vget_low_s8(x));
    EACH {
        int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(codes.v[i])));
        int16x8_t high = vreinterpretq_s16_u16(vmovl_high_u8(codes.v[i]));
        int32x4_t a = vpaddq_s32(vmull_s16(vget_low_s16(low), vget_low_s16(wide)), vmull_high_s16(low, wide));
        int32x4_t b = vpaddq_s32(vmull_s16(vget_low_s16(high), vget_low_s16(wide)), vmull_high_s16(high, wide));
        sum.v[i] = vaddq_s32(sum.v[i], vpaddq_s32(a, b));
    }
#endif
    return sum;
}

#else /* Plain C, in loops that compilers may vectorise. */

#undef FLOAT_TILE
#define FLOAT_TILE ONCE

typedef struct { float v[16]; } Floats;
typedef struct { int32_t v[16]; } Ints;
typedef struct { uint8_t v[64]; } Bytes;
#define EACH(n) _Pragma("omp simd") for (int i = 0; i < (n); i++)

INLINE float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    union { uint32_t bits; float value; } x = {rest << 13}, scale = {0x77800000}; /* 2^112 moves the exponent's bias */
    x.value *= scale.value;
    if (rest >= 0x7c00) x.bits |= 0x7f800000;
    x.bits |= sign;
    return x.value;
}
INLINE Floats floats_all(float x) { Floats r; EACH(16) r.v[i] = x; return r; }
INLINE Floats floats_load(const float *p) { Floats r; memcpy(&r, p, sizeof r); return r; }
INLINE void floats_store(float *p, Floats a) { memcpy(p, &a, sizeof a); }
INLINE Floats floats_mul(Floats a, Floats b) { EACH(16) a.v[i] *= b.v[i]; return a; }
INLINE Floats floats_fma(Floats a, Floats b, Floats c) { EACH(16) c.v[i] = fmaf(a.v[i], b.v[i], c.v[i]); return c; }
INLINE Floats floats_from_half(const uint8_t *p) {
    Floats r;
    uint16_t half[16];
    memcpy(half, p, sizeof half);
    EACH(16) r.v[i] = half_to_float(half[i]);
    return r;
}
INLINE Floats floats_from_u8(const uint8_t *p) { Floats r; EACH(16) r.v[i] = p[i]; return r; }
INLINE Floats floats_from_s8(const uint8_t *p) { Floats r; EACH(16) r.v[i] = (int8_t)p[i]; return r; }
INLINE Ints ints_zero(void) { return (Ints){{0}}; }
INLINE Floats ints_to_floats(Ints a) { Floats r; EACH(16) r.v[i] = (float)a.v[i]; return r; }
INLINE Ints ints_join(Ints high, Ints low) { EACH(16) low.v[i] += high.v[i] * 256; return low; }
INLINE Bytes bytes_load(const uint8_t *p) { Bytes r; memcpy(&r, p, sizeof r); return r; }
INLINE Bytes bytes_field(Bytes a, int n, int mask) {
    EACH(64) a.v[i] = (uint8_t)((n > 0 ? a.v[i] >> n : a.v[i] << -n) & mask);
    return a;
}
INLINE Bytes bytes_or(Bytes a, Bytes b) { EACH(64) a.v[i] |= b.v[i]; return a; }
INLINE Bytes bytes_minus(Bytes a, int n) { EACH(64) a.v[i] = (uint8_t)(a.v[i] - n); return a; }
INLINE Floats bytes_to_floats(Bytes a, int j) { Floats r; EACH(16) r.v[i] = (int8_t)a.v[4 * i + j]; return r; }
INLINE Ints ints_dot(int bits, Ints sum, Bytes codes, const int8_t *digits) {
    (void)bits;
    for (int j = 0; j < 4; j++) EACH(16) sum.v[i] += codes.v[4 * i + j] * digits[j];
    return sum;
}
#endif

#endif
