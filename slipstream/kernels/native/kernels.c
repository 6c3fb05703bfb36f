/* Matrix products and the small operations between them, in plain C for CPUs.
 *
 * In torch each of the small ones is five to ten calls, and at one token a call costs more than the work. All arrays are
 * float32 and contiguous unless a stride says otherwise. The definitions are the torch bodies in the files of
 * slipstream/kernels that call these; tests compare the two.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Threads for loops. Whoever is there takes the next piece, and the caller waits for pieces that somebody has begun,
 * never for a thread that has not come: on a machine whose cores others use too, a team that must be complete at the
 * end of every loop waits for the scheduler a hundred times a step. Workers look for work for a moment and then sleep.
 */
typedef void (*Body)(const void *arg, int64_t first, int64_t end);

typedef struct {
    Body body;
    const void *arg;
    int64_t count, piece;
} Job;

#define MAX_WORKERS 255
#define LOOKS_BEFORE_SLEEP 20000 /* some ten microseconds to a hundred */

static struct {
    pthread_mutex_t owner; /* one loop at a time */
    pthread_mutex_t sleep;
    pthread_cond_t wake;
    Job job;
    _Atomic uint64_t claim; /* number of the job, and of its next piece */
    _Atomic int64_t done;   /* pieces */
    _Atomic int num_sleeping;
    int num_workers;
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Takes pieces of one job until none is left. The job is read before a piece is taken: as long as the number fits, the
 * job was still open then, and it stays open until the piece is done. */
static void take_pieces(uint64_t number) {
    for (;;) {
        uint64_t seen = atomic_load_explicit(&pool.claim, memory_order_acquire);
        Job job = pool.job;
        int64_t index = (int64_t)(uint32_t)seen;
        if (seen >> 32 != number || index * job.piece >= job.count) return;
        if (!atomic_compare_exchange_weak_explicit(&pool.claim, &seen, seen + 1, memory_order_acq_rel, memory_order_relaxed))
            continue;
        int64_t first = index * job.piece, end = first + job.piece;
        job.body(job.arg, first, end < job.count ? end : job.count);
        atomic_fetch_add_explicit(&pool.done, 1, memory_order_acq_rel);
    }
}

static void *work(void *unused) {
    (void)unused;
    uint64_t number = 0;
    for (;;) {
        uint64_t now = number;
        for (int look = 0; look < LOOKS_BEFORE_SLEEP && now == number; look++) {
            pause_briefly();
            now = atomic_load_explicit(&pool.claim, memory_order_acquire) >> 32;
        }
        if (now == number) {
            pthread_mutex_lock(&pool.sleep);
            atomic_fetch_add(&pool.num_sleeping, 1);
            while ((now = atomic_load(&pool.claim) >> 32) == number) pthread_cond_wait(&pool.wake, &pool.sleep);
            atomic_fetch_sub(&pool.num_sleeping, 1);
            pthread_mutex_unlock(&pool.sleep);
        }
        number = now;
        take_pieces(number);
    }
    return NULL;
}

/* Calls body for all of [0, count) in pieces, on up to num_threads threads. */
static void spread(Body body, const void *arg, int64_t count, int64_t piece, int num_threads) {
    if (num_threads <= 1 || count <= piece || pthread_mutex_trylock(&pool.owner)) {
        body(arg, 0, count);
        return;
    }
    while (pool.num_workers < num_threads - 1 && pool.num_workers < MAX_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL)) break;
        pthread_detach(thread);
        pool.num_workers++;
    }
    uint64_t number = (atomic_load(&pool.claim) >> 32) + 1;
    int64_t num_pieces = (count + piece - 1) / piece;
    /* The old job has no piece left, and must not seem to have one while the new one is written over it. */
    atomic_store(&pool.claim, (number - 1) << 32 | 0xffffffffu);
    atomic_thread_fence(memory_order_seq_cst);
    pool.job = (Job){body, arg, count, piece};
    atomic_store(&pool.done, 0);
    atomic_store(&pool.claim, number << 32);
    if (atomic_load(&pool.num_sleeping)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    take_pieces(number);
    while (atomic_load_explicit(&pool.done, memory_order_acquire) < num_pieces) pause_briefly();
    pthread_mutex_unlock(&pool.owner);
}

