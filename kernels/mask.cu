// ReLU and its derivative as one bit an element; the twin of actbench/ops/mask. Compiled for one -DSCALAR (Float32,
// Float16, BFloat16).
#include "common.cuh"

// Above zero, or NaN; tested on the bits, since a comparison may take subnormal numbers for zero.
__device__ __forceinline__ bool positive(float x) {
    const unsigned bits = __float_as_uint(x);
    return int(bits) > 0 || bits > 0xff800000;
}

// `out` may be x: a lane reads its elements before it writes them.
KERNEL relu_mask(const SCALAR* x, SCALAR* out, unsigned char* mask, Index count) {
    __shared__ Stage<1> stages[kWarps];
    const Index bytes = (count + 7) / 8;
    const bool whole_x = aligned(x), whole_out = aligned(out), whole_mask = aligned(mask);
    for (Index tile = first_tile(); tile * kTile < count; tile += tile_step()) {
        const Index start = tile * kTile + 8 * lane(), byte = tile * kLanes, left = count - start;
        float values[8];
        load8(x + start, left, whole_x, values);
        unsigned group = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const bool passes = positive(values[i]);
            group |= unsigned(passes && i < left) << i;
            values[i] = passes ? values[i] : 0.0f;
        }
        store8(out + start, left, whole_out, values);
        store_codes<1>(group, mask + byte, bytes - byte, whole_mask, stages[warp()]);
    }
}

KERNEL mask_select(const unsigned char* mask, const SCALAR* grad, SCALAR* out, Index count) {
    __shared__ Stage<1> stages[kWarps];
    const Index bytes = (count + 7) / 8;
    const bool whole_mask = aligned(mask), whole_grad = aligned(grad), whole_out = aligned(out);
    for (Index tile = first_tile(); tile * kTile < count; tile += tile_step()) {
        const Index start = tile * kTile + 8 * lane(), byte = tile * kLanes;
        float values[8];
        load8(grad + start, count - start, whole_grad, values);
        const unsigned group = load_codes<1>(mask + byte, bytes - byte, whole_mask, stages[warp()]);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = (group >> i) & 1 ? values[i] : 0.0f;
        store8(out + start, count - start, whole_out, values);
    }
}
