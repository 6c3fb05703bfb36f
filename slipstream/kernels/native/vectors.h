/* Vectors as wide as the machine's, for the kernels that work on float32. */
#ifndef SLIP_VECTORS_H
#define SLIP_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* A float32 panel is two vectors. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define PANEL (2 * LANES)
#if defined(__AVX512F__) || defined(__aarch64__) /* 32 vector registers: sums, two of the weight, one of the token */
#define MAX_TILE 12
#define QUERY_ROWS 8
#else
#define MAX_TILE 6
#define QUERY_ROWS 4
#endif
typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

/* All lanes added up, halves first. */
static inline float vec_sum(vec x) {
#if LANES == 16
    return _mm512_reduce_add_ps((__m512)x);
#elif LANES == 8
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
    return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

/* e^x to about one unit in the last place, in a form that compilers vectorise. NaN stays NaN. */
static inline float fast_exp(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float value; } scale;
    scale.bits = ((int32_t)n + 127) << 23;
    return p * scale.value;
}

#endif
