// ReLU and its derivative as one bit an element; the twin of actbench/ops/mask. Compiled for one -DSCALAR (Float32,
// Float16, BFloat16). All is done on the bits: no type is widened, subnormal numbers are not zero, NaN stays as it is.
#include "common.cuh"

// Puts zero in place of what is not above zero and not NaN, and returns one bit for each that stays.
__device__ __forceinline__ unsigned rectify(Eight<SCALAR>& x) {
    unsigned group = 0;
    if constexpr (sizeof(SCALAR) == 4) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const bool passes = int(x.words[i]) > 0 || x.words[i] > 0xff800000;
            group |= unsigned(passes) << i;
            x.words[i] = passes ? x.words[i] : 0;
        }
        return group;
    } else {
        constexpr unsigned both = 0x10001, to_sign = 0x7fff - SCALAR::infinity;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned magnitude = x.words[i] & 0x7fff * both;
            // The first sum reaches the sign's place from 1 on, the second one from the first NaN on.
            const unsigned signs = ((magnitude + 0x7fff * both) & ~x.words[i]) | (magnitude + to_sign * both);
            const unsigned masks = permuted(signs, 0, 0xbb99);
            group |= masks & (0x20001u << 2 * i);
            x.words[i] &= masks;
        }
        return (group | group >> 16) & 0xff;
    }
}

// `out` may be x: a lane reads its elements before it writes them.
KERNEL relu_mask(const SCALAR* x, SCALAR* out, unsigned char* mask, Index count) {
    __shared__ Stage<1> stages[kWarps];
    const int tiles = tiles_of(count);
    const bool whole_x = aligned(x), whole_out = aligned(out), whole_mask = aligned(mask);
    for (int tile = first_tile(); tile < tiles; tile += tile_step()) {
        const Span<1> at(tile, count);
        Eight<SCALAR> values = load_words(x + at.element, at.left, whole_x, 0);
        const unsigned group = rectify(values);
        store_words(out + at.element, at.left, whole_out, values);
        store_codes<1>(group, mask + at.byte, at.bytes, whole_mask, stages[warp()]);
    }
}

// Puts zero in place of the elements whose bits are 0.
__device__ __forceinline__ void select(unsigned group, Eight<SCALAR>& values) {
    if constexpr (sizeof(SCALAR) == 4) {
#pragma unroll
        for (int i = 0; i < 8; ++i) values.words[i] = (group >> i) & 1 ? values.words[i] : 0;
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned four = (group >> 4 * i & 15) * 0x10204080;  // bit j is the highest one of byte j
            values.words[2 * i] &= permuted(four, 0, 0x9988);
            values.words[2 * i + 1] &= permuted(four, 0, 0xbbaa);
        }
    }
}

KERNEL mask_select(const unsigned char* mask, const SCALAR* grad, SCALAR* out, Index count) {
    __shared__ Stage<1> stages[kWarps];
    const int tiles = tiles_of(count);
    const bool whole_mask = aligned(mask), whole_grad = aligned(grad), whole_out = aligned(out);
    for (int tile = first_tile(); tile < tiles; tile += tile_step()) {
        const Span<1> at(tile, count);
        Eight<SCALAR> values = load_words(grad + at.element, at.left, whole_grad, 0);
        select(load_codes<1>(mask + at.byte, at.bytes, whole_mask, stages[warp()]), values);
        store_words(out + at.element, at.left, whole_out, values);
    }
}
