/* Attention of every token of a text to all tokens of it: two products with panels, of keys and of values, for as many
 * queries as a tile has tokens. Every sum is one chain, so a query's result does not depend on what is computed beside it.
 */
#include "kernels.h"
#include "panel_block.h"
#include "threads.h"
#include "vectors.h"
#include <stdatomic.h>

typedef struct {
    const float *q, *k, *v, *bias; /* bias may be NULL */
    const int32_t *starts, *lens;
    float *out;
    int64_t q_stride, k_stride, v_stride, heads, dim, distances, parts; /* of a text's queries */
    float scale;
    int64_t longest;
    _Atomic int failed;
} Encoder;

/* What a thread has of one head and one text. */
typedef struct {
    float *keys;   /* panels of keys, [dim] inputs each */
    float *values; /* panels of a value's numbers, [length] inputs each */
    float *queries, *scores;
    int64_t stride; /* of scores */
} Workspace;

static int64_t whole(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

static void pack_keys(const float *k, int64_t stride, int64_t length, int64_t dim, float *panels) {
    for (int64_t first = 0; first < length; first += PANEL, panels += PANEL * dim) {
        int64_t num = length - first < PANEL ? length - first : PANEL;
        const float *from = k + first * stride;
        for (int64_t i = 0; i < dim; i++) {
            for (int64_t p = 0; p < num; p++) panels[i * PANEL + p] = from[p * stride + i];
            for (int64_t p = num; p < PANEL; p++) panels[i * PANEL + p] = 0.0f;
        }
    }
}

static void pack_values(const float *v, int64_t stride, int64_t length, int64_t dim, float *panels) {
    for (int64_t first = 0; first < dim; first += PANEL) {
        int64_t num = dim - first < PANEL ? dim - first : PANEL;
        for (int64_t p = 0; p < length; p++, panels += PANEL) {
            memcpy(panels, v + p * stride + first, (size_t)num * sizeof(float));
            memset(panels + num, 0, (size_t)(PANEL - num) * sizeof(float));
        }
    }
}

/* Powers of e in place of scores; returns what they are to be divided by. */
static float weigh(const float *bias, int64_t length, float *scores) {
    float largest = -INFINITY, sum = 0.0f;
    if (bias)
#pragma omp simd
        for (int64_t p = 0; p < length; p++) scores[p] += bias[p];
#pragma omp simd reduction(max : largest)
    for (int64_t p = 0; p < length; p++) largest = scores[p] > largest ? scores[p] : largest;
#pragma omp simd reduction(+ : sum)
    for (int64_t p = 0; p < length; p++) {
        scores[p] = fast_exp_small(scores[p] - largest);
        sum += scores[p];
    }
    return sum;
}

/* The queries from `first` on, `num` of them, at most a tile's. */
static void attend(const Encoder *e, const Workspace *w, int64_t start, int64_t length, int64_t first, int64_t head, int64_t num) {
    int64_t width = e->heads * e->dim;
    float *out = e->out + (start + first) * width + head * e->dim, sums[MAX_TILE];
    slip_pack_tokens(e->q + (start + first) * e->q_stride + head * e->dim, e->q_stride, num, e->dim, w->queries);
    for (int64_t i = 0; i < num * e->dim; i++) w->queries[i] *= e->scale;
    PanelBlock scores = {.x = w->queries, .panels = {w->keys, 0}, .out = w->scores, .x_stride = PACKED,
                         .out_stride = w->stride, .tokens = num, .in = e->dim, .out_size = length};
    slip_panel_block(&scores, 0, slip_num_panels(length, 0));
    for (int64_t j = 0; j < num; j++) {
        const float *bias = e->bias ? e->bias + head * e->distances + e->distances / 2 - first - j : NULL;
        sums[j] = weigh(bias, length, w->scores + j * w->stride);
    }
    PanelBlock mixed = {.x = w->scores, .panels = {w->values, 0}, .out = out, .x_stride = w->stride, .out_stride = width,
                        .tokens = num, .in = length, .out_size = e->dim};
    slip_panel_block(&mixed, 0, slip_num_panels(e->dim, 0));
    for (int64_t j = 0; j < num; j++)
        for (int64_t i = 0; i < e->dim; i++) out[j * width + i] /= sums[j];
}

/* Returns whether there is memory. */
static int open_workspace(const Encoder *e, Workspace *w) {
    int64_t keys = whole(e->longest, PANEL) * e->dim, values = whole(e->dim, PANEL) * e->longest;
    int64_t stride = whole(e->longest, LANES) + LANES; /* no power of two */
    float *memory = slip_scratch((size_t)(keys + values + MAX_TILE * (e->dim + stride)) * sizeof(float));
    if (!memory) return 0;
    float *queries = memory + keys + values;
    *w = (Workspace){memory, memory + keys, queries, queries + MAX_TILE * e->dim, stride};
    return 1;
}

/* Pieces of work are parts of a text's queries, for one head. */
static void attend_parts(const void *arg, int64_t first, int64_t end) {
    Encoder *e = (Encoder *)arg;
    Workspace w;
    if (!open_workspace(e, &w)) {
        atomic_store(&e->failed, 1);
        return;
    }
    int64_t packed = -1;
    for (int64_t piece = first; piece < end; piece++) {
        int64_t pair = piece / e->parts, request = pair / e->heads, head = pair % e->heads, start = e->starts[request];
        int64_t length = e->lens[request], size = whole((length + e->parts - 1) / e->parts, MAX_TILE);
        int64_t begin = piece % e->parts * size, stop = begin + size < length ? begin + size : length;
        if (begin >= stop) continue;
        if (packed != pair) {
            pack_keys(e->k + start * e->k_stride + head * e->dim, e->k_stride, length, e->dim, w.keys);
            pack_values(e->v + start * e->v_stride + head * e->dim, e->v_stride, length, e->dim, w.values);
            packed = pair;
        }
        for (int64_t j = begin; j < stop; j += MAX_TILE)
            attend(e, &w, start, length, j, head, stop - j < MAX_TILE ? stop - j : MAX_TILE);
    }
}

/* Returns 0, or 1 when there is no memory for the scores. Rows of no text are left as they are. */
int slip_encoder_attention(const float *q, const float *k, const float *v, const float *bias, const int32_t *starts,
                           const int32_t *lens, float *out, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                           int64_t reqs, int64_t heads, int64_t dim, int64_t distances, float scale, int num_threads) {
    Encoder e = {q, k, v, bias, starts, lens, out, q_stride, k_stride, v_stride, heads, dim, distances, 1, scale, 1, 0};
    int64_t work = 0, pairs = reqs * heads;
    for (int64_t i = 0; i < reqs; i++) {
        e.longest = lens[i] > e.longest ? lens[i] : e.longest;
        work += (int64_t)lens[i] * lens[i] * heads * dim;
    }
    if (pairs && pairs < 4 * num_threads) e.parts = (4 * num_threads + pairs - 1) / pairs;
    slip_spread(attend_parts, &e, pairs * e.parts, 1, work > 100000 ? num_threads : 1);
    return atomic_load(&e.failed);
}
