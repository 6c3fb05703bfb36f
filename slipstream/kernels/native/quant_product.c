/* Matrix products with quantised weights: activations brought into form, panels handed to threads, results written. */
#include "kernels.h"
#include "quant_format.h"
#include "threads.h"
#include "vectors.h"

#include <stdlib.h>

#define LARGEST_TWO_DIGITS 32600.0f     /* below 127 * 257, so that no digit overflows */
#define LARGEST_THREE_DIGITS 8355000.0f /* below 127 * 65793 */
/* With two planes, blocks with numbers above so many times the row's mean have all three digits. The others' rounding
 * is then at most 8 * 2^-15 / sqrt(12) = 7e-5 of the row, whatever outliers it has. */
#define COARSE_MEANS 8.0f
#define INFINITY_BITS 0x7f800000
#define SMALLEST_ACTIVATION 1e-31f       /* of a block; where all are smaller they count as zeros */
#define CACHED_ACTIVATION_BYTES (256 * 1024) /* of the tokens that share a pass over the weights */

typedef struct {
    Activations to;
    const float *x;
    int64_t in;
} Preparation;

/* One block as fixed point in signed digits, the highest first; two of them if no number is above `coarse`. A number that
 * is none makes the scale none, too. */
static void quantise_block(const float *x, float coarse, int8_t *digits, float *scales, uint8_t *fine) {
    int32_t bits[BLOCK], fixed[BLOCK], largest_bits = 0;
    memcpy(bits, x, sizeof bits);
    /* Without their signs, floats are in the order of their bits; infinity and what is no number come last. */
#pragma omp simd reduction(max : largest_bits)
    for (int i = 0; i < BLOCK; i++) largest_bits = (bits[i] & INT32_MAX) > largest_bits ? bits[i] & INT32_MAX : largest_bits;
    float largest, scale, inverse = 0.0f;
    memcpy(&largest, &largest_bits, sizeof largest);
    *fine = largest > coarse;
    float top = *fine ? LARGEST_THREE_DIGITS : LARGEST_TWO_DIGITS;
    if (largest_bits >= INFINITY_BITS)
        scale = NAN;
    else if (largest < SMALLEST_ACTIVATION)
        scale = 0.0f;
    else {
        scale = largest * (1.0f / top);
        inverse = top / largest;
    }
    if (inverse == 0.0f) {
        memset(digits, 0, DIGITS * BLOCK);
        for (int i = 0; i < 4; i++) scales[i] = scale;
        return;
    }
    int32_t sums[2] = {0, 0};
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) fixed[i] = (int32_t)rintf(x[i] * inverse);
    for (int half = 0; half < 2; half++) {
        int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < 16; i++) sum += fixed[16 * half + i];
        sums[half] = sum;
    }
    /* Rounding at a digit's border makes the lower digits signed. */
    if (!*fine) memset(digits + 2 * BLOCK, 0, BLOCK);
    for (int p = *fine ? 2 : 1; p >= 0; p--) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) {
            digits[p * BLOCK + i] = (int8_t)fixed[i];
            fixed[i] = (fixed[i] + 128) >> 8;
        }
    }
    scales[0] = scale;
    scales[1] = scale * (float)(sums[0] + sums[1]);
    scales[2] = scale * (float)sums[0];
    scales[3] = scale * (float)sums[1];
}

/* Sums in an order of their own, not the vector's, so that all machines agree. */
static void sum_block(const float *x, float *scales) {
    float sums[16];
    for (int i = 0; i < 16; i++) sums[i] = x[i] + x[i + 16];
    for (int size = 8; size > 0; size /= 2)
        for (int i = 0; i < size; i++) sums[i] += sums[i + size];
    scales[1] = sums[0];
}

/* The size up to which two digits do for a block. */
static float coarse_size(const float *x, int64_t in) {
    float sums[16] = {0}, sum = 0.0f;
    int64_t i = 0;
    for (; i + 16 <= in; i += 16)
        for (int lane = 0; lane < 16; lane++) sums[lane] += fabsf(x[i + lane]);
    for (; i < in; i++) sum += fabsf(x[i]);
    for (int lane = 0; lane < 16; lane++) sum += sums[lane];
    return COARSE_MEANS * sum / (float)in;
}

static void prepare_tokens(const void *arg, int64_t first, int64_t end) {
    const Preparation *p = arg;
    const Activations *to = &p->to;
    for (int64_t token = first; token < end; token++) {
        float coarse = to->planes == 2 ? coarse_size(p->x + token * p->in, p->in) : -1.0f;
        for (int64_t block = 0; block < to->blocks; block++) {
            int64_t at = block_at(to, token, block), start = block * BLOCK, left = p->in - start;
            const float *x = p->x + token * p->in + start;
            float padded[BLOCK] = {0};
            if (left < BLOCK) {
                if (left > 0) memcpy(padded, x, (size_t)left * sizeof(float));
                x = padded;
            }
            if (to->planes) {
                quantise_block(x, coarse, to->digits + at * DIGITS * BLOCK, to->scales + 4 * at, to->fine + at);
            } else {
                memcpy(to->values + at * BLOCK, x, sizeof padded);
                sum_block(x, to->scales + 4 * at);
            }
        }
    }
}

int slip_has_byte_products(void) { return HAS_BYTE_PRODUCTS; }

typedef struct {
    const Matrix *matrix;
    const Activations *x;
    const float *bias;
    float *out;
} QuantProduct;

