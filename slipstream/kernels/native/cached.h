/* Numbers of a cache of keys and values: float32, or 16 bits that are widened as they are read.
 *
 * Functions take the kind of number as their last argument. Callers are compiled once for each kind, with the kind as a
 * constant, so that no value is read through a branch.
 */
#ifndef SLIP_CACHED_H
#define SLIP_CACHED_H

#include "vectors.h"

enum { CACHED_FLOAT32, CACHED_FLOAT16, CACHED_BFLOAT16 }; /* order of kernels/native/records.py */

#define CACHED static inline __attribute__((always_inline))

typedef int32_t int_vec __attribute__((vector_size(LANES * 4)));
typedef uint16_t short_vec __attribute__((vector_size(LANES * 2)));

CACHED int64_t cached_bytes(int kind) { return kind == CACHED_FLOAT32 ? 4 : 2; }

CACHED const char *cached_at(const char *numbers, int64_t i, int kind) { return numbers + i * cached_bytes(kind); }

CACHED vec widen_half(const char *p) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif LANES == 8 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif LANES == 4 && defined(__aarch64__)
    float16x4_t half;
    memcpy(&half, p, sizeof half);
    return (vec)vcvt_f32_f16(half);
#else
    short_vec half;
    memcpy(&half, p, sizeof half);
    int_vec bits = __builtin_convertvector(half, int_vec), rest = (bits & 0x7fff) << 13;
    /* 2^112 moves the exponent's bias, and makes normal numbers of those that are not. */
    int_vec moved = (int_vec)((vec)rest * 0x1p112f);
    return (vec)(moved | ((rest >= (0x7c00 << 13)) & 0x7f800000) | (bits & 0x8000) << 16);
#endif
}

CACHED vec widen_bfloat(const char *p) {
    short_vec half;
    memcpy(&half, p, sizeof half);
    return (vec)(__builtin_convertvector(half, int_vec) << 16);
}

/* As many numbers as a vector holds. */
CACHED vec cached_vec(const char *p, int kind) {
    return kind == CACHED_FLOAT32 ? *(const vec *)p : kind == CACHED_FLOAT16 ? widen_half(p) : widen_bfloat(p);
}

CACHED float cached_number(const char *p, int kind) {
    union { uint32_t bits; float value; } x;
    if (kind == CACHED_FLOAT32) return *(const float *)p;
    uint32_t half = *(const uint16_t *)p;
    if (kind == CACHED_BFLOAT16) {
        x.bits = half << 16;
        return x.value;
    }
    uint32_t rest = (half & 0x7fff) << 13;
    x.bits = rest;
    x.value *= 0x1p112f;
    if (rest >= 0x7c00 << 13) x.bits |= 0x7f800000;
    x.bits |= (half & 0x8000) << 16;
    return x.value;
}

/* Rounded to the nearest, to the even one of two; too large for 16 bits is infinite, and what is not a number stays so. */
CACHED uint16_t narrow_half(float value) {
    union { uint32_t bits; float value; } x = {.value = value}, small;
    uint32_t sign = x.bits >> 16 & 0x8000, rest = x.bits & 0x7fffffff;
    small.bits = rest;
    small.value += 0.5f; /* whose last bit is the last of the small numbers that float16 has */
    uint32_t normal = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
    uint32_t half = rest < 0x38800000 ? small.bits - 0x3f000000 : rest < 0x47800000 ? normal : 0x7c00;
    return (uint16_t)(sign | (rest > 0x7f800000 ? 0x7e00 : half));
}

CACHED uint16_t narrow_bfloat(float value) {
    union { uint32_t bits; float value; } x = {.value = value};
    uint32_t rounded = (x.bits + 0x7fff + (x.bits >> 16 & 1)) >> 16;
    return (uint16_t)((x.bits & 0x7fffffff) > 0x7f800000 ? x.bits >> 16 | 0x40 : rounded);
}

CACHED void cached_store(char *to, const float *x, int64_t n, int kind) {
    uint16_t *half = (uint16_t *)to;
    if (kind == CACHED_FLOAT32) {
        memcpy(to, x, (size_t)n * sizeof(float));
    } else if (kind == CACHED_FLOAT16) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) half[i] = narrow_half(x[i]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) half[i] = narrow_bfloat(x[i]);
    }
}

#endif
