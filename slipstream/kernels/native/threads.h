/* Threads for loops, shared by all kernels. */
#ifndef SLIP_THREADS_H
#define SLIP_THREADS_H

#include <stdint.h>

typedef void (*Body)(const void *arg, int64_t first, int64_t end);

/* Calls body for all of [0, count) in pieces, on up to num_threads threads. */
void slip_spread(Body body, const void *arg, int64_t count, int64_t piece, int num_threads);

#endif
