/* Attention over a paged cache of keys and values. */
#include "cached.h"
#include "kernels.h"
#include "threads.h"
#include "vectors.h"
#include <stdatomic.h>
#include <stdlib.h>

typedef struct {
    const float *q;
    const char *cache;
    const int32_t *starts, *query_lens, *seq_lens, *block_table, *seq_starts; /* seq_starts may be NULL */
    float *out;
    int64_t heads, kv_heads, dim, page_size, table_stride;
    float scale;
    int64_t window, longest;
    int causal; /* otherwise a token sees all that is there of its request; without a window */
    int alone;  /* each token by itself, however many of its request there are: a result depends on its own keys alone */
    _Atomic int failed;
} Attention;

/* The last position that query token j of a request sees. */
static int64_t last_seen(const Attention *a, int64_t request, int64_t j) {
    int64_t length = a->seq_lens[request];
    return a->causal ? length - a->query_lens[request] + j : length - 1;
}

/* The first slot that a query token sees. Where it comes after the token's own the token sees nothing. */
static int64_t first_seen(const Attention *a, int64_t request, int64_t position) {
    int64_t start = a->seq_starts ? a->seq_starts[request] : 0;
    int64_t first = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
    return start > first ? start : first;
}

/* Keys from position `first` on that lie side by side, as many as `run` says; values are `side` numbers further. */
CACHED const char *keys_at(const Attention *a, const int32_t *pages, int64_t kv_head, int64_t first, int64_t end, int64_t *run,
                           int kind) {
    int64_t page = first / a->page_size, offset = first % a->page_size, left = a->page_size - offset;
    *run = left < end - first ? left : end - first;
    return cached_at(a->cache, (((int64_t)pages[page] * 2 * a->kv_heads + kv_head) * a->page_size + offset) * a->dim, kind);
}

/* Query heads of a group that go over keys and values together, so that each is read and widened once for all of them;
 * where all tokens see the same, tokens instead. What one gets is summed up in the same order however many go with it. */
#define MAX_HEADS 4
#if QUERY_ROWS == 8 /* as many as there are registers for sums that do not wait for each other */
#define KEYS_AT_ONCE 4
#define VECTORS_AT_ONCE 4 /* of a value */
#else
#define KEYS_AT_ONCE 2
#define VECTORS_AT_ONCE 2
#endif

typedef struct {
    const Attention *a;
    const int32_t *pages;
    int64_t kv_head, first, end; /* positions that are seen */
    const float *query;
    float *scores, *out; /* scores: one row a head */
    int64_t stride;      /* of scores */
    int64_t step;        /* from head to head, in query and out */
} Seen;

#define PAGES_AHEAD 2

/* What lies so many pages after a position, to be asked for while that is worked on: pages are too small and too far
 * apart for the machine to prefetch them. Towards the end it is what is there already. */
CACHED const char *ahead(const Seen *s, int64_t position, const char *here, int kind) {
    int64_t far = position / s->a->page_size + PAGES_AHEAD, side = s->a->kv_heads * s->a->page_size * s->a->dim;
    if (far * s->a->page_size >= s->end) return here;
    return here + ((int64_t)s->pages[far] - s->pages[far - PAGES_AHEAD]) * 2 * side * cached_bytes(kind);
}

CACHED void fetch(const char *p, int64_t size) {
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(p + i);
}

