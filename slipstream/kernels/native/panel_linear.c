/* Matrix product with a weight in panels: [panels][in][PANEL], a panel being PANEL neighbouring outputs, zero-padded. They
 * are float32, or of 16 bits that are widened as they are read, see cached.h.
 *
 * A tile is one panel times a few tokens, all its sums in registers. The panel streams through once, in the order in
 * which it lies in memory, so a few tokens cost hardly more than one. Every output is one chain of fused additions over
 * `in`, whatever the tile: a token's result does not depend on the tokens beside it.
 *
 * Many tokens go in blocks, whose numbers are first brought into the order in which tiles read them: rows of a size
 * that is a power of two would otherwise meet in the same lines of the cache. A panel is widened once for all of them.
 */
#include "cached.h"
#include "kernels.h"
#include "panel_block.h"
#include "threads.h"
#include "vectors.h"

#define PREFETCH_BYTES 4096 /* ahead, about the latency of memory */
#define BLOCK_FLOATS (96 * 1024) /* of a block's tokens, so that they stay in the second cache beside a panel */

typedef struct {
    const float *x, *bias; /* bias may be NULL */
    Panels panels;
    float *out;
    int64_t x_stride, tokens, in, out_size, block, group; /* tokens of a block; panels of a piece */
    int gated; /* a panel is LANES gates and the LANES values they gate */
} Product;

static int64_t outputs_of_panel(int gated) { return gated ? LANES : PANEL; }

static int64_t num_panels(int64_t out_size, int gated) {
    int64_t step = outputs_of_panel(gated);
    return (out_size + step - 1) / step;
}

/* Writes what a tile has for one token: the sums of a panel, or silu(gate) * value of its two halves. */
static void finish_part(const PanelBlock *b, int64_t panel, int64_t token, vec low, vec high) {
    int64_t step = outputs_of_panel(b->gated), first = panel * step, width = b->out_size - first;
    float *out = b->out + token * b->out_stride + first, sums[PANEL];
    *(vec *)sums = low;
    *(vec *)(sums + LANES) = high;
    if (width > step) width = step;
    if (b->gated)
        for (int64_t i = 0; i < width; i++) out[i] = sums[i] / (1.0f + fast_exp(-sums[i])) * sums[i + LANES];
    else if (b->adds)
        for (int64_t i = 0; i < width; i++) out[i] += b->bias ? sums[i] + b->bias[first + i] : sums[i];
    else
        for (int64_t i = 0; i < width; i++) out[i] = b->bias ? sums[i] + b->bias[first + i] : sums[i];
}

static inline __attribute__((always_inline)) void finish(const PanelBlock *b, int64_t panel, int64_t token, vec low, vec high) {
    if (b->gated || (panel + 1) * PANEL > b->out_size) {
        finish_part(b, panel, token, low, high);
        return;
    }
    vec *out = (vec *)(b->out + token * b->out_stride + panel * PANEL);
    if (b->bias) {
        low += *(const vec *)(b->bias + panel * PANEL);
        high += *(const vec *)(b->bias + panel * PANEL + LANES);
    }
    out[0] = b->adds ? out[0] + low : low;
    out[1] = b->adds ? out[1] + high : high;
}

/* `num` tokens whose numbers are `token_step` apart for the same input, and `in_step` for the next one. */
CACHED void multiply_tile(const PanelBlock *b, const void *weights, int64_t panel, int64_t token, const float *x,
                          int64_t token_step, int64_t in_step, int num, int kind) {
    const char *w = weights;
    int64_t in = b->in, step = cached_bytes(kind);
    vec low[MAX_TILE], high[MAX_TILE];
    _Pragma("GCC unroll 16") for (int t = 0; t < num; t++) low[t] = high[t] = (vec){0};
    for (int64_t i = 0; i < in; i++, w += PANEL * step, x += in_step) {
        vec first = cached_vec(w, kind), second = cached_vec(w + LANES * step, kind);
        __builtin_prefetch(w + PREFETCH_BYTES);
        if (kind == CACHED_FLOAT32) __builtin_prefetch(w + PREFETCH_BYTES + LANES * step);
        _Pragma("GCC unroll 16") for (int t = 0; t < num; t++) {
            float value = x[t * token_step];
            low[t] += first * value;
            high[t] += second * value;
        }
    }
    _Pragma("GCC unroll 16") for (int t = 0; t < num; t++) finish(b, panel, token + t, low[t], high[t]);
}

