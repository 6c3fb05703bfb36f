/* All layers of a dense decoder for a few tokens a request, in one call: between two products there is too little work
 * to return to Python for. Field order is that of the structures in decoder_stack.py.
 */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    const float *input_norm, *qkv_bias, *q_norm, *k_norm, *o_bias, *post_norm; /* biases, q_norm and k_norm may be NULL */
    const Matrix *qkv, *o, *gate_up, *down;
    void *cache;
    int64_t window;
} Layer;

typedef struct {
    int64_t hidden, heads, kv_heads, dim, intermediate, page_size, rotary_dim, cache_kind;
    float eps, scale;
} Sizes;

/* Where the stream before a layer is to be copied. */
typedef struct {
    float *out;
    int64_t stride, layer;
} Tap;

typedef struct {
    int64_t tokens, requests, table_stride;
    const float *hidden, *residual; /* what is still to be added, and to what; hidden is not read beside joined, and
                                       residual may be NULL for zeros */
    int64_t hidden_stride, residual_stride;
    const float *cosine, *sine;
    const int64_t *page_ids, *offsets;
    const int32_t *starts, *query_lens, *seq_lens, *block_table, *seq_starts; /* seq_starts may be NULL */
    const float *joined; /* the input of the first layer's projection, instead of a norm's output; may be NULL */
    const Tap *taps;
    int64_t num_taps;
    int planes, num_threads;
    int alone; /* see slip_paged_attention */
} Step;

static void copy_rows(const float *from, int64_t stride, float *to, int64_t size, int64_t rows) {
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * size, from + i * stride, (size_t)size * sizeof(float));
}

static void copy_to_taps(const Step *s, int64_t layer, const float *residual, int64_t size) {
    for (const Tap *tap = s->taps; tap < s->taps + s->num_taps; tap++)
        for (int64_t t = 0; tap->layer == layer && t < s->tokens; t++)
            memcpy(tap->out + t * tap->stride, residual + t * size, (size_t)size * sizeof(float));
}

static void normalise_heads(float *x, const float *weight, float eps, int64_t tokens, int64_t stride, int64_t heads, int64_t dim) {
    for (int64_t t = 0; t < tokens; t++) slip_rms_norm(x + t * stride, weight, eps, x + t * stride, heads, dim);
}

/* Writes what is still to be added to `residual` into `hidden`, and both only. Returns 1 when memory ran out. */
int slip_decoder_stack(const Layer *layers, int64_t num_layers, const Sizes *z, const Step *s, float *hidden, float *residual) {
    int64_t n = s->tokens, q_size = z->heads * z->dim, kv_size = z->kv_heads * z->dim, qkv_size = q_size + 2 * kv_size;
    float *normed = malloc((size_t)(n * (z->hidden + qkv_size + 2 * q_size + z->intermediate)) * sizeof(float));
    if (!normed) return 1;
    float *qkv = normed + n * z->hidden, *q = qkv + n * qkv_size, *mixed = q + n * q_size, *gated = mixed + n * q_size;
    if (!s->joined) copy_rows(s->hidden, s->hidden_stride, hidden, z->hidden, n);
    if (s->residual) copy_rows(s->residual, s->residual_stride, residual, z->hidden, n);
    else memset(residual, 0, (size_t)(n * z->hidden) * sizeof(float));
    int failed = 0;
    for (const Layer *l = layers; l < layers + num_layers && !failed; l++) {
        const float *input = l == layers && s->joined ? s->joined : normed;
        if (input == normed) slip_add_rms_norm(hidden, residual, l->input_norm, z->eps, normed, residual, n, z->hidden);
        copy_to_taps(s, l - layers, residual, z->hidden);
        failed = slip_product(l->qkv, input, l->qkv_bias, qkv, n, s->planes, s->num_threads);
        if (l->q_norm) normalise_heads(qkv, l->q_norm, z->eps, n, qkv_size, z->heads, z->dim);
        if (l->k_norm) normalise_heads(qkv + q_size, l->k_norm, z->eps, n, qkv_size, z->kv_heads, z->dim);
        slip_rope_and_cache(qkv, qkv_size, qkv + q_size, qkv_size, qkv + q_size + kv_size, qkv_size, s->cosine, s->sine,
                            l->cache, s->page_ids, s->offsets, q, n, z->heads, z->kv_heads, z->dim, z->rotary_dim,
                            z->page_size, (int)z->cache_kind);
        failed |= slip_paged_attention(q, l->cache, s->starts, s->query_lens, s->seq_lens, s->block_table, s->seq_starts,
                                        mixed, s->requests, z->heads, z->kv_heads, z->dim, z->page_size, s->table_stride,
                                       z->scale, l->window, 1, s->alone, (int)z->cache_kind, s->num_threads);
        failed |= slip_product(l->o, mixed, l->o_bias, hidden, n, s->planes, s->num_threads);
        slip_add_rms_norm(hidden, residual, l->post_norm, z->eps, normed, residual, n, z->hidden);
        failed |= slip_product(l->gate_up, normed, NULL, gated, n, s->planes, s->num_threads);
        failed |= slip_product(l->down, gated, NULL, hidden, n, s->planes, s->num_threads);
    }
    free(normed);
    return failed;
}

