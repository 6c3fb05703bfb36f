/* Threads for loops. A thread that is ready takes the next piece, and the caller waits for pieces that were begun,
 * never for a thread that has not come: on a machine whose cores others use too, a team that must be complete at the
 * end of every loop waits for the scheduler a hundred times a step. Workers look for work for a moment and then sleep.
 */
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

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

void slip_spread(Body body, const void *arg, int64_t count, int64_t piece, int num_threads) {
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

typedef struct {
    size_t bytes;
    void *memory;
} Scratch;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static int has_scratch_key;

static void free_scratch(void *arg) {
    free(((Scratch *)arg)->memory);
    free(arg);
}

static void make_scratch_key(void) { has_scratch_key = !pthread_key_create(&scratch_key, free_scratch); }

void *slip_scratch(size_t bytes) {
    pthread_once(&scratch_once, make_scratch_key);
    if (!has_scratch_key) return NULL;
    Scratch *own = pthread_getspecific(scratch_key);
    if (!own) {
        if (!(own = calloc(1, sizeof *own))) return NULL;
        if (pthread_setspecific(scratch_key, own)) {
            free(own);
            return NULL;
        }
    }
    if (own->bytes < bytes) {
        free(own->memory);
        own->bytes = (bytes + 4095) / 4096 * 4096;
        if (!(own->memory = aligned_alloc(4096, own->bytes))) own->bytes = 0;
    }
    return own->memory;
}