/* Vectors as wide as the machine's; a panel is two of them. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define PANEL (2 * LANES)
#if defined(__AVX512F__) || defined(__aarch64__) /* 32 vector registers: sums, two of the weight, one of the token */
#define MAX_TILE 12
#define QUERY_ROWS 8
#else
#define MAX_TILE 6
#define QUERY_ROWS 4
#endif
typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

/* e^x to about one unit in the last place, in a form that compilers vectorise. NaN stays NaN. */
static inline float fast_exp(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float value; } scale;
    scale.bits = ((int32_t)n + 127) << 23;
    return p * scale.value;
}

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
                         int64_t v_stride, const float *cosine, const float *sine, float *cache, const int64_t *page_ids,
                         const int64_t *offsets, float *q_out, int64_t tokens, int64_t heads, int64_t kv_heads,
                         int64_t dim, int64_t rotary_dim, int64_t page_size) {
    int64_t head_bytes = dim * (int64_t)sizeof(float), side = kv_heads * page_size * dim;
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cosine + t * rotary_dim, *s = sine + t * rotary_dim;
        for (int64_t h = 0; h < heads; h++)
            rotate(q + t * q_stride + h * dim, c, s, q_out + (t * heads + h) * dim, rotary_dim, dim);
        float *keys = cache + page_ids[t] * 2 * side;
        for (int64_t h = 0; h < kv_heads; h++) {
            float *slot = keys + (h * page_size + offsets[t]) * dim;
            rotate(k + t * k_stride + h * dim, c, s, slot, rotary_dim, dim);
            memcpy(slot + side, v + t * v_stride + h * dim, (size_t)head_bytes);
        }
    }
}

typedef struct {
    const float *q, *cache;
    const int32_t *starts, *query_lens, *seq_lens, *block_table, *seq_starts; /* seq_starts may be NULL */
    float *out;
    int64_t heads, kv_heads, dim, page_size, table_stride;
    float scale;
    int64_t window, longest;
    _Atomic int failed;
} Attention;

/* The first slot that a query token sees. Where it is behind the token's own the token sees nothing. */
static int64_t first_seen(const Attention *a, int64_t request, int64_t position) {
    int64_t start = a->seq_starts ? a->seq_starts[request] : 0;
    int64_t first = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
    return start > first ? start : first;
}

/* All query heads of one group, all query tokens of one request: keys are read once for all of them. */
static void attend(const Attention *a, int64_t request, int64_t kv_head, float *scores) {
    int64_t begin = a->starts[request], num_query = a->query_lens[request], length = a->seq_lens[request];
    int64_t group = a->heads / a->kv_heads, dim = a->dim, side = a->kv_heads * a->page_size * dim;
    const int32_t *pages = a->block_table + request * a->table_stride;
    for (int64_t j = 0; j < num_query; j++) {
        int64_t position = length - num_query + j, first = first_seen(a, request, position);
        for (int64_t g = 0; g < group; g++) {
            int64_t at = ((begin + j) * a->heads + kv_head * group + g) * dim;
            const float *query = a->q + at;
            float *result = a->out + at, largest = -INFINITY, sum = 0.0f;
            for (int64_t p = first; p <= position; p++) {
                int64_t slot = (int64_t)pages[p / a->page_size] * 2 * side + (kv_head * a->page_size + p % a->page_size) * dim;
                const float *key = a->cache + slot;
                float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
                for (int64_t i = 0; i < dim; i++) dot += query[i] * key[i];
                scores[p] = dot * a->scale;
                largest = scores[p] > largest ? scores[p] : largest;
            }
#pragma omp simd reduction(+ : sum)
            for (int64_t p = first; p <= position; p++) {
                scores[p] = fast_exp(scores[p] - largest);
                sum += scores[p];
            }
            memset(result, 0, (size_t)dim * sizeof(float));
            for (int64_t p = first; p <= position; p++) {
                int64_t slot = (int64_t)pages[p / a->page_size] * 2 * side + (kv_head * a->page_size + p % a->page_size) * dim;
                const float *value = a->cache + slot + side;
                float weight = scores[p] / sum;
#pragma omp simd
                for (int64_t i = 0; i < dim; i++) result[i] += weight * value[i];
            }
        }
    }
}

