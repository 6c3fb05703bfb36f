/* Quantised weights into panels, from the blocks of GGUF files or from plain codes, and rows of panels back to float32.
 *
 * Codes and scales are taken over as they are: a row read back from a panel equals the dequantised file to the bit.
 */
#define _GNU_SOURCE
#include "kernels.h"
#include "quant_format.h"
#include "threads.h"

#include <stdatomic.h>
#include <sys/mman.h>

typedef struct {
    Kind kind;
    int number;
    const uint8_t *raw;       /* [rows] of GGUF blocks, or codes [rows][in] */
    const int64_t *row_order; /* the file's row for each row of the matrix, or NULL */
    const float *scales, *zeros; /* of codes: [rows][groups]; zeros may be NULL: all as the kind has it */
    int64_t rows, in, group;
    uint8_t *panels;
} Packing;

typedef struct {
    int64_t bytes, weights;
} FileBlock;

static FileBlock file_block(int number) {
    static const FileBlock sizes[NUM_KINDS] = {
        [KIND_q4_0] = {18, 32},   [KIND_q4_1] = {20, 32},   [KIND_q5_0] = {22, 32},   [KIND_q5_1] = {24, 32},
        [KIND_q8_0] = {34, 32},   [KIND_q4_k] = {144, 256}, [KIND_q5_k] = {176, 256}, [KIND_q6_k] = {210, 256},
        [KIND_int4] = {1, 1},     [KIND_int8] = {1, 1},
    };
    return sizes[number];
}

static void split_nibbles(const uint8_t *packed, int count, uint8_t *low, uint8_t *high) {
    for (int i = 0; i < count; i++) {
        low[i] = packed[i] & 15;
        high[i] = packed[i] >> 4;
    }
}

/* One nibble each of 32 bytes: of a block of 64 weights the first half has the low ones. */
static void take_nibbles(const uint8_t *packed, int shift, uint8_t *codes) {
    for (int i = 0; i < BLOCK; i++) codes[i] = packed[i] >> shift & 15;
}

static void add_fifth_bits(const uint8_t *bits, uint8_t *codes) {
    for (int i = 0; i < BLOCK; i++) codes[i] |= (uint8_t)((bits[i / 8] >> i % 8 & 1) << 4);
}

/* The 32 codes of one part (of eight) of a Q6_K block. */
static void take_q6_k(const uint8_t *file, int part, uint8_t *codes) {
    const uint8_t *low = file + 64 * (part / 4) + 32 * (part % 2), *high = file + 128 + 32 * (part / 4);
    int quarter = part % 4, shift = quarter / 2 * 4;
    for (int i = 0; i < BLOCK; i++) codes[i] = (uint8_t)((low[i] >> shift & 15) | (high[i] >> 2 * quarter & 3) << 4);
}

/* The codes of inputs 32 * block and on. */
static void read_codes(const Packing *p, const uint8_t *row, int64_t block, uint8_t *codes) {
    FileBlock size = file_block(p->number);
    const uint8_t *file = row + block * BLOCK / size.weights * size.bytes;
    int part = (int)(block % 8);
    switch (p->number) {
    case KIND_q4_0: split_nibbles(file + 2, 16, codes, codes + 16); break;
    case KIND_q4_1: split_nibbles(file + 4, 16, codes, codes + 16); break;
    case KIND_q5_0:
        split_nibbles(file + 6, 16, codes, codes + 16);
        add_fifth_bits(file + 2, codes);
        break;
    case KIND_q5_1:
        split_nibbles(file + 8, 16, codes, codes + 16);
        add_fifth_bits(file + 4, codes);
        break;
    case KIND_q8_0:
        for (int i = 0; i < BLOCK; i++) codes[i] = file[2 + i] ^ 128;
        break;
    case KIND_q4_k: take_nibbles(file + 16 + 32 * (part / 2), 4 * (part % 2), codes); break;
    case KIND_q5_k:
        take_nibbles(file + 48 + 32 * (part / 2), 4 * (part % 2), codes);
        for (int i = 0; i < BLOCK; i++) codes[i] |= (uint8_t)((file[16 + i] >> part & 1) << 4);
        break;
    case KIND_q6_k: take_q6_k(file, part, codes); break;
    default: {
        int64_t left = p->in - block * BLOCK;
        memset(codes, 0, BLOCK);
        memcpy(codes, file, (size_t)(left < BLOCK ? left : BLOCK));
    }
    }
}

