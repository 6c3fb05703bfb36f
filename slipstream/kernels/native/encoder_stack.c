/* All layers of an encoder whose norms come before attention and feed-forward, for the tokens of one text. A block of
 * tokens goes through all that attention does not part, in memory of the thread: between the products nothing is as
 * large as the text. Field order is that of the structures in encoder_stack.py.
 */
#include "kernels.h"
#include "panel_block.h"
#include "threads.h"
#include "vectors.h"

typedef struct {
    const float *attention_norm, *attention_shift, *qkv_bias, *out_bias, *norm, *shift, *up_bias, *down_bias;
    const Matrix *qkv, *out, *up, *down; /* in panels */
} Layer;

typedef struct {
    int64_t hidden, heads, intermediate;
    float eps;
} Sizes;

#define MOST_TOKENS (3 * MAX_TILE) /* of a block: its numbers stay in the second cache beside a panel */

typedef struct {
    const Layer *layer;
    const Sizes *sizes;
    float *x, *qkv, *mixed;
    int64_t tokens, block;
    _Atomic int failed;
} Work;

/* Where a thread has the numbers of a block: normed, packed, of the feed-forward layer; and a panel in float32. */
typedef struct {
    float *normed, *packed, *inner, *room;
} Room;

static void multiply(const Room *r, const Matrix *m, const float *bias, float *out, int64_t tokens, int adds) {
    PanelBlock b = {.x = r->packed, .bias = bias, .panels = {m->panels, (int)m->panel_kind}, .out = out, .room = r->room,
                    .x_stride = PACKED, .out_stride = m->out, .tokens = tokens, .in = m->in, .out_size = m->out, .adds = adds};
    slip_panel_block(&b, 0, slip_num_panels(m->out, 0));
}

/* Returns whether there is memory. */
static int open_room(Work *w, Room *r) {
    int64_t hidden = w->sizes->hidden, wide = w->sizes->intermediate > hidden ? w->sizes->intermediate : hidden;
    float *memory = slip_scratch((size_t)(w->block * (hidden + 2 * wide) + slip_panel_room(wide)) * sizeof(float));
    if (!memory) {
        w->failed = 1;
        return 0;
    }
    float *packed = memory + w->block * hidden, *inner = packed + w->block * wide;
    *r = (Room){memory, packed, inner, inner + w->block * wide};
    return 1;
}

/* Norm and the projection before attention. */
static void project_blocks(const void *arg, int64_t first, int64_t end) {
    Work *w = (Work *)arg;
    const Layer *l = w->layer;
    int64_t hidden = w->sizes->hidden;
    Room r;
    if (!open_room(w, &r)) return;
    for (int64_t i = first; i < end; i++) {
        int64_t token = i * w->block, tokens = w->tokens - token < w->block ? w->tokens - token : w->block;
        slip_layer_norm(w->x + token * hidden, l->attention_norm, l->attention_shift, w->sizes->eps, r.normed, tokens, hidden);
        slip_pack_tokens(r.normed, hidden, tokens, hidden, r.packed);
        multiply(&r, l->qkv, l->qkv_bias, w->qkv + token * 3 * hidden, tokens, 0);
    }
}

/* The projection after attention, and the feed-forward layer. */
static void finish_blocks(const void *arg, int64_t first, int64_t end) {
    Work *w = (Work *)arg;
    const Layer *l = w->layer;
    int64_t hidden = w->sizes->hidden, size = w->sizes->intermediate;
    Room r;
    if (!open_room(w, &r)) return;
    for (int64_t i = first; i < end; i++) {
        int64_t token = i * w->block, tokens = w->tokens - token < w->block ? w->tokens - token : w->block;
        float *x = w->x + token * hidden;
        slip_pack_tokens(w->mixed + token * hidden, hidden, tokens, hidden, r.packed);
        multiply(&r, l->out, l->out_bias, x, tokens, 1);
        slip_layer_norm(x, l->norm, l->shift, w->sizes->eps, r.normed, tokens, hidden);
        slip_pack_tokens(r.normed, hidden, tokens, hidden, r.packed);
        multiply(&r, l->up, l->up_bias, r.inner, tokens, 0);
#pragma omp simd
        for (int64_t j = 0; j < tokens * size; j++) r.inner[j] = fast_gelu(r.inner[j]);
        slip_pack_tokens(r.inner, size, tokens, size, r.packed);
        multiply(&r, l->down, l->down_bias, x, tokens, 1);
    }
}

/* x is read and written: [tokens][hidden]. `memory` has room for four times as much. Returns 1 when memory ran out. */
int slip_encoder_stack(const Layer *layers, int64_t num_layers, const Sizes *z, float *x, float *memory, int64_t tokens,
                       int num_threads) {
    int64_t hidden = z->hidden, dim = hidden / z->heads;
    int64_t blocks = (tokens + MOST_TOKENS - 1) / MOST_TOKENS, tiles = (tokens + MAX_TILE - 1) / MAX_TILE;
    blocks = (blocks + num_threads - 1) / num_threads * num_threads;
    Work w = {NULL, z, x, memory, memory + 3 * tokens * hidden, tokens, (tiles + blocks - 1) / blocks * MAX_TILE, 0};
    blocks = (tokens + w.block - 1) / w.block;
    int32_t start = 0, length = (int32_t)tokens;
    for (const Layer *l = layers; l < layers + num_layers && !w.failed; l++) {
        w.layer = l;
        slip_spread(project_blocks, &w, blocks, 1, num_threads);
        w.failed |= slip_encoder_attention(w.qkv, w.qkv + hidden, w.qkv + 2 * hidden, NULL, &start, &length, w.mixed,
                                           3 * hidden, 3 * hidden, 3 * hidden, 1, z->heads, dim, 0,
                                           1.0f / sqrtf((float)dim), num_threads);
        if (!w.failed) slip_spread(finish_blocks, &w, blocks, 1, num_threads);
    }
    return w.failed;
}
