// Few-bit derivatives; the twin of actbench/ops/stepwise. Compiled for one -DSCALAR (Float32, Float16, BFloat16)
// and one -DBITS (1 to 8). Read x, write codes; read codes and gradient, write gradient: each byte moves once.
#include "common.cuh"
#include "search.cuh"

KERNEL stepwise_encode(const SCALAR* x, const float* bounds, unsigned char* packed, Index count, unsigned sign_mask) {
    __shared__ float tree[1 << BITS];
    __shared__ Stage<BITS> stages[kWarps];
    const Search search(bounds, tree);
    const int tiles = tiles_of(count);
    const bool whole_x = aligned(x), whole_packed = aligned(packed);
    for (int tile = first_tile(); tile < tiles; tile += tile_step()) {
        const Span<BITS> at(tile, count);
        const auto loaded = load_words(x + at.element, at.left, whole_x, SCALAR::nan);
        store_codes<BITS>(search.codes(loaded, sign_mask), packed + at.byte, at.bytes, whole_packed, stages[warp()]);
    }
}

KERNEL stepwise_decode(const unsigned char* packed, const float* levels, const SCALAR* grad, SCALAR* out, Index count) {
    __shared__ float table[1 << BITS];
    __shared__ Stage<BITS> stages[kWarps];
    if (threadIdx.x < 1 << BITS) table[threadIdx.x] = levels[threadIdx.x];
    __syncthreads();
    const int tiles = tiles_of(count);
    const bool whole_packed = aligned(packed), whole_grad = aligned(grad), whole_out = aligned(out);
    for (int tile = first_tile(); tile < tiles; tile += tile_step()) {
        const Span<BITS> at(tile, count);
        float values[8];
        load8(grad + at.element, at.left, whole_grad, values);
        const Group<BITS> group = load_codes<BITS>(packed + at.byte, at.bytes, whole_packed, stages[warp()]);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            values[i] = product(values[i], table[(group >> (BITS * i)) & ((1 << BITS) - 1)]);
        store8(out + at.element, at.left, whole_out, values);
    }
}
