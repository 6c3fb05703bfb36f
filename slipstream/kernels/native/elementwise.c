/* Small operations between the products, in plain C for CPUs.
 *
 * In torch each of them is five to ten calls, and at one token a call costs more than the work. The definitions are the
 * torch bodies in the files of slipstream/kernels that call these; tests compare the two.
 */
#include "cached.h"
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

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

void slip_layer_norm(const float *x, const float *weight, const float *bias, float eps, float *out, int64_t rows,
                     int64_t size) {
    for (int64_t row = 0; row < rows; row++, x += size, out += size) {
        float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) sum += x[i];
        float mean = sum / (float)size;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += (x[i] - mean) * (x[i] - mean);
        float scale = 1.0f / sqrtf(squares / (float)size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
    }
}

/* Rows of embeddings, by ids or in order without them, beside states, each normed where there are gains; at position 0
 * the embedding counts as zeros. */
void slip_join_states(const float *hidden, int64_t stride, const float *embedding, const int32_t *ids,
                      const int64_t *positions, const float *embedding_gain, const float *hidden_gain, float eps, float *out,
                      int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        float *left = out + row * 2 * size, *right = left + size;
        memcpy(left, embedding + (ids ? ids[row] : row) * size, (size_t)size * sizeof(float));
        memcpy(right, hidden + row * stride, (size_t)size * sizeof(float));
        if (positions && positions[row] == 0) memset(left, 0, (size_t)size * sizeof(float));
        if (embedding_gain && hidden_gain) {
            normalise(left, embedding_gain, eps, left, size);
            normalise(right, hidden_gain, eps, right, size);
        }
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
                         int64_t v_stride, const float *cosine, const float *sine, void *cache, const int64_t *page_ids,
                         const int64_t *offsets, float *q_out, int64_t tokens, int64_t heads, int64_t kv_heads,
                         int64_t dim, int64_t rotary_dim, int64_t page_size, int kind) {
    int64_t side = kv_heads * page_size * dim;
    float turned[dim]; /* a key that is still to be narrowed */
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cosine + t * rotary_dim, *s = sine + t * rotary_dim;
        for (int64_t h = 0; h < heads; h++)
            rotate(q + t * q_stride + h * dim, c, s, q_out + (t * heads + h) * dim, rotary_dim, dim);
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t at = page_ids[t] * 2 * side + (h * page_size + offsets[t]) * dim;
            char *key = (char *)cache + at * cached_bytes(kind), *value = key + side * cached_bytes(kind);
            rotate(k + t * k_stride + h * dim, c, s, kind == CACHED_FLOAT32 ? (float *)key : turned, rotary_dim, dim);
            if (kind != CACHED_FLOAT32) cached_store(key, turned, dim, kind);
            cached_store(value, v + t * v_stride + h * dim, dim, kind);
        }
    }
}

/* The largest entry of each row and where it first occurs; not a number, at 0, if the row holds anything that is not one. */
typedef struct {
    const float *x;
    int64_t size;
    float *largest;
    int64_t *index;
    uint8_t *failed;
} Rows;

static void find_largest(const void *arg, int64_t first, int64_t end) {
    const Rows *r = arg;
    for (int64_t row = first; row < end; row++) {
        const float *x = r->x + row * r->size;
        float largest = -INFINITY;
        int bad = 0;
#pragma omp simd reduction(max : largest) reduction(| : bad)
        for (int64_t i = 0; i < r->size; i++) {
            largest = x[i] > largest ? x[i] : largest;
            bad |= x[i] != x[i];
        }
        int64_t at = 0;
        while (!bad && at < r->size && x[at] != largest) at++;
        r->largest[row] = bad ? NAN : largest;
        r->index[row] = bad ? 0 : at;
        r->failed[row] = bad || !isfinite(largest);
    }
}

/* Returns whether a row failed: it holds what is no number, or its largest entry is infinite. */
int slip_row_max(const float *x, int64_t rows, int64_t size, float *largest, int64_t *index, uint8_t *failed,
                 int num_threads) {
    Rows r = {x, size, largest, index, failed};
    slip_spread(find_largest, &r, rows, 1, rows * size > 100000 ? num_threads : 1);
    for (int64_t row = 0; row < rows; row++)
        if (failed[row]) return 1;
    return 0;
}

/* A draft for each row: the token of its largest entry, or -1 where the row failed. Without ids a column is a token. */
void slip_place_maxima(const int64_t *columns, const uint8_t *failed, const int32_t *target_ids, int32_t *draft_ids,
                       int64_t stride, int64_t rows) {
    for (int64_t i = 0; i < rows; i++) {
        int32_t token = target_ids ? target_ids[columns[i]] : (int32_t)columns[i];
        draft_ids[i * stride] = failed[i] ? -1 : token;
    }
}

/* The states of some tokens, by module. */
void slip_keep_states(const float *states, int64_t stride, const int64_t *indices, float *kept, int64_t modules,
                      int64_t rows, int64_t size, int64_t module_stride) {
    for (int64_t module = 0; module < modules; module++)
        for (int64_t i = 0; i < rows; i++)
            memcpy(kept + module * module_stride + i * size, states + indices[i] * stride + module * size,
                   (size_t)size * sizeof(float));
}

/* Logits of forbidden tokens become -inf: bit t % 32 of word t / 32 allows token t. Row -1 of masks allows all. */
void slip_mask_rows(const float *x, const int32_t *pool, const int32_t *mask_rows, float *out, int64_t rows,
                    int64_t size, int64_t num_words) {
    for (int64_t i = 0; i < rows; i++) {
        const float *from = x + i * size;
        float *to = out + i * size;
        if (mask_rows[i] < 0) {
            memcpy(to, from, size * sizeof(float));
            continue;
        }
        const uint32_t *words = (const uint32_t *)(pool + mask_rows[i] * num_words);
        for (int64_t word = 0; word < num_words; word++) {
            const int64_t first = word * 32, end = first + 32 < size ? first + 32 : size;
            for (int64_t t = first; t < end; t++) to[t] = words[word] >> (t - first) & 1 ? from[t] : -INFINITY;
        }
    }
}
