/* Matrix product with a weight in panels: [panels][in][PANEL], a panel being PANEL neighbouring outputs, zero-padded.
 *
 * A tile is one panel times a few tokens, all its sums in registers. The panel streams through once, in the order in
 * which it lies in memory, so a few tokens cost hardly more than one. Every output is one chain of fused additions over
 * `in`, whatever the tile: a token's result does not depend on the tokens beside it.
 */
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

#define PREFETCH_FLOATS 1024 /* ahead, about the latency of memory */

typedef struct {
    const float *x, *weight, *bias; /* bias may be NULL */
    float *out;
    int64_t tokens, in, out_size;
    int gated; /* a panel is LANES gates and the LANES values they gate */
} Product;

/* Writes what a tile has for one token: the sums of a panel, or silu(gate) * value of its two halves. */
static void finish(const Product *p, int64_t panel, int64_t token, const float *sums) {
    int64_t step = p->gated ? LANES : PANEL, first = panel * step, width = p->out_size - first;
    float *out = p->out + token * p->out_size + first;
    if (width > step) width = step;
    if (p->gated)
        for (int64_t i = 0; i < width; i++) out[i] = sums[i] / (1.0f + fast_exp(-sums[i])) * sums[i + LANES];
    else
        for (int64_t i = 0; i < width; i++) out[i] = p->bias ? sums[i] + p->bias[first + i] : sums[i];
}

#define DEFINE_TILE(T)                                                                                                 \
    static void tile_##T(const Product *p, int64_t panel, int64_t token) {                                             \
        const float *x = p->x + token * p->in, *w = p->weight + panel * PANEL * p->in;                                 \
        int64_t in = p->in;                                                                                            \
        vec low[T], high[T];                                                                                           \
        _Pragma("GCC unroll 16") for (int t = 0; t < T; t++) low[t] = high[t] = (vec){0};                              \
        for (int64_t i = 0; i < in; i++, w += PANEL) {                                                                 \
            vec a = *(const vec *)w, b = *(const vec *)(w + LANES);                                                    \
            __builtin_prefetch(w + PREFETCH_FLOATS);                                                                   \
            __builtin_prefetch(w + PREFETCH_FLOATS + LANES);                                                           \
            _Pragma("GCC unroll 16") for (int t = 0; t < T; t++) {                                                     \
                float value = x[t * in + i];                                                                           \
                low[t] += a * value;                                                                                   \
                high[t] += b * value;                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
        for (int t = 0; t < T; t++) {                                                                                  \
            float sums[PANEL];                                                                                         \
            *(vec *)sums = low[t];                                                                                     \
            *(vec *)(sums + LANES) = high[t];                                                                          \
            finish(p, panel, token + t, sums);                                                                         \
        }                                                                                                              \
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
#endif

typedef void (*Tile)(const Product *, int64_t, int64_t);
static const Tile tiles[MAX_TILE + 1] = {
    NULL, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6,
#if MAX_TILE > 6
    tile_7, tile_8, tile_9, tile_10, tile_11, tile_12,
#endif
};

static void multiply_panels(const void *arg, int64_t first, int64_t end) {
    const Product *p = arg;
    for (int64_t panel = first; panel < end; panel++)
        for (int64_t token = 0; token < p->tokens; token += MAX_TILE)
            tiles[p->tokens - token < MAX_TILE ? p->tokens - token : MAX_TILE](p, panel, token);
}

int64_t slip_panel_width(void) { return PANEL; }

void slip_panel_linear(const float *x, const float *panels, const float *bias, float *out, int64_t tokens, int64_t in,
                       int64_t out_size, int gated, int num_threads) {
    Product p = {x, panels, bias, out, tokens, in, out_size, gated};
    int64_t step = gated ? LANES : PANEL, num_panels = (out_size + step - 1) / step;
    /* Pieces small enough that the last one is soon done, large enough that taking one costs nothing. */
    int64_t piece = num_panels / (num_threads * 8);
    slip_spread(multiply_panels, &p, num_panels, piece > 0 ? piece : 1, num_panels * in * tokens > 4096 ? num_threads : 1);
}
