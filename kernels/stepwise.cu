// Few-bit derivatives; the twin of actbench/ops/stepwise.py. Compiled for one -DSCALAR (Float32, Float16, BFloat16)
// and one -DBITS (1 to 8). Read x, write codes; read codes and gradient, write gradient: each byte moves once.
#include "common.cuh"

// The bounds as a search tree: the children of node k are 2k and 2k + 1, level l starts at node 2^l. The nodes of a
// level stand side by side, so lanes at different nodes of the first six levels read different banks.
__device__ void plant(const float* bounds, float* tree) {
    const int node = threadIdx.x;
    if (node > 0 && node < 1 << BITS) {
        const int level = 31 - __clz(node);
        const int position = node - (1 << level);
        tree[node] = bounds[(2 * position + 1) * (1 << (BITS - 1 - level)) - 1];
    }
    __syncthreads();
}

// The first three levels stay in registers.
struct Crown {
    float nodes[8];
    __device__ explicit Crown(const float* tree) {
#pragma unroll
        for (int i = 1; i < 8; ++i) nodes[i] = i < 1 << BITS ? tree[i] : 0;
    }
};

// How many bounds lie strictly below x; none below NaN.
__device__ __forceinline__ unsigned code_of(float x, const Crown& crown, const float* tree) {
    const float* top = crown.nodes;
    const bool first = above(x, top[1]);
    unsigned node = first ? 3 : 2;
    if (BITS > 1) {
        const bool second = above(x, first ? top[3] : top[2]);
        node = (first ? 6 : 4) + (second ? 1 : 0);
        if (BITS > 2) {
            const bool third = above(x, second ? (first ? top[7] : top[5]) : (first ? top[6] : top[4]));
            node = (first ? 12 : 8) + (second ? 2 : 0) + (third ? 1 : 0);
        }
    }
#pragma unroll
    for (int level = 3; level < BITS; ++level) node = 2 * node + (above(x, tree[node]) ? 1 : 0);
    return node - (1u << BITS);
}

// sign_mask is 0x7fffffff to encode |x|, else 0xffffffff.
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
        Group<BITS> group = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float value = __uint_as_float(__float_as_uint(values[i]) & sign_mask);
            group += Group<BITS>(code_of(value, crown, tree)) << (BITS * i);
        }
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
