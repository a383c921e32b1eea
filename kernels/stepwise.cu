// Few-bit derivatives; the twin of actbench/ops/stepwise. Compiled for one -DSCALAR (Float32, Float16, BFloat16)
// and one -DBITS (1 to 8). Read x, write codes; read codes and gradient, write gradient: each byte moves once.
#include "common.cuh"
#include "search.cuh"

KERNEL stepwise_encode(const SCALAR* x, const float* bounds, unsigned char* packed, Index count, unsigned sign_mask) {
    __shared__ float tree[1 << BITS];
    __shared__ Stage<BITS> stages[kWarps];
    plant(bounds, tree);
    const Crown crown(tree);
    const Index bytes = (count * BITS + 7) / 8;
    const bool whole_x = aligned(x), whole_packed = aligned(packed);
    for (Index tile = first_tile(); tile * kTile < count; tile += tile_step()) {
        const Index start = tile * kTile + 8 * lane(), byte = tile * kLanes * BITS;
        float values[8];
        load8(x + start, count - start, whole_x, values);
        const Group<BITS> group = codes_of(values, crown, tree, sign_mask);
        store_codes<BITS>(group, packed + byte, bytes - byte, whole_packed, stages[warp()]);
    }
}

KERNEL stepwise_decode(const unsigned char* packed, const float* levels, const SCALAR* grad, SCALAR* out, Index count) {
    __shared__ float table[1 << BITS];
    __shared__ Stage<BITS> stages[kWarps];
    if (threadIdx.x < 1 << BITS) table[threadIdx.x] = levels[threadIdx.x];
    __syncthreads();
    const Index bytes = (count * BITS + 7) / 8;
    const bool whole_packed = aligned(packed), whole_grad = aligned(grad), whole_out = aligned(out);
    for (Index tile = first_tile(); tile * kTile < count; tile += tile_step()) {
        const Index start = tile * kTile + 8 * lane(), byte = tile * kLanes * BITS;
        float values[8];
        load8(grad + start, count - start, whole_grad, values);
        const Group<BITS> group = load_codes<BITS>(packed + byte, bytes - byte, whole_packed, stages[warp()]);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            values[i] = product(values[i], table[(group >> (BITS * i)) & ((1 << BITS) - 1)]);
        store8(out + start, count - start, whole_out, values);
    }
}