/* Many query tokens of one request and one key head: keys are turned once, so that a vector holds neighbouring keys, and
 * each is then used for a tile of query rows (token, head of the group). `memory` holds turned keys, scores and where the
 * values are. */
static void attend_many(const Attention *a, int64_t request, int64_t kv_head, int64_t first_query, int64_t end_query,
                        float *memory) {
    int64_t begin = a->starts[request], num_query = a->query_lens[request], length = a->seq_lens[request];
    int64_t group = a->heads / a->kv_heads, dim = a->dim, side = a->kv_heads * a->page_size * dim;
    const int32_t *pages = a->block_table + request * a->table_stride;
    int64_t before = length - num_query;
    for (; first_query < end_query && first_seen(a, request, before + first_query) > before + first_query; first_query++)
        memset(a->out + ((begin + first_query) * a->heads + kv_head * group) * dim, 0, (size_t)(group * dim) * sizeof(float));
    if (first_query == end_query) return;
    int64_t low = first_seen(a, request, before + first_query);
    int64_t num_keys = before + end_query - low, stride = (num_keys + PANEL - 1) / PANEL * PANEL;
    float *turned = memory, *scores = turned + dim * stride;
    const float **values = (const float **)(scores + QUERY_ROWS * stride);
    for (int64_t k = 0; k < stride; k++) {
        int64_t p = low + k;
        if (k < num_keys) {
            const float *key = a->cache + (int64_t)pages[p / a->page_size] * 2 * side + (kv_head * a->page_size + p % a->page_size) * dim;
            values[k] = key + side;
            for (int64_t i = 0; i < dim; i++) turned[i * stride + k] = key[i];
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
            position[t] = before + j - low;
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
                vec v0 = *(const vec *)(values[k] + i), v1 = *(const vec *)(values[k] + i + LANES);
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

static int64_t num_chunks(const Attention *a, int64_t request) {
    int64_t num_query = a->query_lens[request];
    if (num_query <= FEW_QUERIES || a->dim % PANEL) return 1;
    return (num_query + QUERIES_A_PIECE - 1) / QUERIES_A_PIECE;
}

/* Pieces are (request, chunk of its query tokens, key head). */
static void attend_piece(const void *arg, int64_t first, int64_t end) {
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
        if (num_query <= FEW_QUERIES || a->dim % PANEL) {
            attend(a, request, kv_head, memory);
        } else {
            int64_t from = chunk * QUERIES_A_PIECE, to = from + QUERIES_A_PIECE;
            attend_many(a, request, kv_head, from, to < num_query ? to : num_query, memory);
        }
    }
    free(memory);
}

/* Returns 0, or 1 when there is no memory for the scores. Tokens behind a request's living ones give zero. Keys before
 * `seq_starts`, if that is not NULL, are not read. */
int slip_paged_attention(const float *q, const float *cache, const int32_t *starts, const int32_t *query_lens,
                         const int32_t *seq_lens, const int32_t *block_table, const int32_t *seq_starts, float *out,
                         int64_t requests, int64_t heads, int64_t kv_heads, int64_t dim, int64_t page_size,
                         int64_t table_stride, float scale, int64_t window, int num_threads) {
    Attention a = {q,   cache,     starts,       query_lens, seq_lens, block_table, seq_starts, out, heads, kv_heads,
                   dim, page_size, table_stride, scale,      window,   0,           0};
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
    spread(attend_piece, &a, num_pieces, 1, work > 100000 ? num_threads : 1);
    return atomic_load(&a.failed);
}

/* Matrix product with a weight in panels: [panels][in][PANEL], a panel being PANEL neighbouring outputs, zero-padded.
 *
 * A tile is one panel times a few tokens, all its sums in registers. The panel streams through once, in the order in
 * which it lies in memory, so a few tokens cost hardly more than one. Every output is one chain of fused additions over
 * `in`, whatever the tile: a token's result does not depend on the tokens beside it.
 */
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
    spread(multiply_panels, &p, num_panels, piece > 0 ? piece : 1, num_panels * in * tokens > 4096 ? num_threads : 1);
}

/* All layers of a dense decoder for a few tokens a request, in one call: between two products there is too little work
 * to return to Python for. Field order is that of the structures in decoder_stack.py.
 */
typedef struct {
    const float *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up, *down; /* biases, q_norm and k_norm may be NULL */
    float *cache;
    int64_t window;
} Layer;

typedef struct {
    int64_t hidden, heads, kv_heads, dim, intermediate, page_size, rotary_dim;
    float eps, scale;
} Sizes;

typedef struct {
    int64_t tokens, requests, table_stride;
    const float *cosine, *sine;
    const int64_t *page_ids, *offsets;
    const int32_t *starts, *query_lens, *seq_lens, *block_table, *seq_starts; /* seq_starts may be NULL */
    int num_threads;
} Step;

static void normalise_heads(float *x, const float *weight, float eps, int64_t tokens, int64_t stride, int64_t heads, int64_t dim) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) normalise(x + t * stride + h * dim, weight, eps, x + t * stride + h * dim, dim);
}