/* Sums of values by weight, `num` vectors of them from dimension i on. */
CACHED void mix_vectors(const Seen *s, int num, int64_t i, int heads, int kind) {
    int64_t dim = s->a->dim, side = s->a->kv_heads * s->a->page_size * dim, run;
    vec sums[MAX_HEADS][VECTORS_AT_ONCE] = {{{0}}};
    for (int64_t p = s->first; p < s->end; p += run) {
        const char *value = cached_at(keys_at(s->a, s->pages, s->kv_head, p, s->end, &run, kind), side + i, kind);
        int64_t far = ahead(s, p, value, kind) - value;
        for (int64_t k = 0; k < run; k++, value = cached_at(value, dim, kind)) {
            fetch(value + far, num * LANES * cached_bytes(kind));
            _Pragma("GCC unroll 4") for (int n = 0; n < num; n++) {
                vec v = cached_vec(cached_at(value, n * LANES, kind), kind);
                _Pragma("GCC unroll 4") for (int h = 0; h < heads; h++) sums[h][n] += v * s->scores[h * s->stride + p + k];
            }
        }
    }
    _Pragma("GCC unroll 4") for (int h = 0; h < heads; h++)
        _Pragma("GCC unroll 4") for (int n = 0; n < num; n++) *(vec *)(s->out + h * s->step + i + n * LANES) = sums[h][n];
}

CACHED void mix_values(const Seen *s, int heads, int kind) {
    int64_t dim = s->a->dim, side = s->a->kv_heads * s->a->page_size * dim, run, i = 0;
    for (; i + VECTORS_AT_ONCE * LANES <= dim; i += VECTORS_AT_ONCE * LANES)
        mix_vectors(s, VECTORS_AT_ONCE, i, heads, kind);
    for (; i + LANES <= dim; i += LANES) mix_vectors(s, 1, i, heads, kind);
    for (; i < dim; i++) {
        for (int h = 0; h < heads; h++) {
            const float *weights = s->scores + h * s->stride;
            float sum = 0.0f;
            for (int64_t p = s->first; p < s->end; p += run) {
                const char *value = cached_at(keys_at(s->a, s->pages, s->kv_head, p, s->end, &run, kind), side + i, kind);
                for (int64_t k = 0; k < run; k++)
                    sum += cached_number(cached_at(value, k * dim, kind), kind) * weights[p + k];
            }
            s->out[h * s->step + i] = sum;
        }
    }
}

/* Products of queries with keys that lie side by side, the first of them at position p. */
CACHED void multiply_keys(const Seen *s, const char *keys, int64_t p, int64_t num_keys, int heads, int kind) {
    int64_t dim = s->a->dim, k = 0;
    const char *next = ahead(s, p, keys, kind);
    for (; k < num_keys; k += KEYS_AT_ONCE) {
        fetch(cached_at(next, k * dim, kind), KEYS_AT_ONCE * dim * cached_bytes(kind));
        const char *key[KEYS_AT_ONCE];
        vec sums[KEYS_AT_ONCE][MAX_HEADS];
        int64_t i = 0;
        _Pragma("GCC unroll 4") for (int n = 0; n < KEYS_AT_ONCE; n++) {
            key[n] = cached_at(keys, (k + n < num_keys ? k + n : num_keys - 1) * dim, kind);
            _Pragma("GCC unroll 4") for (int h = 0; h < heads; h++) sums[n][h] = (vec){0};
        }
        for (; i + LANES <= dim; i += LANES)
            _Pragma("GCC unroll 4") for (int n = 0; n < KEYS_AT_ONCE; n++) {
                vec x = cached_vec(cached_at(key[n], i, kind), kind);
                _Pragma("GCC unroll 4") for (int h = 0; h < heads; h++)
                    sums[n][h] += *(const vec *)(s->query + h * s->step + i) * x;
            }
        _Pragma("GCC unroll 4") for (int n = 0; n < KEYS_AT_ONCE; n++)
            _Pragma("GCC unroll 4") for (int h = 0; h < heads; h++) {
                float dot = vec_sum(sums[n][h]);
                for (int64_t rest = i; rest < dim; rest++)
                    dot += s->query[h * s->step + rest] * cached_number(cached_at(key[n], rest, kind), kind);
                if (k + n < num_keys) s->scores[h * s->stride + p + k + n] = dot * s->a->scale;
            }
    }
}

/* From scores to weights that sum to one. */
static void weigh(float *scores, int64_t first, int64_t end) {
    float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t p = first; p < end; p++) largest = scores[p] > largest ? scores[p] : largest;
