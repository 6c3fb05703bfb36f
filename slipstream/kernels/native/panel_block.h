/* Products of a block of tokens with panels, for kernels that hand out work to threads themselves. */
#ifndef SLIP_PANEL_BLOCK_H
#define SLIP_PANEL_BLOCK_H

#include <stdint.h>

#define PACKED (-1)

typedef struct {
    const void *numbers;
    int kind; /* of numbers, see cached.h */
} Panels;

typedef struct {
    const float *x, *bias; /* bias may be NULL */
    Panels panels;
    float *out, *room; /* for slip_panel_room(in) numbers; read for packed tokens and panels of 16 bits only */
    int64_t x_stride; /* from token to token; PACKED: tokens are as slip_pack_tokens has brought them into order */
    int64_t out_stride, tokens, in, out_size;
    int gated; /* a panel is LANES gates and the LANES values they gate */
    int adds;  /* the product is added to what is there */
} PanelBlock;

/* Tokens in the order in which tiles read them: [tiles][in][tokens of the tile]. */
void slip_pack_tokens(const float *x, int64_t stride, int64_t tokens, int64_t in, float *packed);

int64_t slip_num_panels(int64_t out_size, int gated);

int64_t slip_panel_room(int64_t in);

/* The panels from `first` to before `end`, on the calling thread. */
void slip_panel_block(const PanelBlock *block, int64_t first, int64_t end);

#endif
