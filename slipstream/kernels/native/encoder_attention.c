/* Attention of every token of a text to all tokens of it. */
#include "kernels.h"
#include "threads.h"
#include "vectors.h"
#include <stdatomic.h>
#include <stdlib.h>

/* Queries that go over keys and values together, so that each is read once for all of them. */
#define QUERIES 4
#define VECTORS 4 /* of keys or values at once */

typedef struct {
    const float *q, *k, *v, *bias; /* bias may be NULL */
    const int32_t *starts, *lens;
    float *out;
    int64_t q_stride, k_stride, v_stride, heads, dim, distances;
    float scale;
    int64_t stride; /* of scores: the longest text's length, in whole vectors */
    _Atomic int failed;
} Encoder;

/* A head's keys of one text, side by side for each dimension: [dim, stride]. The rest of the last vectors is zero. */
static void turn_keys(const Encoder *e, const float *k, int64_t length, float *turned) {
    int64_t end = (length + VECTORS * LANES - 1) / (VECTORS * LANES) * (VECTORS * LANES);
    for (int64_t p = 0; p < length; p++)
        for (int64_t i = 0; i < e->dim; i++) turned[i * e->stride + p] = k[p * e->k_stride + i];
    for (int64_t i = 0; i < e->dim; i++)
        for (int64_t p = length; p < end; p++) turned[i * e->stride + p] = 0.0f;
}

static inline __attribute__((always_inline)) void score(const Encoder *e, const float *q, const float *turned,
                                                        int64_t length, int num, float *scores) {
    for (int64_t p = 0; p < length; p += VECTORS * LANES) {
        vec sums[QUERIES][VECTORS] = {{{0}}};
        for (int64_t i = 0; i < e->dim; i++) {
            const float *keys = turned + i * e->stride + p;
            _Pragma("GCC unroll 4") for (int n = 0; n < VECTORS; n++) {
                vec x = *(const vec *)(keys + n * LANES);
                _Pragma("GCC unroll 4") for (int h = 0; h < num; h++) sums[h][n] += x * q[h * e->q_stride + i];
            }
        }
        _Pragma("GCC unroll 4") for (int h = 0; h < num; h++)
            _Pragma("GCC unroll 4") for (int n = 0; n < VECTORS; n++)
                *(vec *)(scores + h * e->stride + p + n * LANES) = sums[h][n] * e->scale;
    }
}

static void weigh(const float *bias, int64_t length, float *scores) {
    float largest = -INFINITY, sum = 0.0f;
    if (bias)
#pragma omp simd
        for (int64_t p = 0; p < length; p++) scores[p] += bias[p];
#pragma omp simd reduction(max : largest)
    for (int64_t p = 0; p < length; p++) largest = scores[p] > largest ? scores[p] : largest;
#pragma omp simd reduction(+ : sum)
    for (int64_t p = 0; p < length; p++) {
        scores[p] = fast_exp(scores[p] - largest);
        sum += scores[p];
    }
    float share = 1.0f / sum;
#pragma omp simd
    for (int64_t p = 0; p < length; p++) scores[p] *= share;
}

static inline __attribute__((always_inline)) void mix(const Encoder *e, const float *v, int64_t length, int num, int sums_num,
                                                      int64_t i, const float *scores, float *out) {
    vec sums[QUERIES][VECTORS] = {{{0}}};
    for (int64_t p = 0; p < length; p++) {
        const float *value = v + p * e->v_stride + i;
        _Pragma("GCC unroll 4") for (int n = 0; n < sums_num; n++) {
            vec x = *(const vec *)(value + n * LANES);
            _Pragma("GCC unroll 4") for (int h = 0; h < num; h++) sums[h][n] += x * scores[h * e->stride + p];
        }
    }
    _Pragma("GCC unroll 4") for (int h = 0; h < num; h++)
        _Pragma("GCC unroll 4") for (int n = 0; n < sums_num; n++)
            *(vec *)(out + h * e->heads * e->dim + i + n * LANES) = sums[h][n];
}

static inline __attribute__((always_inline)) void attend(const Encoder *e, int64_t start, int64_t length, int64_t first,
                                                         int64_t head, int num, const float *turned, float *scores) {
    const float *q = e->q + (start + first) * e->q_stride + head * e->dim;
    const float *v = e->v + start * e->v_stride + head * e->dim;
    float *out = e->out + ((start + first) * e->heads + head) * e->dim;
    int64_t i = 0;
    score(e, q, turned, length, num, scores);
    for (int h = 0; h < num; h++) {
        const float *bias = e->bias ? e->bias + head * e->distances + e->distances / 2 - first - h : NULL;
        weigh(bias, length, scores + h * e->stride);
    }
    for (; i + VECTORS * LANES <= e->dim; i += VECTORS * LANES) mix(e, v, length, num, VECTORS, i, scores, out);
    for (; i + 2 * LANES <= e->dim; i += 2 * LANES) mix(e, v, length, num, 2, i, scores, out);
    for (; i + LANES <= e->dim; i += LANES) mix(e, v, length, num, 1, i, scores, out);
    for (; i < e->dim; i++)
        for (int h = 0; h < num; h++) {
            float sum = 0.0f;
            for (int64_t p = 0; p < length; p++) sum += v[p * e->v_stride + i] * scores[h * e->stride + p];
            out[h * e->heads * e->dim + i] = sum;
        }
}

/* Pieces of work are pairs of a text and a head. */
static void attend_pairs(const void *arg, int64_t first, int64_t end) {
    Encoder *e = (Encoder *)arg;
    float *scores = malloc(sizeof(float) * (size_t)((QUERIES + e->dim) * e->stride)), *turned = scores + QUERIES * e->stride;
    if (!scores) {
        atomic_store(&e->failed, 1);
        return;
    }
    for (int64_t pair = first; pair < end; pair++) {
        int64_t request = pair / e->heads, head = pair % e->heads, start = e->starts[request];
        int64_t length = e->lens[request], j = 0;
        turn_keys(e, e->k + start * e->k_stride + head * e->dim, length, turned);
        for (; j + QUERIES <= length; j += QUERIES) attend(e, start, length, j, head, QUERIES, turned, scores);
        for (; j < length; j++) attend(e, start, length, j, head, 1, turned, scores);
    }
    free(scores);
}

/* Returns 0, or 1 when there is no memory for the scores. Rows of no text are left as they are. */
int slip_encoder_attention(const float *q, const float *k, const float *v, const float *bias, const int32_t *starts,
                           const int32_t *lens, float *out, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                           int64_t reqs, int64_t heads, int64_t dim, int64_t distances, float scale, int num_threads) {
    Encoder e = {q, k, v, bias, starts, lens, out, q_stride, k_stride, v_stride, heads, dim, distances, scale, 0, 0};
    int64_t longest = 1, work = 0, step = VECTORS * LANES;
    for (int64_t i = 0; i < reqs; i++) {
        longest = lens[i] > longest ? lens[i] : longest;
        work += (int64_t)lens[i] * lens[i] * heads * dim;
    }
    e.stride = (longest + step - 1) / step * step;
    slip_spread(attend_pairs, &e, reqs * heads, 1, work > 100000 ? num_threads : 1);
    return atomic_load(&e.failed);
}
