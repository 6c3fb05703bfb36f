/* The bookkeeping of a step: from rows to the inputs of a pass, and from new tokens back to rows.
 *
 * There is little to compute, but torch would take a hundred operations of some microseconds each. Every function does
 * what the definition beside its caller does. Field order is that of the structures in step.py.
 */
#include "kernels.h"

#include <string.h>

enum { STATUS_RUNNING, STATUS_STOPPED, STATUS_LENGTH, STATUS_ERROR }; /* order of plan.RowStatus */

typedef struct {
    int32_t *token_ids, *page_table, *num_computed, *num_tokens, *num_drafts, *max_drafts, *max_total, *status, *step_start,
        *stop_ids, *draft_start, *draft_end;
    int64_t num_rows, max_len, max_pages, max_stop_ids;
} Rows;

typedef struct {
    const int32_t *rows, *query_start_loc, *logit_start_loc; /* the last may be NULL */
    int64_t num_reqs;
} Batch;

typedef struct {
    int32_t *input_ids;
    int64_t *positions, *slot_mapping;
    int64_t num_padded;
} Tokens;

static int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
static int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

static int64_t slot_of(const Rows *r, int64_t row, int64_t position, int64_t page_size) {
    return (int64_t)r->page_table[row * r->max_pages + position / page_size] * page_size + position % page_size;
}

static int32_t *tokens_of(const Rows *r, int64_t row) { return r->token_ids + row * r->max_len; }

static void copy_pages(const Rows *r, int64_t row, int32_t *to) {
    memcpy(to, r->page_table + row * r->max_pages, (size_t)r->max_pages * sizeof(int32_t));
}

/* Padding has the tokens of the scratch row, the last one. */
static void fill_padding(const Rows *r, const Tokens *t, int64_t from, int64_t to, int64_t vocab_size) {
    const int32_t *scratch = tokens_of(r, r->num_rows - 1);
    for (int64_t i = from; i < to; i++) {
        int32_t id = scratch[i % r->max_len];
        t->input_ids[i] = id < vocab_size ? id : 0;
        t->positions[i] = 0;
        t->slot_mapping[i] = -1;
    }
}

static void fill_request(const Rows *r, const Tokens *t, int64_t row, int64_t start, int64_t end, int64_t count, int64_t first,
                         int64_t page_size, int64_t vocab_size) {
    const int32_t *own = tokens_of(r, row);
    if (count > end - start) count = end - start;
    for (int64_t i = 0; i < count; i++) {
        int32_t id = own[first + i];
        t->input_ids[start + i] = id < vocab_size ? id : 0;
        t->positions[start + i] = first + i;
        t->slot_mapping[start + i] = slot_of(r, row, first + i, page_size);
    }
    fill_padding(r, t, start + (count > 0 ? count : 0), end, vocab_size);
}

typedef struct {
    int32_t *query_lens, *seq_lens, *block_table;
    int64_t *logit_indices;
    int32_t *logit_rows, *logit_positions, *logit_drafts;
    int64_t num_logits, page_size;
} StepInputs;

void slip_prepare_inputs(const Rows *r, const Batch *b, const Tokens *t, const StepInputs *s) {
    for (int64_t i = 0; i < b->num_reqs; i++) {
        int64_t row = b->rows[i];
        int32_t start = b->query_start_loc[i], planned = b->query_start_loc[i + 1] - start;
        int32_t logit = b->logit_start_loc[i], num_logits = b->logit_start_loc[i + 1] - logit;
        int32_t computed = r->num_computed[row], length = r->num_tokens[row];
        int runs = r->status[row] == STATUS_RUNNING && planned > 0;
        int32_t known = smaller(planned - num_logits + 1, length - computed);
        /* Drafts follow the last known token; a prompt's chunk that ends before it has none. */
        int32_t drafts = runs && computed + known == length ? smaller(r->num_drafts[row], num_logits - 1) : 0;
        int32_t count = runs ? known + drafts : 0;
        s->query_lens[i] = count;
        s->seq_lens[i] = runs ? computed + count : 0;
        copy_pages(r, row, s->block_table + i * r->max_pages);
        fill_request(r, t, row, start, start + planned, count, computed, s->page_size, INT32_MAX);
        for (int32_t j = 0; j < num_logits; j++) {
            int32_t position = length + smaller(j, drafts);
            s->logit_indices[logit + j] = start + planned - num_logits + j;
            s->logit_rows[logit + j] = (int32_t)row;
            s->logit_positions[logit + j] = position;
            s->logit_drafts[logit + j] = j < drafts ? tokens_of(r, row)[position] : -1;
        }
    }
    fill_padding(r, t, b->query_start_loc[b->num_reqs], t->num_padded, INT32_MAX);
    for (int64_t i = b->logit_start_loc[b->num_reqs]; i < s->num_logits; i++) {
        s->logit_indices[i] = 0;
        s->logit_rows[i] = (int32_t)(r->num_rows - 1);
        s->logit_positions[i] = 0;
        s->logit_drafts[i] = -1;
    }
}

