/* The small operations between matrix products, in plain C for CPUs.
 *
 * In torch each of them is five to ten calls, and at one token a call costs more than the work. All arrays are float32
 * and contiguous unless a stride says otherwise. The definitions are the torch bodies in the files of slipstream/kernels
 * that call these; tests compare the two.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

static void normalise(const float *x, const float *weight, float eps, float *out, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

void slip_rms_norm(const float *x, const float *weight, float eps, float *out, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) normalise(x + row * size, weight, eps, out + row * size, size);
}

void slip_add_rms_norm(const float *x, const float *residual, const float *weight, float eps, float *out, float *total,
                       int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        const float *a = x + row * size, *b = residual + row * size;
        float *sum = total + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) sum[i] = a[i] + b[i];
        normalise(sum, weight, eps, out + row * size, size);
    }
}

void slip_swiglu(const float *gate_up, float *out, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * size, *up = gate + size;
        float *target = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) target[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
    }
}

static void rotate(const float *x, const float *cosine, const float *sine, float *out, int64_t rotary_dim, int64_t dim) {
    int64_t half = rotary_dim / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cosine[i] + x[i + half] * sine[i];
        out[i + half] = x[i + half] * cosine[i + half] + x[i] * sine[i + half];
    }
    for (int64_t i = rotary_dim; i < dim; i++) out[i] = x[i];
}

/* Rotates queries into q_out and keys into the cache, beside the values. Strides are from token to token. */
void slip_rope_and_cache(const float *q, int64_t q_stride, const float *k, int64_t k_stride, const float *v,
                         int64_t v_stride, const float *cosine, const float *sine, float *cache, const int64_t *page_ids,
                         const int64_t *offsets, float *q_out, int64_t tokens, int64_t heads, int64_t kv_heads,
                         int64_t dim, int64_t rotary_dim, int64_t page_size) {
    int64_t head_bytes = dim * (int64_t)sizeof(float), side = kv_heads * page_size * dim;
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cosine + t * rotary_dim, *s = sine + t * rotary_dim;
        for (int64_t h = 0; h < heads; h++)
            rotate(q + t * q_stride + h * dim, c, s, q_out + (t * heads + h) * dim, rotary_dim, dim);
        float *keys = cache + page_ids[t] * 2 * side;
        for (int64_t h = 0; h < kv_heads; h++) {
            float *slot = keys + (h * page_size + offsets[t]) * dim;
            rotate(k + t * k_stride + h * dim, c, s, slot, rotary_dim, dim);
            memcpy(slot + side, v + t * v_stride + h * dim, (size_t)head_bytes);
        }
    }
}

typedef struct {
    const float *q, *cache;
    const int32_t *starts, *seq_lens, *block_table;
    float *out;
    int64_t heads, kv_heads, dim, page_size, table_stride;
    float scale;
    int64_t window;
} Attention;

/* All query heads of one group, all query tokens of one request: keys are read once for all of them. */
static void attend(const Attention *a, int64_t request, int64_t kv_head, float *scores) {
    int64_t begin = a->starts[request], num_query = a->starts[request + 1] - begin, length = a->seq_lens[request];
    int64_t group = a->heads / a->kv_heads, dim = a->dim, side = a->kv_heads * a->page_size * dim;
    const int32_t *pages = a->block_table + request * a->table_stride;
    for (int64_t j = 0; j < num_query; j++) {
        int64_t position = length - num_query + j;
        int64_t first = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
        for (int64_t g = 0; g < group; g++) {
            int64_t at = ((begin + j) * a->heads + kv_head * group + g) * dim;
            const float *query = a->q + at;
            float *result = a->out + at, largest = -INFINITY, sum = 0.0f;
            for (int64_t p = first; p <= position; p++) {
                int64_t slot = (int64_t)pages[p / a->page_size] * 2 * side + (kv_head * a->page_size + p % a->page_size) * dim;
                const float *key = a->cache + slot;
                float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
                for (int64_t i = 0; i < dim; i++) dot += query[i] * key[i];
                scores[p] = dot * a->scale;
                largest = scores[p] > largest ? scores[p] : largest;
            }
#pragma omp simd reduction(+ : sum)
            for (int64_t p = first; p <= position; p++) {
                scores[p] = fast_exp(scores[p] - largest);
                sum += scores[p];
            }
            memset(result, 0, (size_t)dim * sizeof(float));
            for (int64_t p = first; p <= position; p++) {
                int64_t slot = (int64_t)pages[p / a->page_size] * 2 * side + (kv_head * a->page_size + p % a->page_size) * dim;
                const float *value = a->cache + slot + side;
                float weight = scores[p] / sum;
#pragma omp simd
                for (int64_t i = 0; i < dim; i++) result[i] += weight * value[i];
            }
        }
    }
}

/* Returns 0, or 1 when there is no memory for the scores. Tokens of rows that do not run give zero. */
int slip_paged_attention(const float *q, const float *cache, const int32_t *starts, const int32_t *seq_lens,
                         const int32_t *block_table, float *out, int64_t requests, int64_t heads, int64_t kv_heads,
                         int64_t dim, int64_t page_size, int64_t table_stride, float scale, int64_t window,
                         int num_threads) {
    Attention a = {q, cache, starts, seq_lens, block_table, out, heads, kv_heads, dim, page_size, table_stride, scale, window};
    int64_t longest = 0, work = 0, failed = 0;
    for (int64_t r = 0; r < requests; r++) {
        longest = seq_lens[r] > longest ? seq_lens[r] : longest;
        work += (int64_t)seq_lens[r] * (starts[r + 1] - starts[r]) * heads * dim;
        if (seq_lens[r] == 0)
            memset(out + starts[r] * heads * dim, 0, (size_t)((starts[r + 1] - starts[r]) * heads * dim) * sizeof(float));
    }
#pragma omp parallel num_threads(num_threads) if (work > 100000)
    {
        float *scores = malloc((size_t)(longest + 1) * sizeof(float));
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < requests * kv_heads; i++)
            if (scores && seq_lens[i / kv_heads] > 0) attend(&a, i / kv_heads, i % kv_heads, scores);
        free(scores);
    }
    return (int)failed;
}
