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

#define ROUNDS 12582912.0f /* 1.5 * 2^23: added to a small number, it leaves the nearest integer in the last bits */

/* e^x to about one unit in the last place, in a form that compilers vectorise, for x up to 88. NaN stays NaN. */
static inline float fast_exp_small(float x) {
    x = x < -87.0f ? -87.0f : x;
    union { float value; int32_t bits; } n = {x * 1.44269504f + ROUNDS};
    float count = n.value - ROUNDS;
    float r = x - count * 0.693359375f;
    r = r + count * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float value; } scale = {(int32_t)((uint32_t)n.bits << 23) + 0x3f800000};
    return p * scale.value;
}

static inline float fast_exp(float x) { return fast_exp_small(x > 88.0f ? 88.0f : x); }

/* gelu by the error function. For u from 0 to 5, -log(erfc(u)) is this polynomial to 8e-8, by least squares that were
 * weighted until the largest errors were equal; beyond, erfc is below 2e-12. */
static inline float fast_gelu(float x) {
    float u = fabsf(x) * 0.70710678f;
    u = u > 5.0f ? 5.0f : u;
    float p = 7.1571242e-9f;
    p = p * u - 2.4466610e-7f;
    p = p * u + 3.7525085e-6f;
    p = p * u - 3.4012308e-5f;
    p = p * u + 2.0069297e-4f;
    p = p * u - 7.8444998e-4f;
    p = p * u + 1.8120180e-3f;
    p = p * u - 2.1147662e-4f;
    p = p * u - 1.9176515e-2f;
    p = p * u + 1.0280399e-1f;
    p = p * u + 6.3661194e-1f;
    p = p * u + 1.1283798f;
    float tail = 0.5f * x * fast_exp(-p * u); /* x times the normal distribution's share beyond |x| */
    return x > 0.0f ? x - tail : tail;
}

#endif