typedef struct {
    const void *new_ids; /* [num_reqs][width], of 32 bits, or where `wide` of 64 */
    const int32_t *num_accepted;
    const uint8_t *failed, *would_be_accepted; /* the last by logit, or NULL */
    const int32_t *query_lens;
    int32_t *out; /* [num_reqs][HEADER + columns] */
    int64_t width, wide, columns;
} NewTokens;

#define HEADER 4 /* status, verified drafts, accepted drafts, whether an unverified one would be accepted */

static int32_t new_id(const NewTokens *n, int64_t req, int64_t j) {
    int64_t at = req * n->width + j;
    return n->wide ? (int32_t)((const int64_t *)n->new_ids)[at] : ((const int32_t *)n->new_ids)[at];
}

static int is_stop(const Rows *r, int64_t row, int32_t id) {
    for (int64_t i = 0; i < r->max_stop_ids; i++)
        if (r->stop_ids[row * r->max_stop_ids + i] == id) return 1;
    return 0;
}

void slip_commit(const Rows *r, const Batch *b, const NewTokens *n) {
    for (int64_t i = 0; i < b->num_reqs; i++) {
        int64_t row = b->rows[i];
        int32_t planned = b->query_start_loc[i + 1] - b->query_start_loc[i];
        int32_t logit = b->logit_start_loc[i], num_logits = b->logit_start_loc[i + 1] - logit;
        int32_t before = r->status[row], computed = r->num_computed[row], length = r->num_tokens[row];
        int32_t known = planned - num_logits + 1, limit = r->max_total[row];
        int runs = before == STATUS_RUNNING && n->query_lens[i] > 0;
        /* A prompt's chunk that ends before the last known token samples nothing. */
        int draws = runs && computed + known == length, failed = n->failed[i] != 0, stopped = 0;
        int32_t count = smaller(n->num_accepted[i] + !failed, limit - length);
        for (int32_t j = 0; j < count && j < n->width && !stopped; j++)
            if (is_stop(r, row, new_id(n, i, j))) {
                stopped = 1;
                count = j + 1;
            }
        failed = failed && !stopped; /* tokens after a stop are dropped */
        int takes = draws && !failed;
        if (!takes) count = 0;
        int32_t *tokens = tokens_of(r, row), *out = n->out + i * (HEADER + n->columns);
        /* For a draft that is about to be overwritten. */
        int accepts = takes && num_logits == 1 && r->num_drafts[row] > 0;
        if (accepts && n->would_be_accepted) accepts = n->would_be_accepted[logit] != 0;
        else if (accepts) accepts = tokens[smaller(length, (int32_t)r->max_len - 1)] == new_id(n, i, 0);
        for (int32_t j = 0; j < n->columns; j++) {
            int exists = j < count && j < n->width;
            if (exists) tokens[smaller(length + j, (int32_t)r->max_len - 1)] = new_id(n, i, j);
            out[HEADER + j] = exists ? new_id(n, i, j) : -1;
        }
        int32_t after = takes && stopped ? STATUS_STOPPED : takes && length + count >= limit ? STATUS_LENGTH : before;
        if (draws && failed) after = STATUS_ERROR;
        if (runs) {
            r->num_computed[row] = computed + known + larger(count - 1, 0);
            r->num_drafts[row] = 0;
            r->status[row] = after;
        }
        if (takes) r->num_tokens[row] = length + count;
        r->step_start[row] = runs ? computed + 1 : 0;
        out[0] = after;
        out[1] = draws ? n->query_lens[i] - known : 0;
        out[2] = takes ? smaller(n->num_accepted[i], count) : 0;
        out[3] = accepts;
    }
}

