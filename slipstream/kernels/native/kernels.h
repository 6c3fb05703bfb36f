/* The kernels that others are made of; all arrays are float32 and contiguous unless a stride says otherwise. A cache's
 * numbers are of the kind that `kind` says, see cached.h. */
#ifndef SLIP_KERNELS_H
#define SLIP_KERNELS_H

#include <stdint.h>

/* A matrix [out, in], as float32 panels or quantised. Field order is that of the structures in records.py. */
typedef struct {
    const uint8_t *panels;
    int64_t kind, rows, group; /* see quant_format.h; `group` counts blocks, for kinds that leave it open */
} Segment;

typedef struct {
    const void *panels;      /* for slip_panel_linear, or NULL */
    const Segment *segments; /* row ranges, one after the other; where gated the gates and the values they gate */
    int64_t num_segments, in, out, gated, panel_kind; /* of the panels' numbers, see cached.h */
} Matrix;

void slip_rms_norm(const float *x, const float *weight, float eps, float *out, int64_t rows, int64_t size);
void slip_add_rms_norm(const float *x, const float *residual, const float *weight, float eps, float *out, float *total,
                       int64_t rows, int64_t size);
void slip_layer_norm(const float *x, const float *weight, const float *bias, float eps, float *out, int64_t rows,
                     int64_t size);
void slip_rope_and_cache(const float *q, int64_t q_stride, const float *k, int64_t k_stride, const float *v,
                         int64_t v_stride, const float *cosine, const float *sine, void *cache, const int64_t *page_ids,
                         const int64_t *offsets, float *q_out, int64_t tokens, int64_t heads, int64_t kv_heads,
                         int64_t dim, int64_t rotary_dim, int64_t page_size, int kind);
int slip_encoder_attention(const float *q, const float *k, const float *v, const float *bias, const int32_t *starts,
                           const int32_t *lens, float *out, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                           int64_t reqs, int64_t heads, int64_t dim, int64_t distances, float scale, int num_threads);
int slip_paged_attention(const float *q, const void *cache, const int32_t *starts, const int32_t *query_lens,
                         const int32_t *seq_lens, const int32_t *block_table, const int32_t *seq_starts, float *out,
                         int64_t requests, int64_t heads, int64_t kv_heads, int64_t dim, int64_t page_size,
                         int64_t table_stride, float scale, int64_t window, int causal, int alone, int kind, int num_threads);
void slip_panel_linear(const float *x, int64_t x_stride, const void *panels, int kind, const float *bias, float *out,
                       int64_t tokens, int64_t in, int64_t out_size, int gated, int num_threads);

/* Quantised weights meet activations in two or three planes of bytes, or with 0 as they are. Returns 1 when memory ran out. */
int slip_product(const Matrix *matrix, const float *x, const float *bias, float *out, int64_t tokens, int planes,
                 int num_threads);

#endif
