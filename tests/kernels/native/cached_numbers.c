/* Every number of 16 bits widened, and float32 numbers narrowed; the output must be the same on all machines. */
#include "cached.h"

#include <stdio.h>

static void widen(int kind) {
    uint16_t half[LANES];
    float wide[LANES], alone;
    uint64_t sum = 0, same = 1;
    for (int i = 0; i < 65536; i += LANES) {
        for (int n = 0; n < LANES; n++) half[n] = (uint16_t)(i + n);
        *(vec *)wide = cached_vec((const char *)half, kind);
        for (int n = 0; n < LANES; n++) {
            uint32_t bits;
            alone = cached_number((const char *)(half + n), kind);
            same &= alone != alone ? wide[n] != wide[n] : memcmp(&alone, wide + n, 4) == 0;
            memcpy(&bits, &alone, 4);
            sum = sum * 31 + (alone != alone ? 1 : bits);
        }
    }
    printf("%d %llu %llu\n", kind, (unsigned long long)same, (unsigned long long)sum);
}

static void narrow(int kind) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < 1ull << 32; i += 1021) {
        uint32_t bits = (uint32_t)i;
        float value;
        uint16_t half;
        memcpy(&value, &bits, 4);
        cached_store((char *)&half, &value, 1, kind);
        sum = sum * 31 + (value != value ? 1 : half);
    }
    printf("%d %llu\n", kind, (unsigned long long)sum);
}

int main(void) {
    for (int kind = CACHED_FLOAT16; kind <= CACHED_BFLOAT16; kind++) {
        widen(kind);
        narrow(kind);
    }
    return 0;
}
