/* Products of quantised weights with activations in planes of bytes.
 *
 * A block of an activation row is fixed point, in two or three signed digits of 8 bits. One instruction multiplies 64
 * codes with digits and adds fours of them; all sums of a block are exact, so that only the order of the blocks matters,
 * which is the same in every tile: a token's result does not depend on the tokens beside it.
 */
#include "quant_format.h"

/* Adds the products of one digit of one token with the codes of a part of a block. */
INLINE Ints add_digit(Kind kind, const uint8_t *block, int part, const int8_t *digits, Ints sum) {
    const int part_chunks = CHUNKS / block_parts(kind);
    _Pragma("GCC unroll 8") for (int c = part * part_chunks; c < (part + 1) * part_chunks; c++)
        sum = ints_dot(kind.bits, sum, chunk_codes(kind, block, c), digits + 4 * c);
    return sum;
}

/* Of two digits the sum is an integer of 32 bits. */
INLINE Floats join_two(const Ints *sums) { return ints_to_floats(ints_join(sums[0], sums[1])); }

INLINE Floats join_three(const Ints *sums, Ints lowest) {
    Floats low = ints_to_floats(ints_join(sums[1], lowest));
    return floats_fma(ints_to_floats(sums[0]), floats_all(65536.0f), low);
}

PLANE_TILE void plane_tile(Kind kind, int planes, int num_tokens, const uint8_t *panel, int64_t groups, int64_t blocks,
                           const Activations *x, int64_t token, float *out) {
    Floats total[MAX_QUANT_TILE];
    const int64_t first = block_at(x, token, 0);
    const int8_t *digits = x->digits + first * DIGITS * BLOCK;
    const float *scales = x->scales + first * 4;
    const uint8_t *fine = x->fine + first;
    for (int t = 0; t < num_tokens; t++) total[t] = floats_all(0.0f);
    const int parts = block_parts(kind), part_chunks = CHUNKS / parts;
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *header = panel;
        panel += header_bytes(kind);
        for (int64_t i = 0; i < header_bytes(kind); i += 64) __builtin_prefetch(header + i + PREFETCH_BYTES);
        for (int64_t block = 0; block < blocks; block++) {
            _Pragma("GCC unroll 8") for (int i = 0; i < kind.bits; i++) __builtin_prefetch(panel + 64 * i + PREFETCH_BYTES);
            int any_fine = planes == DIGITS;
            _Pragma("GCC unroll 4") for (int t = 0; t < num_tokens; t++) any_fine |= fine[t];
            _Pragma("GCC unroll 2") for (int part = 0; part < parts; part++) {
                Ints sums[MAX_QUANT_TILE][2], lowest[MAX_QUANT_TILE];
                _Pragma("GCC unroll 4") for (int t = 0; t < num_tokens; t++) sums[t][0] = sums[t][1] = lowest[t] = ints_zero();
                _Pragma("GCC unroll 8") for (int c = part * part_chunks; c < (part + 1) * part_chunks; c++) {
                    Bytes codes = chunk_codes(kind, panel, c);
                    _Pragma("GCC unroll 4") for (int t = 0; t < num_tokens; t++) {
                        const int8_t *own = digits + t * DIGITS * BLOCK + 4 * c;
                        sums[t][0] = ints_dot(kind.bits, sums[t][0], codes, own);
                        sums[t][1] = ints_dot(kind.bits, sums[t][1], codes, own + BLOCK);
                        if (planes == DIGITS) lowest[t] = ints_dot(kind.bits, lowest[t], codes, own + 2 * BLOCK);
                    }
                }
                Scales own = block_scales(kind, header, block, part);
                Floats joined[MAX_QUANT_TILE];
                _Pragma("GCC unroll 4") for (int t = 0; t < num_tokens; t++)
                    joined[t] = planes == DIGITS ? join_three(sums[t], lowest[t]) : join_two(sums[t]);
                if (planes < DIGITS && any_fine)
                    _Pragma("GCC unroll 4") for (int t = 0; t < num_tokens; t++)
                        if (fine[t])
                            joined[t] = join_three(sums[t], add_digit(kind, panel, part, digits + t * DIGITS * BLOCK + 2 * BLOCK, ints_zero()));
                _Pragma("GCC unroll 4") for (int t = 0; t < num_tokens; t++) {
                    const float *scale = scales + 4 * t;
                    Floats input_sum = floats_all(scale[parts == 1 ? 1 : 2 + part]);
                    Floats product = floats_mul(joined[t], floats_all(scale[0]));
                    if (kind.zero) product = floats_fma(floats_all((float)-kind.zero), input_sum, product);
                    total[t] = floats_fma(own.scale, product, total[t]);
                    if (has_mins(kind)) total[t] = floats_fma(own.min, input_sum, total[t]);
                }
            }
            panel += block_bytes(kind);
            digits += x->together * DIGITS * BLOCK;
            scales += x->together * 4;
            fine += x->together;
        }
    }
    for (int t = 0; t < num_tokens; t++) floats_store(out + PANEL_ROWS * t, total[t]);
}

#define DEFINE_TILE(name, bits, header, zero, planes, tokens)                                                          \
    static void name##_##planes##_##tokens(const uint8_t *panel, int64_t groups, int64_t blocks, const Activations *x, \
                                           int64_t token, float *out) {                                                \
        const Kind kind = {bits, header, zero};                                                                        \
        plane_tile(kind, planes, tokens, panel, groups, group_blocks(kind, blocks), x, token, out);                    \
    }
#define DEFINE_TILES(name, bits, header, zero)                                                                         \
    DEFINE_TILE(name, bits, header, zero, 2, 1)                                                                        \
    DEFINE_TILE(name, bits, header, zero, 2, 2)                                                                        \
    DEFINE_TILE(name, bits, header, zero, 2, 3)                                                                        \
    DEFINE_TILE(name, bits, header, zero, 2, 4)                                                                        \
    DEFINE_TILE(name, bits, header, zero, 3, 1)                                                                        \
    DEFINE_TILE(name, bits, header, zero, 3, 2)                                                                        \
    DEFINE_TILE(name, bits, header, zero, 3, 3)                                                                        \
    DEFINE_TILE(name, bits, header, zero, 3, 4)
FOR_ALL_KINDS(DEFINE_TILES)

#define TWO_PLANES(name, bits, header, zero) {name##_2_1, name##_2_2, name##_2_3, name##_2_4},
#define THREE_PLANES(name, bits, header, zero) {name##_3_1, name##_3_2, name##_3_3, name##_3_4},
const QuantTile slip_plane_tiles[2][NUM_KINDS][MAX_QUANT_TILE] = {{FOR_ALL_KINDS(TWO_PLANES)}, {FOR_ALL_KINDS(THREE_PLANES)}};
