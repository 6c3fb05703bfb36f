/* Prints a checksum of products of every kind of GGUF block, for comparing machines. */
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void slip_pack_gguf(int kind, const uint8_t *raw, const int64_t *row_order, int64_t rows, int64_t in, uint8_t *panels, int num_threads);

#define ROWS 37
#define IN 768
#define TOKENS 7

static uint32_t state = 1;
static uint32_t draw(void) { return (state = state * 1664525u + 1013904223u) >> 8; }

static const struct {
    int64_t weights, bytes, halves, half_at;
} blocks[] = {
    {32, 18, 1, 0}, {32, 20, 2, 0}, {32, 22, 1, 0}, {32, 24, 2, 0}, {32, 34, 1, 0}, {256, 144, 2, 0}, {256, 176, 2, 0}, {256, 210, 1, 208},
};

int main(void) {
    static uint8_t raw[ROWS * IN * 2], panels[64 * IN * 2];
    static float x[TOKENS * IN], out[TOKENS * ROWS];
    for (int i = 0; i < TOKENS * IN; i++) x[i] = ((float)draw() - 8388608.0f) * 1e-7f * (i % 97 ? 1.0f : 50.0f);
    for (int kind = 0; kind < 8; kind++) {
        int64_t num_blocks = ROWS * IN / blocks[kind].weights;
        for (int64_t i = 0; i < num_blocks * blocks[kind].bytes; i++) raw[i] = (uint8_t)draw();
        for (int64_t i = 0; i < num_blocks; i++)
            for (int64_t h = 0; h < blocks[kind].halves; h++) { /* exponents that are no infinities */
                uint8_t *upper = raw + i * blocks[kind].bytes + blocks[kind].half_at + 2 * h + 1;
                *upper = (uint8_t)((*upper & 0x83) | 0x20);
            }
        slip_pack_gguf(kind, raw, NULL, ROWS, IN, panels, 1);
        Segment segment = {panels, kind, ROWS, 1};
        Matrix matrix = {NULL, &segment, 1, IN, ROWS, 0};
        for (int planes = 0; planes < 4; planes += planes ? 1 : 2) {
            slip_product(&matrix, x, NULL, out, TOKENS, planes, 1);
            uint64_t hash = 1469598103934665603u;
            for (size_t i = 0; i < sizeof out; i++) hash = (hash ^ ((uint8_t *)out)[i]) * 1099511628211u;
            printf("kind %d, %d planes: %016llx, first %g\n", kind, planes, (unsigned long long)hash, out[0]);
        }
    }
}