/* For tokens as they lie and panels of each kind, and for packed tokens and panels of float32. */
#define DEFINE_ROWS(T, KIND)                                                                                           \
    static void KIND##_rows_##T(const PanelBlock *b, const void *w, int64_t panel, int64_t token) {                    \
        multiply_tile(b, w, panel, token, b->x + token * b->x_stride, b->x_stride, 1, T, KIND);                        \
    }
#define DEFINE_TILE(T)                                                                                                 \
    DEFINE_ROWS(T, CACHED_FLOAT32)                                                                                     \
    DEFINE_ROWS(T, CACHED_FLOAT16)                                                                                     \
    DEFINE_ROWS(T, CACHED_BFLOAT16)                                                                                    \
    static void packed_##T(const PanelBlock *b, const void *w, int64_t panel, int64_t token) {                         \
        multiply_tile(b, w, panel, token, b->x + token * b->in, 1, T, T, CACHED_FLOAT32);                              \
    }
DEFINE_TILE(1)
DEFINE_TILE(2)
DEFINE_TILE(3)
DEFINE_TILE(4)
DEFINE_TILE(5)
DEFINE_TILE(6)
#if MAX_TILE > 6
DEFINE_TILE(7)
DEFINE_TILE(8)
DEFINE_TILE(9)
DEFINE_TILE(10)
DEFINE_TILE(11)
DEFINE_TILE(12)
#define SIZES(NAME)                                                                                                    \
    {NULL, NAME##1, NAME##2, NAME##3, NAME##4, NAME##5, NAME##6, NAME##7, NAME##8, NAME##9, NAME##10, NAME##11, NAME##12}
#else
#define SIZES(NAME) {NULL, NAME##1, NAME##2, NAME##3, NAME##4, NAME##5, NAME##6}
#endif

typedef void (*Tile)(const PanelBlock *, const void *, int64_t, int64_t);
static const Tile row_tiles[3][MAX_TILE + 1] = {SIZES(CACHED_FLOAT32_rows_), SIZES(CACHED_FLOAT16_rows_),
                                                SIZES(CACHED_BFLOAT16_rows_)};
static const Tile packed_tiles[MAX_TILE + 1] = SIZES(packed_);

static int64_t tile_size(int64_t left) { return left < MAX_TILE ? left : MAX_TILE; }

void slip_pack_tokens(const float *x, int64_t stride, int64_t tokens, int64_t in, float *packed) {
    for (int64_t token = 0; token < tokens; token += MAX_TILE) {
        int64_t num = tile_size(tokens - token);
        const float *from = x + token * stride;
        float *to = packed + token * in;
        if (num == MAX_TILE) /* a number that compilers know */
            for (int64_t i = 0; i < in; i++)
                for (int64_t t = 0; t < MAX_TILE; t++) to[i * MAX_TILE + t] = from[t * stride + i];
        else
            for (int64_t i = 0; i < in; i++)
                for (int64_t t = 0; t < num; t++) to[i * num + t] = from[t * stride + i];
    }
}

static void widen_float16(const char *from, int64_t size, float *to) {
    for (int64_t i = 0; i < size; i += LANES) *(vec *)(to + i) = widen_half(from + 2 * i);
}

static void widen_bfloat16(const char *from, int64_t size, float *to) {
    for (int64_t i = 0; i < size; i += LANES) *(vec *)(to + i) = widen_bfloat(from + 2 * i);
}

void slip_panel_block(const PanelBlock *b, int64_t first, int64_t end) {
    int is_packed = b->x_stride == PACKED, kind = b->panels.kind;
    const Tile *tiles = is_packed ? packed_tiles : row_tiles[kind];
    for (int64_t panel = first; panel < end; panel++) {
        const void *w = cached_at(b->panels.numbers, panel * PANEL * b->in, kind);
        if (is_packed && kind != CACHED_FLOAT32) {
            (kind == CACHED_FLOAT16 ? widen_float16 : widen_bfloat16)(w, PANEL * b->in, b->room);
            w = b->room;
        }
        for (int64_t token = 0; token < b->tokens; token += MAX_TILE)
            tiles[tile_size(b->tokens - token)](b, w, panel, token);
    }
}

int64_t slip_num_panels(int64_t out_size, int gated) { return num_panels(out_size, gated); }

int64_t slip_panel_room(int64_t in) { return PANEL * in; }

static PanelBlock block_of(const Product *p, int64_t token, int64_t tokens) {
    return (PanelBlock){.x = p->x + token * p->x_stride,
                        .bias = p->bias,
                        .panels = p->panels,
                        .out = p->out + token * p->out_size,
                        .x_stride = p->x_stride,
                        .out_stride = p->out_size,
                        .tokens = tokens,
                        .in = p->in,
                        .out_size = p->out_size,
                        .gated = p->gated};
}

static void multiply_panels(const void *arg, int64_t first, int64_t end) {
    const Product *p = arg;
    PanelBlock b = block_of(p, 0, p->tokens);
    slip_panel_block(&b, first, end);
}

/* Pieces are groups of panels, of one block of tokens after the other. */
static void multiply_blocks(const void *arg, int64_t first, int64_t end) {
    const Product *p = arg;
    int64_t panels = num_panels(p->out_size, p->gated), groups = (panels + p->group - 1) / p->group, packed = -1;
    float *memory = slip_scratch((size_t)((p->block + PANEL) * p->in) * sizeof(float));
    for (int64_t piece = first; piece < end; piece++) {
        int64_t token = piece / groups * p->block, from = piece % groups * p->group;
        int64_t to = from + p->group < panels ? from + p->group : panels;
        PanelBlock b = block_of(p, token, p->tokens - token < p->block ? p->tokens - token : p->block);
        if (memory) { /* without it slower, and the same */
            if (packed != token) slip_pack_tokens(b.x, p->x_stride, b.tokens, p->in, memory);
            packed = token;
            b.x = memory;
            b.x_stride = PACKED;
            b.room = memory + p->block * p->in;
        }
        slip_panel_block(&b, from, to);
    }
}

int64_t slip_panel_width(void) { return PANEL; }

/* Tokens of a block: as many as the cache has room for, in blocks of about equal size for all threads. */
static int64_t block_size(int64_t tokens, int64_t in, int num_threads) {
    int64_t largest = BLOCK_FLOATS / in / MAX_TILE * MAX_TILE, num_tiles = (tokens + MAX_TILE - 1) / MAX_TILE;
    if (largest < 2 * MAX_TILE) largest = 2 * MAX_TILE;
    int64_t blocks = (tokens + largest - 1) / largest;
    blocks = (blocks + num_threads - 1) / num_threads * num_threads;
    return (num_tiles + blocks - 1) / blocks * MAX_TILE;
}

void slip_panel_linear(const float *x, int64_t x_stride, const void *panels, int kind, const float *bias, float *out,
                       int64_t tokens, int64_t in, int64_t out_size, int gated, int num_threads) {
    Product p = {x, bias, {panels, kind}, out, x_stride, tokens, in, out_size, 0, 0, gated};
    int64_t count = num_panels(out_size, gated);
    if (num_threads < 1) num_threads = 1;
    if (tokens <= 2 * MAX_TILE) {
        /* Pieces small enough that the last one is soon done, large enough that taking one costs nothing. */
        int64_t piece = count / (num_threads * 8);
        slip_spread(multiply_panels, &p, count, piece > 0 ? piece : 1, count * in * tokens > 4096 ? num_threads : 1);
        return;
    }
    p.block = block_size(tokens, in, num_threads);
    int64_t blocks = (tokens + p.block - 1) / p.block, groups = (4 * num_threads + blocks - 1) / blocks;
    if (groups > (count + 3) / 4) groups = (count + 3) / 4; /* packing is to be a small part of a piece */
    p.group = (count + groups - 1) / groups;
    slip_spread(multiply_blocks, &p, blocks * ((count + p.group - 1) / p.group), 1, num_threads);
}