static void multiply_panel(const Segment *s, int64_t panel, int64_t in, const Activations *x, int64_t token,
                           int64_t num_tokens, float *sums) {
    Kind kind = kind_of((int)s->kind);
    const QuantTile *tiles = x->planes ? slip_plane_tiles[x->planes - 2][s->kind] : slip_float_tiles[s->kind];
    const uint8_t *panels = s->panels + panel * panel_bytes(kind, s->group, in);
    tiles[num_tokens - 1](panels, num_groups(kind, s->group, in), s->group, x, token, sums);
}

/* One panel of the matrix and a few tokens: the sums, or where gated silu of them times those of the other half. */
static void finish_panel(const QuantProduct *p, const Segment *s, int64_t panel, int64_t first_row, int64_t token,
                         int64_t num_tokens) {
    const Matrix *m = p->matrix;
    float sums[MAX_QUANT_TILE * PANEL_ROWS], values[MAX_QUANT_TILE * PANEL_ROWS];
    multiply_panel(s, panel, m->in, p->x, token, num_tokens, sums);
    if (m->gated) multiply_panel(s + 1, panel, m->in, p->x, token, num_tokens, values);
    int64_t row = panel * PANEL_ROWS, width = s->rows - row < PANEL_ROWS ? s->rows - row : PANEL_ROWS;
    for (int64_t t = 0; t < num_tokens; t++) {
        const float *sum = sums + t * PANEL_ROWS, *value = values + t * PANEL_ROWS;
        float *out = p->out + (token + t) * m->out + first_row + row;
        const float *bias = p->bias ? p->bias + first_row + row : NULL;
        if (m->gated)
            for (int64_t i = 0; i < width; i++) out[i] = sum[i] / (1.0f + fast_exp(-sum[i])) * value[i];
        else
            for (int64_t i = 0; i < width; i++) out[i] = bias ? sum[i] + bias[i] : sum[i];
    }
}

static int64_t num_panels(const Segment *s) { return (s->rows + PANEL_ROWS - 1) / PANEL_ROWS; }

static int64_t num_segments(const Matrix *m) { return m->gated ? 1 : m->num_segments; }

/* Panels are numbered through all segments. Tokens go in parts that stay in the cache while the panels pass by. */
static void multiply_panels(const void *arg, int64_t first, int64_t end) {
    const QuantProduct *p = arg;
    const Activations *x = p->x;
    int64_t token_bytes = x->blocks * (x->planes ? DIGITS * BLOCK : 4 * BLOCK);
    int64_t part = CACHED_ACTIVATION_BYTES / token_bytes / MAX_QUANT_TILE * MAX_QUANT_TILE;
    if (part < MAX_QUANT_TILE) part = MAX_QUANT_TILE;
    for (int64_t from = 0; from < x->tokens; from += part) {
        int64_t to = from + part < x->tokens ? from + part : x->tokens, start = 0, row = 0;
        const Segment *s = p->matrix->segments;
        for (int64_t i = first; i < end; i++) {
            for (; i >= start + num_panels(s); s++) {
                start += num_panels(s);
                row += s->rows;
            }
            for (int64_t token = from; token < to; token += MAX_QUANT_TILE)
                finish_panel(p, s, i - start, row, token, to - token < MAX_QUANT_TILE ? to - token : MAX_QUANT_TILE);
        }
    }
}

static int multiply_quantised(const Matrix *m, const float *x, const float *bias, float *out, int64_t tokens, int planes,
                              int num_threads) {
    int64_t blocks = 0, panels = 0;
    for (int64_t i = 0; i < m->num_segments; i++) {
        const Segment *s = m->segments + i;
        int64_t own = num_groups(kind_of((int)s->kind), s->group, m->in) * group_blocks(kind_of((int)s->kind), s->group);
        blocks = own > blocks ? own : blocks;
        if (i < num_segments(m)) panels += num_panels(s);
    }
    int64_t together = tokens < MAX_QUANT_TILE ? tokens : MAX_QUANT_TILE;
    int64_t count = (tokens + together - 1) / together * together * blocks;
    int64_t block_bytes_in = planes ? DIGITS * BLOCK : BLOCK * (int64_t)sizeof(float);
    float *memory = aligned_alloc(64, (size_t)((count * (4 * (int64_t)sizeof(float) + block_bytes_in + 1) + 63) / 64 * 64));
    if (!memory) return 1;
    float *numbers = memory + count * 4;
    uint8_t *fine = (uint8_t *)numbers + count * block_bytes_in;
    Preparation prepared = {{tokens, blocks, together, planes, (int8_t *)numbers, numbers, memory, fine}, x, m->in};
    slip_spread(prepare_tokens, &prepared, tokens, 8, tokens * m->in > 65536 ? num_threads : 1);
    QuantProduct p = {m, &prepared.to, bias, out};
    int64_t piece = panels / (num_threads * 8);
    slip_spread(multiply_panels, &p, panels, piece > 0 ? piece : 1, m->out * m->in * tokens > 16384 ? num_threads : 1);
    free(memory);
    return 0;
}

int slip_product(const Matrix *m, const float *x, const float *bias, float *out, int64_t tokens, int planes,
                 int num_threads) {
    if (!m->panels) return multiply_quantised(m, x, bias, out, tokens, planes, num_threads);
    slip_panel_linear(x, m->in, m->panels, (int)m->panel_kind, bias, out, tokens, m->in, m->out, (int)m->gated, num_threads);
    return 0;
}