/* Eight scales and eight mins of six bits in twelve bytes, as the K types have them. */
static void write_sub_scales(const uint8_t *packed, int lane, uint8_t *header) {
    for (int i = 0; i < 8; i++) {
        int scale = i < 4 ? packed[i] & 63 : (packed[i + 4] & 15) | packed[i - 4] >> 6 << 4;
        int min = i < 4 ? packed[i + 4] & 63 : packed[i + 4] >> 4 | packed[i] >> 6 << 4;
        header[64 + 16 * i + lane] = (uint8_t)scale;
        header[192 + 16 * i + lane] = (uint8_t)min;
    }
}

static void write_header(const Packing *p, int64_t row_idx, const uint8_t *row, int64_t group, int lane, uint8_t *header) {
    FileBlock size = file_block(p->number);
    int64_t block = group * group_blocks(p->kind, p->group), num_blocks = p->in / BLOCK;
    const uint8_t *file = row + block * BLOCK / size.weights * size.bytes;
    switch (p->kind.header) {
    case HALF_SCALES:
        for (int i = 0; i < 2 && block + i < num_blocks; i++) memcpy(header + 32 * i + 2 * lane, file + size.bytes * i, 2);
        break;
    case HALF_SCALES_MINS:
        memcpy(header + 2 * lane, file, 2);
        memcpy(header + 32 + 2 * lane, file + 2, 2);
        break;
    case SUB_SCALES_MINS:
        memcpy(header + 2 * lane, file, 2);
        memcpy(header + 32 + 2 * lane, file + 2, 2);
        write_sub_scales(file + 4, lane, header);
        break;
    case SUB_SCALES:
        memcpy(header + 2 * lane, file + 208, 2);
        for (int i = 0; i < 16; i++) header[64 + 16 * i + lane] = file[192 + i];
        break;
    case FLOAT_SCALES_MINS: {
        int64_t at = row_idx * num_groups(p->kind, p->group, p->in) + group;
        float scale = p->scales[at], min = p->zeros ? scale * ((float)p->kind.zero - p->zeros[at]) : 0.0f;
        memcpy(header + 4 * lane, &scale, 4);
        memcpy(header + 64 + 4 * lane, &min, 4);
    }
    }
}

static void add_word(uint8_t *to, uint32_t word) {
    uint32_t before;
    memcpy(&before, to, 4);
    before |= word;
    memcpy(to, &before, 4);
}

static void write_codes(Kind kind, const uint8_t *codes, int lane, uint8_t *block) {
    for (int c = 0; c < CHUNKS; c++) {
        uint32_t word;
        memcpy(&word, codes + 4 * c, 4);
        if (kind.bits == 8) {
            add_word(block + 64 * c + 4 * lane, word);
            continue;
        }
        add_word(block + 64 * (c / 2) + 4 * lane, (word & 0x0f0f0f0f) << 4 * (c % 2));
        if (kind.bits == 5) add_word(block + 256 + 4 * lane, (word >> 4 & 0x01010101) << c);
        if (kind.bits == 6) add_word(block + 256 + 64 * (c / 4) + 4 * lane, (word >> 4 & 0x03030303) << 2 * (c % 4));
    }
}

static void pack_panels(const void *arg, int64_t first, int64_t end) {
    const Packing *p = arg;
    FileBlock size = file_block(p->number);
    int64_t bytes = panel_bytes(p->kind, p->group, p->in), row_bytes = p->in / size.weights * size.bytes;
    int64_t groups = num_groups(p->kind, p->group, p->in), blocks = group_blocks(p->kind, p->group);
    for (int64_t panel = first; panel < end; panel++) {
        uint8_t *to = p->panels + panel * bytes;
        memset(to, 0, (size_t)bytes);
        for (int lane = 0; lane < PANEL_ROWS && panel * PANEL_ROWS + lane < p->rows; lane++) {
            int64_t row_idx = panel * PANEL_ROWS + lane;
            if (p->row_order) row_idx = p->row_order[row_idx];
            const uint8_t *row = p->raw + row_idx * row_bytes;
            for (int64_t group = 0; group < groups; group++) {
                uint8_t *header = to + group * group_bytes(p->kind, p->group), *block = header + header_bytes(p->kind);
                write_header(p, row_idx, row, group, lane, header);
                for (int64_t b = group * blocks; b < (group + 1) * blocks && b * BLOCK < p->in; b++) {
                    uint8_t codes[BLOCK];
                    read_codes(p, row, b, codes);
                    write_codes(p->kind, codes, lane, block);
                    block += block_bytes(p->kind);
                }
            }
        }
    }
}

