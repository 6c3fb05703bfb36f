/* How quantised weights lie in memory, and what the files that work on them share.
 *
 * A matrix [out, in] is cut into panels of 16 neighbouring outputs, one lane each. A panel is a row of groups; a group is
 * a header with the scales of a few blocks, and the blocks. A block is 32 inputs of all 16 outputs: their codes of 4, 5,
 * 6 or 8 bits. A weight is scale * (code - zero) + min.
 *
 * Codes lie as an instruction for products of bytes takes them: a chunk is four inputs of 16 outputs, byte 4 * lane + j
 * holding input j. Of 4 bits there are two chunks in 64 bytes: 2v in the low halves of the bytes, 2v + 1 in the high
 * ones. The fifth bits follow in 64 bytes (bit c: chunk c), the fifth and sixth in 128 (bits 2p, 2p + 1 of byte vector
 * g: chunk 4g + p). All sizes are multiples of a cache line. The layout is the same on all machines.
 */
#ifndef SLIP_QUANT_FORMAT_H
#define SLIP_QUANT_FORMAT_H

#include "lanes.h"

#define PANEL_ROWS 16
#define BLOCK 32
#define CHUNKS 8
#define PREFETCH_BYTES 8192 /* ahead, about twice the latency of memory: large pages can be read so far in advance */

typedef enum {
    HALF_SCALES,     /* two blocks: fp16 scales of each */
    HALF_SCALES_MINS, /* one block: fp16 scales, fp16 mins */
    SUB_SCALES_MINS, /* eight blocks: fp16 factors of scales and of mins, uint8 [8][16] scales, uint8 [8][16] mins */
    SUB_SCALES,      /* eight blocks: fp16 factors, 32 unused bytes, int8 [16][16] scales of 16 inputs each */
    FLOAT_SCALES_MINS /* any number of blocks: float32 scales, float32 mins */
} Header;

typedef struct {
    int bits;
    Header header;
    int zero;
} Kind;

/* Numbered as in quant_weights.py. */
#define FOR_ALL_KINDS(X)                                                                                               \
    X(q4_0, 4, HALF_SCALES, 8)                                                                                         \
    X(q4_1, 4, HALF_SCALES_MINS, 0)                                                                                    \
    X(q5_0, 5, HALF_SCALES, 16)                                                                                        \
    X(q5_1, 5, HALF_SCALES_MINS, 0)                                                                                    \
    X(q8_0, 8, HALF_SCALES, 128)                                                                                       \
    X(q4_k, 4, SUB_SCALES_MINS, 0)                                                                                     \
    X(q5_k, 5, SUB_SCALES_MINS, 0)                                                                                     \
    X(q6_k, 6, SUB_SCALES, 32)                                                                                         \
    X(int4, 4, FLOAT_SCALES_MINS, 8)                                                                                   \
    X(int8, 8, FLOAT_SCALES_MINS, 128)

#define KIND_NUMBER(name, bits, header, zero) KIND_##name,
enum { FOR_ALL_KINDS(KIND_NUMBER) NUM_KINDS };

INLINE Kind kind_of(int number) {
#define KIND_VALUE(name, bits, header, zero) {bits, header, zero},
    static const Kind kinds[] = {FOR_ALL_KINDS(KIND_VALUE)};
    return kinds[number];
}

INLINE int64_t header_bytes(Kind kind) {
    return kind.header == FLOAT_SCALES_MINS ? 128 : kind.header == SUB_SCALES || kind.header == SUB_SCALES_MINS ? 320 : 64;
}

INLINE int64_t block_bytes(Kind kind) { return kind.bits * 64; }

/* Blocks of a group; `own` is the answer where the kind leaves it open. */
INLINE int64_t group_blocks(Kind kind, int64_t own) {
    return kind.header == FLOAT_SCALES_MINS ? own : kind.header == HALF_SCALES ? 2 : kind.header == HALF_SCALES_MINS ? 1 : 8;
}