/* Drafts are accepted up to the first that is not the target's token, or not said to be accepted. */
void slip_accept_drafts(const int64_t *target_ids, const int32_t *draft_ids, const uint8_t *accepted, const uint8_t *failed,
                        const int32_t *logit_start_loc, int32_t *new_ids, int32_t *num_accepted, uint8_t *fails,
                        int64_t num_reqs, int64_t width) {
    for (int64_t i = 0; i < num_reqs; i++) {
        int64_t start = logit_start_loc[i], num_logits = logit_start_loc[i + 1] - start, count = 0;
        for (; count < num_logits && count < width; count++) {
            int64_t at = start + count;
            int is_accepted = accepted ? accepted[at] != 0 : draft_ids[at] == target_ids[at];
            if (!is_accepted || draft_ids[at] < 0 || failed[at]) break;
        }
        for (int64_t j = 0; j < width; j++) {
            int64_t at = start + j;
            new_ids[i * width + j] = j >= num_logits ? -1 : j < count ? draft_ids[at] : (int32_t)target_ids[at];
        }
        num_accepted[i] = (int32_t)count;
        fails[i] = count < num_logits && failed[start + count];
    }
}

void slip_place_drafts(const Rows *r, const Batch *b, const int32_t *draft_ids, int64_t stride, int64_t k) {
    for (int64_t i = 0; i < b->num_reqs; i++) {
        int64_t row = b->rows[i];
        int32_t length = r->num_tokens[row], given = 0;
        /* Only a row whose next step reaches the end of its tokens has drafts verified. */
        if (r->status[row] != STATUS_RUNNING || r->num_computed[row] + 1 != length) continue;
        while (given < k && draft_ids[i * stride + given] >= 0) given++;
        /* There is always room for the last token, which the target samples itself. */
        int32_t count = smaller(smaller(r->max_drafts[row], r->max_total[row] - length - 1), given);
        count = larger(count, 0);
        for (int32_t j = 0; j < count; j++)
            tokens_of(r, row)[smaller(length + j, (int32_t)r->max_len - 1)] = draft_ids[i * stride + j];
        r->num_drafts[row] = count;
    }
}

void slip_mark_gaps(const Rows *r, const Batch *b, int goes_over_all, int64_t num_caught_up, int32_t *seq_starts,
                    int32_t *first_slots) {
    for (int64_t i = 0; i < b->num_reqs; i++) {
        int64_t row = b->rows[i];
        int32_t first = r->step_start[row] - 1, computed = r->num_computed[row], end = r->draft_end[row];
        int runs = first >= 0, gap = runs && first > end;
        if (!goes_over_all) first = larger(end, computed - 1 - (int32_t)num_caught_up);
        if (gap && first > end) r->draft_start[row] = first;
        if (runs) r->draft_end[row] = computed;
        seq_starts[i] = r->draft_start[row];
        first_slots[i] = gap ? first : -1;
    }
}

typedef struct {
    int32_t *query_lens, *seq_lens, *draft_positions;
    int64_t *last_indices; /* of the first pass alone, as is the block table */
    int32_t *block_table;
    int64_t page_size, vocab_size;
} PassInputs;

void slip_prepare_first_pass(const Rows *r, const Batch *b, const int32_t *first_slots, int64_t num_caught_up, const Tokens *t,
                             const PassInputs *p) {
    for (int64_t i = 0; i < b->num_reqs; i++) {
        int64_t row = b->rows[i];
        int32_t start = b->query_start_loc[i], planned = b->query_start_loc[i + 1] - start;
        int runs = r->step_start[row] != 0 && planned > 0 && r->max_drafts[row] > 0;
        int32_t computed = r->num_computed[row], length = r->num_tokens[row];
        int32_t first = first_slots[i] >= 0 ? first_slots[i] : computed - (planned - 1 - (int32_t)num_caught_up);
        /* There is one more token if the target has sampled one, or if one known token is left to compute. */
        int32_t count = computed + (computed + 1 == length) - first;
        p->query_lens[i] = runs ? count : 0;
        p->seq_lens[i] = runs ? first + count : 0;
        p->last_indices[i] = runs ? start + count - 1 : 0;
        p->draft_positions[i] = length;
        copy_pages(r, row, p->block_table + i * r->max_pages);
        fill_request(r, t, row, start, start + planned, runs ? count : 0, first, p->page_size, p->vocab_size);
    }
    fill_padding(r, t, b->query_start_loc[b->num_reqs], t->num_padded, p->vocab_size);
}

