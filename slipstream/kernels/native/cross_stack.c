/* All layers of a decoder with cross attention for a few tokens a request, in one call: between two products there is too
 * little work to return to Python for. Norms shift as well as scale, and gelu follows the first product of a feed-forward
 * layer. Field order is that of the structures in cross_stack.py.
 */
#include "kernels.h"
#include "vectors.h"

#include <stdlib.h>

typedef struct {
    const float *self_norm, *self_shift, *qkv_bias, *out_bias, *cross_norm, *cross_shift, *query_bias, *cross_out_bias;
    const float *norm, *shift, *up_bias, *down_bias;
    const Matrix *qkv, *out, *query, *cross_out, *up, *down;
    void *cache, *encoded; /* of the text, and of the encoder's output */
} Layer;

typedef struct {
    int64_t hidden, heads, dim, intermediate, page_size, rotary_dim, cache_kind;
    float eps, scale;
} Sizes;

/* Where the stream before a layer is to be copied. */
typedef struct {
    float *out;
    int64_t stride, layer;
} Tap;

typedef struct {
    int64_t tokens, requests, table_stride, encoded_stride;
    const float *cosine, *sine;
    const int64_t *page_ids, *offsets;
    const int32_t *starts, *query_lens, *seq_lens, *block_table, *seq_starts; /* seq_starts may be NULL */
    const int32_t *encoded_lens, *encoded_table;
    const Tap *taps;
    int64_t num_taps;
    int planes, num_threads;
} Step;

/* The product is added to the stream; `room` is for as many numbers. */
static int add_product(const Step *s, const Matrix *m, const float *x, const float *bias, float *stream, float *room) {
    int failed = slip_product(m, x, bias, room, s->tokens, s->planes, s->num_threads);
    for (int64_t i = 0; i < s->tokens * m->out; i++) stream[i] += room[i];
    return failed;
}

/* x, the stream, is read and written. Returns 1 when memory ran out. */
int slip_cross_stack(const Layer *layers, int64_t num_layers, const Sizes *z, const Step *s, float *x) {
    int64_t n = s->tokens, size = z->hidden, kind = z->cache_kind;
    float *normed = malloc((size_t)(n * (7 * size + z->intermediate)) * sizeof(float));
    if (!normed) return 1;
    float *qkv = normed + n * size, *q = qkv + 3 * n * size, *mixed = q + n * size, *room = mixed + n * size;
    float *inner = room + n * size;
    int failed = 0;
    for (const Layer *l = layers; l < layers + num_layers && !failed; l++) {
        for (const Tap *tap = s->taps; tap < s->taps + s->num_taps; tap++)
            for (int64_t t = 0; tap->layer == l - layers && t < n; t++)
                memcpy(tap->out + t * tap->stride, x + t * size, (size_t)size * sizeof(float));
        slip_layer_norm(x, l->self_norm, l->self_shift, z->eps, normed, n, size);
        failed |= slip_product(l->qkv, normed, l->qkv_bias, qkv, n, s->planes, s->num_threads);
        slip_rope_and_cache(qkv, 3 * size, qkv + size, 3 * size, qkv + 2 * size, 3 * size, s->cosine, s->sine, l->cache,
                            s->page_ids, s->offsets, q, n, z->heads, z->heads, z->dim, z->rotary_dim, z->page_size, (int)kind);
        failed |= slip_paged_attention(q, l->cache, s->starts, s->query_lens, s->seq_lens, s->block_table, s->seq_starts,
                                       mixed, s->requests, z->heads, z->heads, z->dim, z->page_size, s->table_stride,
                                       z->scale, 0, 1, 0, (int)kind, s->num_threads);
        failed |= add_product(s, l->out, mixed, l->out_bias, x, room);
        slip_layer_norm(x, l->cross_norm, l->cross_shift, z->eps, normed, n, size);
        failed |= slip_product(l->query, normed, l->query_bias, q, n, s->planes, s->num_threads);
        failed |= slip_paged_attention(q, l->encoded, s->starts, s->query_lens, s->encoded_lens, s->encoded_table, NULL,
                                       mixed, s->requests, z->heads, z->heads, z->dim, z->page_size, s->encoded_stride,
                                       z->scale, 0, 0, 0, (int)kind, s->num_threads);
        failed |= add_product(s, l->cross_out, mixed, l->cross_out_bias, x, room);
        slip_layer_norm(x, l->norm, l->shift, z->eps, normed, n, size);
        failed |= slip_product(l->up, normed, l->up_bias, inner, n, s->planes, s->num_threads);
#pragma omp simd
        for (int64_t i = 0; i < n * z->intermediate; i++) inner[i] = fast_gelu(inner[i]);
        failed |= add_product(s, l->down, inner, l->down_bias, x, room);
    }
    free(normed);
    return failed;
}
