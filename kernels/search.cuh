// How many of 2^BITS - 1 ascending bounds lie below a number, and the codes of eight numbers as one group. Needs
// common.cuh and one -DBITS.

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

// How many bounds lie strictly below x; no bound is below NaN.
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
__device__ __forceinline__ Group<BITS> codes_of(const float (&values)[8], const Crown& crown, const float* tree, unsigned sign_mask) {
    Group<BITS> group = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float value = __uint_as_float(__float_as_uint(values[i]) & sign_mask);
        group += Group<BITS>(code_of(value, crown, tree)) << (BITS * i);
    }
    return group;
}
