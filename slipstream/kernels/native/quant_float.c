/* Products of quantised weights with activations as they are, float32.
 *
 * Codes become numbers in registers; scales are applied once a block. A block's sum is one chain of fused additions over
 * its inputs, a row's one over its blocks, whatever the tile and whatever the machine: a token's result does not depend
 * on the tokens beside it, and is the same on all CPUs.
 */
#include "quant_format.h"

FLOAT_TILE void float_tile(Kind kind, int num_tokens, const uint8_t *panel, int64_t groups, int64_t blocks,
                             const Activations *x, int64_t token, float *out) {
    Floats total[MAX_QUANT_TILE];
    const float *values = x->values + block_at(x, token, 0) * BLOCK, *scales = x->scales + block_at(x, token, 0) * 4;
    for (int t = 0; t < num_tokens; t++) total[t] = floats_all(0.0f);
    const int parts = block_parts(kind), part_chunks = CHUNKS / parts;
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *header = panel;
        panel += header_bytes(kind);
        for (int64_t i = 0; i < header_bytes(kind); i += 64) __builtin_prefetch(header + i + PREFETCH_BYTES);
        for (int64_t block = 0; block < blocks; block++) {
            _Pragma("GCC unroll 8") for (int i = 0; i < kind.bits; i++) __builtin_prefetch(panel + 64 * i + PREFETCH_BYTES);
            _Pragma("GCC unroll 2") for (int part = 0; part < parts; part++) {
                Floats sums[MAX_QUANT_TILE];
                _Pragma("GCC unroll 4") for (int t = 0; t < num_tokens; t++) sums[t] = floats_all(0.0f);
                _Pragma("GCC unroll 8") for (int c = part * part_chunks; c < (part + 1) * part_chunks; c++) {
                    Bytes codes = bytes_minus(chunk_codes(kind, panel, c), kind.zero);
                    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
                        Floats weights = bytes_to_floats(codes, j);
                        _Pragma("GCC unroll 4") for (int t = 0; t < num_tokens; t++)
                            sums[t] = floats_fma(weights, floats_all(values[t * BLOCK + 4 * c + j]), sums[t]);
                    }
                }
                Scales own = block_scales(kind, header, block, part);
                _Pragma("GCC unroll 4") for (int t = 0; t < num_tokens; t++) {
                    total[t] = floats_fma(own.scale, sums[t], total[t]);
                    if (has_mins(kind)) total[t] = floats_fma(own.min, floats_all(scales[4 * t + 1]), total[t]);
                }
            }
            panel += block_bytes(kind);
            values += x->together * BLOCK;
            scales += x->together * 4;
        }
    }
    for (int t = 0; t < num_tokens; t++) floats_store(out + PANEL_ROWS * t, total[t]);
}

#define DEFINE_TILE(name, bits, header, zero, tokens)                                                                  \
    static void name##_##tokens(const uint8_t *panel, int64_t groups, int64_t blocks, const Activations *x,            \
                                int64_t token, float *out) {                                                           \
        const Kind kind = {bits, header, zero};                                                                        \
        float_tile(kind, tokens, panel, groups, group_blocks(kind, blocks), x, token, out);                            \
    }
#define DEFINE_TILES(name, bits, header, zero)                                                                         \
    DEFINE_TILE(name, bits, header, zero, 1)                                                                           \
    DEFINE_TILE(name, bits, header, zero, 2)                                                                           \
    DEFINE_TILE(name, bits, header, zero, 3)                                                                           \
    DEFINE_TILE(name, bits, header, zero, 4)
FOR_ALL_KINDS(DEFINE_TILES)

#define TILES(name, bits, header, zero) {name##_1, name##_2, name##_3, name##_4},
const QuantTile slip_float_tiles[NUM_KINDS][MAX_QUANT_TILE] = {FOR_ALL_KINDS(TILES)};