INLINE int64_t group_bytes(Kind kind, int64_t own) { return header_bytes(kind) + group_blocks(kind, own) * block_bytes(kind); }

INLINE int64_t num_groups(Kind kind, int64_t own, int64_t in) {
    int64_t inputs = group_blocks(kind, own) * BLOCK;
    return (in + inputs - 1) / inputs;
}

INLINE int64_t panel_bytes(Kind kind, int64_t own, int64_t in) { return num_groups(kind, own, in) * group_bytes(kind, own); }

INLINE int has_mins(Kind kind) { return kind.header != HALF_SCALES && kind.header != SUB_SCALES; }

/* Parts of a block with a scale of their own. */
INLINE int block_parts(Kind kind) { return kind.header == SUB_SCALES ? 2 : 1; }

typedef struct {
    Floats scale, min;
} Scales;

INLINE Scales block_scales(Kind kind, const uint8_t *header, int64_t block, int part) {
    Scales s = {floats_all(0.0f), floats_all(0.0f)};
    switch (kind.header) {
    case HALF_SCALES: s.scale = floats_from_half(header + 32 * block); break;
    case HALF_SCALES_MINS:
        s.scale = floats_from_half(header);
        s.min = floats_from_half(header + 32);
        break;
    case SUB_SCALES_MINS:
        s.scale = floats_mul(floats_from_half(header), floats_from_u8(header + 64 + 16 * block));
        s.min = floats_mul(floats_from_half(header + 32), floats_from_u8(header + 192 + 16 * block));
        s.min = floats_mul(s.min, floats_all(-1.0f));
        break;
    case SUB_SCALES:
        s.scale = floats_mul(floats_from_half(header), floats_from_s8(header + 64 + 16 * (2 * block + part)));
        break;
    case FLOAT_SCALES_MINS:
        s.scale = floats_load((const float *)header);
        s.min = floats_load((const float *)(header + 64));
        break;
    }
    return s;
}

/* The unsigned codes of one chunk. */
INLINE Bytes chunk_codes(Kind kind, const uint8_t *block, int chunk) {
    if (kind.bits == 8) return bytes_load(block + 64 * chunk);
    Bytes low = bytes_field(bytes_load(block + 64 * (chunk / 2)), 4 * (chunk % 2), 0x0f);
    if (kind.bits == 5) return bytes_or(low, bytes_field(bytes_load(block + 256), chunk - 4, 0x10));
    if (kind.bits == 6)
        return bytes_or(low, bytes_field(bytes_load(block + 256 + 64 * (chunk / 4)), 2 * (chunk % 4) - 4, 0x30));
    return low;
}

/* Tokens as the products take them, cut into `blocks` blocks each, filled with zeros after the last input. The blocks of
 * `together` tokens lie side by side, as a tile reads them; `block_at` is their order. Of each block there are
 * - its numbers in fixed point, one scale a block, as signed digits of 8 bits, the highest first: `digits` [3][32]. With
 *   two planes only blocks that are marked in `fine` have a third digit. Without planes: `values` [32].
 * - `scales` [4]: what the lowest digit is worth that the block has; the sums of all numbers, of the first and of the
 *   second 16. */
#define DIGITS 3
typedef struct {
    int64_t tokens, blocks, together;
    int planes;
    int8_t *digits;
    float *values, *scales;
    uint8_t *fine;
} Activations;

INLINE int64_t block_at(const Activations *x, int64_t token, int64_t block) {
    return (token / x->together * x->blocks + block) * x->together + token % x->together;
}

/* The sums of one panel and a few tokens: out [tokens][16]. */
typedef void (*QuantTile)(const uint8_t *panel, int64_t groups, int64_t blocks, const Activations *x, int64_t token, float *out);

#define MAX_QUANT_TILE 4
extern const QuantTile slip_plane_tiles[2][NUM_KINDS][MAX_QUANT_TILE]; /* of two and of three planes */
extern const QuantTile slip_float_tiles[NUM_KINDS][MAX_QUANT_TILE];

#endif