static void pack(Packing *p, int num_threads) {
    p->kind = kind_of(p->number);
    slip_spread(pack_panels, p, (p->rows + PANEL_ROWS - 1) / PANEL_ROWS, 1, num_threads);
}

/* Asks for large pages before memory is first written. A system may refuse, and nothing depends on it but speed. */
void slip_use_large_pages(uint8_t *memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    uintptr_t page = 4096, first = ((uintptr_t)memory + page - 1) / page * page, end = ((uintptr_t)memory + (uintptr_t)bytes) / page * page;
    if (end > first) madvise((void *)first, end - first, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

/* From rows of GGUF blocks; `row_order` may be NULL. */
void slip_pack_gguf(int kind, const uint8_t *raw, const int64_t *row_order, int64_t rows, int64_t in, uint8_t *panels,
                    int num_threads) {
    Packing p = {.number = kind, .raw = raw, .row_order = row_order, .rows = rows, .in = in, .panels = panels};
    pack(&p, num_threads);
}

/* From codes [rows][in] below 16 or 256, and scales and zeros for every `group` blocks of a row: scale * (code - zero). */
void slip_pack_codes(int kind, const uint8_t *codes, const float *scales, const float *zeros, int64_t rows, int64_t in,
                     int64_t group, uint8_t *panels, int num_threads) {
    Packing p = {.number = kind, .raw = codes, .scales = scales, .zeros = zeros, .rows = rows, .in = in, .group = group,
                 .panels = panels};
    pack(&p, num_threads);
}

typedef struct {
    const Segment *segment;
    int64_t in;
    const int32_t *row_ids;
    float *out;
    _Atomic int failed;
} Lookup;

static void read_row(const Segment *s, int64_t in, int64_t row, float *out) {
    Kind kind = kind_of((int)s->kind);
    int64_t blocks = group_blocks(kind, s->group), lane = row % PANEL_ROWS;
    const uint8_t *at = s->panels + row / PANEL_ROWS * panel_bytes(kind, s->group, in);
    for (int64_t start = 0; start < in;) {
        const uint8_t *header = at;
        at += header_bytes(kind);
        for (int64_t block = 0; block < blocks; block++, at += block_bytes(kind)) {
            for (int c = 0; c < CHUNKS; c++) {
                Scales own = block_scales(kind, header, block, block_parts(kind) * c / CHUNKS);
                Bytes chunk = chunk_codes(kind, at, c);
                float scales[PANEL_ROWS], mins[PANEL_ROWS];
                uint8_t codes[4 * PANEL_ROWS];
                floats_store(scales, own.scale);
                floats_store(mins, own.min);
                memcpy(codes, &chunk, sizeof codes);
                for (int j = 0; j < 4 && start < in; j++, start++)
                    out[start] = fmaf(scales[lane], (float)(codes[4 * lane + j] - kind.zero), mins[lane]);
            }
        }
    }
}

static void read_rows(const void *arg, int64_t first, int64_t end) {
    Lookup *l = (Lookup *)arg;
    for (int64_t i = first; i < end; i++) {
        if (l->row_ids[i] < 0 || l->row_ids[i] >= l->segment->rows)
            atomic_store(&l->failed, 1);
        else
            read_row(l->segment, l->in, l->row_ids[i], l->out + i * l->in);
    }
}

/* Rows of a matrix of one segment as float32. Returns 1 when a row does not exist. */
int slip_quant_rows(const Matrix *m, const int32_t *row_ids, int64_t count, float *out, int num_threads) {
    Lookup l = {m->segments, m->in, row_ids, out, 0};
    slip_spread(read_rows, &l, count, 4, num_threads);
    return atomic_load(&l.failed);
}