void slip_prepare_shifted_pass(const Rows *r, const Batch *b, const int64_t *positions, int32_t *input_ids,
                               int64_t num_padded, const PassInputs *p) {
    for (int64_t i = 0; i < b->num_reqs; i++) {
        int64_t row = b->rows[i];
        int32_t start = b->query_start_loc[i], planned = b->query_start_loc[i + 1] - start, length = r->num_tokens[row];
        int runs = r->step_start[row] != 0 && planned > 0;
        int32_t first = runs ? (int32_t)positions[start] : 0;
        p->last_indices[i] = runs ? start + r->num_computed[row] - 1 - first : 0;
        p->draft_positions[i] = length;
        copy_pages(r, row, p->block_table + i * r->max_pages);
        for (int32_t j = 0; j < planned; j++) {
            int32_t next = first + j + 1;
            input_ids[start + j] = runs && next < length ? tokens_of(r, row)[next] : 0;
        }
    }
    int64_t end = b->query_start_loc[b->num_reqs];
    if (end < num_padded) memset(input_ids + end, 0, (size_t)(num_padded - end) * sizeof(int32_t));
}

void slip_prepare_next_pass(const Rows *r, const Batch *b, int64_t idx, const int32_t *last_draft, int64_t stride,
                            int64_t slots_before, const Tokens *t, const PassInputs *p) {
    for (int64_t i = 0; i < b->num_reqs; i++) {
        int64_t row = b->rows[i];
        int32_t length = r->num_tokens[row], draft = last_draft[i * stride];
        int runs = r->status[row] == STATUS_RUNNING && r->num_computed[row] + 1 == length && draft >= 0 &&
                   idx < r->max_drafts[row] && idx < r->max_total[row] - length - 1;
        int64_t position = runs ? length + idx - 1 - slots_before : 0;
        t->input_ids[i] = runs ? draft : 0;
        t->positions[i] = position;
        t->slot_mapping[i] = runs ? slot_of(r, row, position, p->page_size) : -1;
        p->query_lens[i] = runs;
        p->seq_lens[i] = runs ? (int32_t)position + 1 : 0;
        p->draft_positions[i] = length + (int32_t)idx;
    }
}

typedef struct {
    const float *cos_sin; /* [max_position][2][half] */
    const int64_t *positions, *slot_mapping;
    float *cosine, *sine;
    int64_t *pages, *offsets;
    int64_t num_tokens, half, spare_page, page_size, max_position;
} Rotation;

/* Cosines and signed sines of each token, and where in the cache it is stored. Returns 1 if the table has no such position. */
int slip_rotation_and_slots(const Rotation *r) {
    for (int64_t i = 0; i < r->num_tokens; i++) {
        if (r->positions[i] < 0 || r->positions[i] >= r->max_position) return 1;
        const float *cosine = r->cos_sin + r->positions[i] * 2 * r->half, *sine = cosine + r->half;
        float *to_cosine = r->cosine + i * 2 * r->half, *to_sine = r->sine + i * 2 * r->half;
        for (int64_t j = 0; j < r->half; j++) {
            to_cosine[j] = to_cosine[j + r->half] = cosine[j];
            to_sine[j] = -sine[j];
            to_sine[j + r->half] = sine[j];
        }
        int64_t slot = r->slot_mapping[i] >= 0 ? r->slot_mapping[i] : r->spare_page * r->page_size;
        r->pages[i] = slot / r->page_size;
        r->offsets[i] = slot % r->page_size;
    }
    return 0;
}
