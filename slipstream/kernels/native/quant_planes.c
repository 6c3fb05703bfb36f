/* Products of quantised weights with activations in planes of bytes.
 *
 * A block of an activation row is fixed point, in three signed digits of 8 bits. One instruction multiplies 64 codes with
 * digits and adds fours of them; all sums of a block are exact, so that only the order of the blocks matters, which is
 * the same in every tile: a token's result does not depend on the tokens beside it. With two planes the lowest digits
 * are zeros in most blocks, and where all of a tile's are, leaving them out changes nothing.
 */
#include "quant_format.h"

INLINE Floats joined(const Ints *digit_sums) {
    Floats low = ints_to_floats(ints_join(digit_sums[1], digit_sums[2]));
    return floats_fma(ints_to_floats(digit_sums[0]), floats_all(65536.0f), low);
}

/* Adds the products of some digits, from `first` to before `end`, with the codes of a part of a block. */
INLINE void add_digits(Kind kind, int num_tokens, const uint8_t *block, int part, const int8_t *const *digits, int64_t at,
                       int first, int end, Ints (*sums)[DIGITS]) {
    const int part_chunks = CHUNKS / block_parts(kind);
    _Pragma("GCC unroll 8") for (int c = part * part_chunks; c < (part + 1) * part_chunks; c++) {
        Bytes codes = chunk_codes(kind, block, c);
        _Pragma("GCC unroll 4") for (int t = 0; t < num_tokens; t++)
            _Pragma("GCC unroll 3") for (int p = first; p < end; p++)
                sums[t][p] = ints_dot(sums[t][p], codes, digits[t] + (at * DIGITS + p) * BLOCK + 4 * c);
    }
}

PLANE_TILE void plane_tile(Kind kind, int planes, int num_tokens, const uint8_t *panel, int64_t groups, int64_t blocks,
                           const Activations *x, int64_t token, float *out) {
    Floats total[MAX_QUANT_TILE];
    const int8_t *digits[MAX_QUANT_TILE];
    const float *scales[MAX_QUANT_TILE];
    const uint8_t *fine[MAX_QUANT_TILE];
    for (int t = 0; t < num_tokens; t++) {
        total[t] = floats_all(0.0f);
        digits[t] = x->digits + (token + t) * x->blocks * DIGITS * BLOCK;
        scales[t] = x->scales + (token + t) * x->blocks * 4;
        fine[t] = x->fine + (token + t) * x->blocks;
    }
    const int parts = block_parts(kind);
    int64_t at = 0;
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *header = panel;
        panel += header_bytes(kind);
        for (int64_t i = 0; i < header_bytes(kind); i += 64) __builtin_prefetch(header + i + PREFETCH_BYTES);
        for (int64_t block = 0; block < blocks; block++, at++, panel += block_bytes(kind)) {
            _Pragma("GCC unroll 8") for (int i = 0; i < kind.bits; i++) __builtin_prefetch(panel + 64 * i + PREFETCH_BYTES);
            int any_fine = 0;
            _Pragma("GCC unroll 4") for (int t = 0; t < num_tokens; t++) any_fine |= fine[t][at];
            _Pragma("GCC unroll 2") for (int part = 0; part < parts; part++) {
                Ints sums[MAX_QUANT_TILE][DIGITS];
                _Pragma("GCC unroll 4") for (int t = 0; t < num_tokens; t++)
                    _Pragma("GCC unroll 3") for (int p = 0; p < DIGITS; p++) sums[t][p] = ints_zero();
                add_digits(kind, num_tokens, panel, part, digits, at, 0, planes, sums);
                if (planes < DIGITS && any_fine) add_digits(kind, num_tokens, panel, part, digits, at, planes, DIGITS, sums);
                Scales own = block_scales(kind, header, block, part);
                _Pragma("GCC unroll 4") for (int t = 0; t < num_tokens; t++) {
                    const float *scale = scales[t] + 4 * at;
                    Floats input_sum = floats_all(scale[parts == 1 ? 1 : 2 + part]);
                    Floats product = floats_mul(joined(sums[t]), floats_all(scale[0]));
                    if (kind.zero) product = floats_fma(floats_all((float)-kind.zero), input_sum, product);
                    total[t] = floats_fma(own.scale, product, total[t]);
                    if (has_mins(kind)) total[t] = floats_fma(own.min, input_sum, total[t]);
                }
            }
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