/* `hidden` is what is still to be added to `residual`; both are read and written. Returns 1 when memory ran out. */
int slip_decoder_stack(const Layer *layers, int64_t num_layers, const Sizes *z, const Step *s, float *hidden, float *residual) {
    int64_t n = s->tokens, q_size = z->heads * z->dim, kv_size = z->kv_heads * z->dim, qkv_size = q_size + 2 * kv_size;
    float *normed = malloc((size_t)(n * (z->hidden + qkv_size + 2 * q_size + z->intermediate)) * sizeof(float));
    if (!normed) return 1;
    float *qkv = normed + n * z->hidden, *q = qkv + n * qkv_size, *mixed = q + n * q_size, *gated = mixed + n * q_size;
    int failed = 0;
    for (const Layer *l = layers; l < layers + num_layers && !failed; l++) {
        slip_add_rms_norm(hidden, residual, l->input_norm, z->eps, normed, residual, n, z->hidden);
        slip_panel_linear(normed, l->qkv, l->qkv_bias, qkv, n, z->hidden, qkv_size, 0, s->num_threads);
        if (l->q_norm) normalise_heads(qkv, l->q_norm, z->eps, n, qkv_size, z->heads, z->dim);
        if (l->k_norm) normalise_heads(qkv + q_size, l->k_norm, z->eps, n, qkv_size, z->kv_heads, z->dim);
        slip_rope_and_cache(qkv, qkv_size, qkv + q_size, qkv_size, qkv + q_size + kv_size, qkv_size, s->cosine, s->sine,
                            l->cache, s->page_ids, s->offsets, q, n, z->heads, z->kv_heads, z->dim, z->rotary_dim,
                            z->page_size);
        failed = slip_paged_attention(q, l->cache, s->starts, s->query_lens, s->seq_lens, s->block_table, s->seq_starts,
                                      mixed, s->requests, z->heads, z->kv_heads, z->dim, z->page_size, s->table_stride,
                                      z->scale, l->window, s->num_threads);
        slip_panel_linear(mixed, l->o, l->o_bias, hidden, n, q_size, z->hidden, 0, s->num_threads);
        slip_add_rms_norm(hidden, residual, l->post_norm, z->eps, normed, residual, n, z->hidden);
        slip_panel_linear(normed, l->gate_up, NULL, gated, n, z->hidden, z->intermediate, 1, s->num_threads);
        slip_panel_linear(gated, l->down, NULL, hidden, n, z->intermediate, z->hidden, 0, s->num_threads);
    }
    free(normed);
    return failed;
}

/* The largest entry of each row and where it first stands; not a number, at 0, if the row holds anything that is not one. */
typedef struct {
    const float *x;
    int64_t size;
    float *largest;
    int64_t *index;
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
    }
}

void slip_row_max(const float *x, int64_t rows, int64_t size, float *largest, int64_t *index, int num_threads) {
    Rows r = {x, size, largest, index};
    spread(find_largest, &r, rows, 1, rows * size > 100000 ? num_threads : 1);
}