#pragma omp simd reduction(+ : sum)
    for (int64_t p = first; p < end; p++) {
        scores[p] = fast_exp(scores[p] - largest);
        sum += scores[p];
    }
    float share = 1.0f / sum;
#pragma omp simd
    for (int64_t p = first; p < end; p++) scores[p] *= share;
}

CACHED void attend_heads(const Seen *s, int heads, int kind) {
    int64_t run;
    for (int64_t p = s->first; p < s->end; p += run) {
        const char *keys = keys_at(s->a, s->pages, s->kv_head, p, s->end, &run, kind);
        multiply_keys(s, keys, p, run, heads, kind);
    }
    for (int h = 0; h < heads; h++) weigh(s->scores + h * s->stride, s->first, s->end);
    mix_values(s, heads, kind);
}

CACHED void attend_some(const Seen *s, int64_t heads, int kind) {
    switch (heads) {
    case 1: attend_heads(s, 1, kind); break;
    case 2: attend_heads(s, 2, kind); break;
    case 3: attend_heads(s, 3, kind); break;
    default: attend_heads(s, MAX_HEADS, kind);
    }
}

/* All query heads of one group, query tokens `from` to `num_query` of one request. */
CACHED void attend(const Attention *a, int64_t request, int64_t kv_head, int64_t from, int64_t num_query, int64_t stride,
                   float *scores, int kind) {
    int64_t begin = a->starts[request], group = a->heads / a->kv_heads;
    int64_t tokens = !a->causal && group == 1 ? MAX_HEADS : 1; /* that go together */
    const int32_t *pages = a->block_table + request * a->table_stride;
    for (int64_t j = from; j < num_query; j += tokens) {
        int64_t end = last_seen(a, request, j) + 1, first = first_seen(a, request, end - 1);
        for (int64_t g = 0; g < group; g += MAX_HEADS) {
            int64_t at = ((begin + j) * a->heads + kv_head * group + g) * a->dim;
            int64_t step = (tokens > 1 ? a->heads : 1) * a->dim;
            Seen seen = {a, pages, kv_head, first, end, a->q + at, scores, a->out + at, stride, step};
            attend_some(&seen, tokens > 1 ? num_query - j : group - g, kind);
        }
    }
}

/* Many query tokens of one request and one key head: keys are turned once, so that a vector holds neighbouring keys, and
 * each is then used for a tile of query rows (token, head of the group). `memory` holds turned keys, scores and where the
 * values are. */
