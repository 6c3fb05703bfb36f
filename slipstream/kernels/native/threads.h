/* Threads for loops, shared by all kernels. */
#ifndef SLIP_THREADS_H
#define SLIP_THREADS_H

#include <stddef.h>
#include <stdint.h>

typedef void (*Body)(const void *arg, int64_t first, int64_t end);

/* Calls body for all of [0, count) in pieces, on up to num_threads threads. */
void slip_spread(Body body, const void *arg, int64_t count, int64_t piece, int num_threads);

/* Memory of the calling thread, kept for its next call, which may overwrite it; NULL when there is none. Fresh pages from
 * the system for every call cost as much as some of the kernels that use them. */
void *slip_scratch(size_t bytes);

#endif