CACHED void attend_many(const Attention *a, int64_t request, int64_t kv_head, int64_t first_query, int64_t end_query,
                        float *memory, int kind) {
    int64_t begin = a->starts[request], group = a->heads / a->kv_heads, dim = a->dim, side = a->kv_heads * a->page_size * dim;
    const int32_t *pages = a->block_table + request * a->table_stride;
    for (; first_query < end_query && first_seen(a, request, last_seen(a, request, first_query)) > last_seen(a, request, first_query);
         first_query++)
        memset(a->out + ((begin + first_query) * a->heads + kv_head * group) * dim, 0, (size_t)(group * dim) * sizeof(float));
    if (first_query == end_query) return;
    int64_t low = first_seen(a, request, last_seen(a, request, first_query));
    int64_t num_keys = last_seen(a, request, end_query - 1) + 1 - low, stride = (num_keys + PANEL - 1) / PANEL * PANEL;
    float *turned = memory, *scores = turned + dim * stride;
    const char **values = (const char **)(scores + QUERY_ROWS * stride);
    for (int64_t k = 0; k < stride; k++) {
        int64_t p = low + k;
        if (k < num_keys) {
            int64_t run;
            const char *key = keys_at(a, pages, kv_head, p, p + 1, &run, kind);
            values[k] = cached_at(key, side, kind);
            for (int64_t i = 0; i < dim; i++) turned[i * stride + k] = cached_number(cached_at(key, i, kind), kind);
        } else {
            for (int64_t i = 0; i < dim; i++) turned[i * stride + k] = 0.0f;
        }
    }
    int64_t num_rows = (end_query - first_query) * group;
    for (int64_t row = 0; row < num_rows; row += QUERY_ROWS) {
        const float *query[QUERY_ROWS];
        int64_t at[QUERY_ROWS], position[QUERY_ROWS], seen = 0;
        for (int t = 0; t < QUERY_ROWS; t++) {
            int64_t r = row + t < num_rows ? row + t : num_rows - 1, j = first_query + r / group;
            at[t] = ((begin + j) * a->heads + kv_head * group + r % group) * dim;
            query[t] = a->q + at[t];
            position[t] = last_seen(a, request, j) - low;
            seen = position[t] + 1 > seen ? position[t] + 1 : seen;
        }
        for (int64_t block = 0; block < seen; block += PANEL) {
            vec x[QUERY_ROWS], y[QUERY_ROWS];
            _Pragma("GCC unroll 8") for (int t = 0; t < QUERY_ROWS; t++) x[t] = y[t] = (vec){0};
            for (int64_t i = 0; i < dim; i++) {
                const float *keys = turned + i * stride + block;
                vec k0 = *(const vec *)keys, k1 = *(const vec *)(keys + LANES);
                _Pragma("GCC unroll 8") for (int t = 0; t < QUERY_ROWS; t++) {
                    x[t] += k0 * query[t][i];
                    y[t] += k1 * query[t][i];
                }
            }
            for (int t = 0; t < QUERY_ROWS; t++) {
                *(vec *)(scores + t * stride + block) = x[t] * a->scale;
                *(vec *)(scores + t * stride + block + LANES) = y[t] * a->scale;
            }
        }
        for (int t = 0; t < QUERY_ROWS; t++) {
            float *s = scores + t * stride, largest = -INFINITY, sum = 0.0f;
            int64_t end = position[t] + 1, first = first_seen(a, request, low + position[t]) - low;
            for (int64_t k = first; k < end; k++) largest = s[k] > largest ? s[k] : largest;
#pragma omp simd reduction(+ : sum)
            for (int64_t k = first; k < end; k++) {
                s[k] = fast_exp(s[k] - largest);
                sum += s[k];
            }
            float share = 1.0f / sum;
#pragma omp simd
            for (int64_t k = first; k < end; k++) s[k] *= share;
            for (int64_t k = 0; k < first; k++) s[k] = 0.0f;
            for (int64_t k = end; k < seen; k++) s[k] = 0.0f;
        }
        for (int64_t i = 0; i < dim; i += PANEL) {
            vec x[QUERY_ROWS], y[QUERY_ROWS];
            _Pragma("GCC unroll 8") for (int t = 0; t < QUERY_ROWS; t++) x[t] = y[t] = (vec){0};
            for (int64_t k = 0; k < seen; k++) {
                vec v0 = cached_vec(cached_at(values[k], i, kind), kind);
                vec v1 = cached_vec(cached_at(values[k], i + LANES, kind), kind);
                _Pragma("GCC unroll 8") for (int t = 0; t < QUERY_ROWS; t++) {
                    x[t] += v0 * scores[t * stride + k];
                    y[t] += v1 * scores[t * stride + k];
                }
            }
            for (int t = 0; t < QUERY_ROWS && row + t < num_rows; t++) {
                *(vec *)(a->out + at[t] + i) = x[t];
                *(vec *)(a->out + at[t] + i + LANES) = y[t];
            }
        }
    }
}

/* Few query tokens stay with `attend`, for there a token's result is the same however many are verified with it. */
#define FEW_QUERIES 8
#define QUERIES_A_PIECE 64

static int is_many(const Attention *a, int64_t request) {
    return !a->alone && a->query_lens[request] > FEW_QUERIES && a->dim % PANEL == 0;
}

static int64_t num_chunks(const Attention *a, int64_t request) {
    int64_t num_query = a->query_lens[request];
    if (!a->alone && !is_many(a, request)) return 1;
    if (num_query == 0) return 1;
    return (num_query + QUERIES_A_PIECE - 1) / QUERIES_A_PIECE;
}

/* Pieces are (request, chunk of its query tokens, key head). */
CACHED void attend_pieces(const void *arg, int64_t first, int64_t end, int kind) {
    Attention *a = (Attention *)arg;
    int64_t stride = (a->longest + PANEL - 1) / PANEL * PANEL;
    size_t num_floats = (size_t)((a->dim + QUERY_ROWS + 2) * stride + PANEL);
    float *memory = malloc(num_floats * sizeof(float));
    if (!memory) {
        atomic_store(&a->failed, 1);
        return;
    }
    int64_t request = 0, start = 0;
    for (int64_t i = first; i < end; i++) {
        while (i >= start + num_chunks(a, request) * a->kv_heads) start += num_chunks(a, request++) * a->kv_heads;
        int64_t chunk = (i - start) / a->kv_heads, kv_head = (i - start) % a->kv_heads;
        int64_t num_query = a->query_lens[request];
        if (a->seq_lens[request] == 0 || num_query == 0) continue;
        int64_t from = chunk * QUERIES_A_PIECE, to = from + QUERIES_A_PIECE;
        if (num_chunks(a, request) == 1 || to > num_query) to = num_query;
        if (is_many(a, request))
            attend_many(a, request, kv_head, from, to, memory, kind);
        else
            attend(a, request, kv_head, from, to, stride, memory, kind);
    }
    free(memory);
}

static void attend_float32(const void *arg, int64_t first, int64_t end) { attend_pieces(arg, first, end, CACHED_FLOAT32); }
static void attend_float16(const void *arg, int64_t first, int64_t end) { attend_pieces(arg, first, end, CACHED_FLOAT16); }
static void attend_bfloat16(const void *arg, int64_t first, int64_t end) { attend_pieces(arg, first, end, CACHED_BFLOAT16); }

/* Returns 0, or 1 when there is no memory for the scores. Padding after a request's tokens gives zero. Keys before
 * `seq_starts`, if that is not NULL, are not read. With `alone` a token's result is the same however many of its request
 * are computed with it. */
int slip_paged_attention(const float *q, const void *cache, const int32_t *starts, const int32_t *query_lens,
                         const int32_t *seq_lens, const int32_t *block_table, const int32_t *seq_starts, float *out,
                         int64_t requests, int64_t heads, int64_t kv_heads, int64_t dim, int64_t page_size,
                         int64_t table_stride, float scale, int64_t window, int causal, int alone, int kind,
                         int num_threads) {
    Attention a = {q,   cache,     starts,       query_lens, seq_lens, block_table, seq_starts, out, heads, kv_heads,
                   dim, page_size, table_stride, scale,      window,   0,           causal,     alone, 0};
    int64_t work = 0;
    for (int64_t r = 0; r < requests; r++) {
        a.longest = seq_lens[r] > a.longest ? seq_lens[r] : a.longest;
        int64_t alive = seq_lens[r] ? query_lens[r] : 0, dead = starts[r + 1] - starts[r] - alive;
        work += (int64_t)seq_lens[r] * alive * heads * dim;
        memset(out + (starts[r] + alive) * heads * dim, 0, (size_t)(dead * heads * dim) * sizeof(float));
    }
    int64_t num_pieces = 0;
    for (int64_t r = 0; r < requests; r++) num_pieces += num_chunks(&a, r) * kv_heads;
    /* Short contexts: one thread is done before another has come. */
    void (*const attend_kind[])(const void *, int64_t, int64_t) = {attend_float32, attend_float16, attend_bfloat16};
    slip_spread(attend_kind[kind], &a, num_pieces, 1, work > 100000 ? num_threads : 1);
    return atomic_load(&a.failed);
}
