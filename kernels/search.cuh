// How many of 2^BITS - 1 ascending bounds lie strictly below a number, and the codes of eight numbers as one group; no
// bound is below NaN. Needs common.cuh, one -DSCALAR and one -DBITS.

// Two numbers are compared with one bound in one instruction: 0xffff in each half that is above the bound's. The tests'
// host header has the two as well.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ unsigned halves_above(unsigned two, unsigned bounds) {
    unsigned masks;
    asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(masks) : "r"(two), "r"(bounds));
    return masks;
}
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned bfloats_above(unsigned two, unsigned bounds) {
    unsigned masks;
    asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(masks) : "r"(two), "r"(bounds));
    return masks;
}
#endif
#endif

template <class Scalar> struct Pairs { static constexpr bool compare = false; };
template <> struct Pairs<Float16> {
    static constexpr bool compare = true;
    static __device__ __forceinline__ unsigned above(unsigned two, unsigned bounds) { return halves_above(two, bounds); }
};
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <> struct Pairs<BFloat16> {
    static constexpr bool compare = true;
    static __device__ __forceinline__ unsigned above(unsigned two, unsigned bounds) { return bfloats_above(two, bounds); }
};
#endif

// ---- By a tree: BITS comparisons for each number.

// The bounds as a search tree: the children of node k are 2k and 2k + 1, level l starts at node 2^l. The nodes of a
// level stand side by side, so lanes at different nodes of the first six levels read different banks. The first three
// levels stay in registers.
class Tree {
    const float* tree;
    float top[8];

    __device__ __forceinline__ unsigned code_of(float x) const {
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

public:
    // All threads of the block plant it, in a table of 2^BITS floats that they share.
    __device__ Tree(const float* bounds, float* shared) : tree(shared) {
        const int node = threadIdx.x;
        if (node > 0 && node < 1 << BITS) {
            const int level = 31 - __clz(node);
            const int position = node - (1 << level);
            shared[node] = bounds[(2 * position + 1) * (1 << (BITS - 1 - level)) - 1];
        }
        __syncthreads();
#pragma unroll
        for (int i = 1; i < 8; ++i) top[i] = i < 1 << BITS ? tree[i] : 0;
    }

    // sign_mask is 0x7fffffff to encode |x|, else 0xffffffff.
    __device__ __forceinline__ Group<BITS> codes(const Eight<SCALAR>& x, unsigned sign_mask) const {
        Group<BITS> group = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float value = __uint_as_float(__float_as_uint(x[i].value()) & sign_mask);
            group += Group<BITS>(code_of(value)) << (BITS * i);
        }
        return group;
    }
};

// ---- By all bounds: two half-type numbers are compared with each.

template <class Scalar>
class AllBounds {
    static constexpr int count = (1 << BITS) - 1;
    unsigned twice[count];  // a bound in both halves

    // A number of this type is above a bound if and only if it is above the bound rounded down to the type.
    static __device__ unsigned rounded_down(float bound) {
        const Scalar nearest = Scalar::nearest(bound);
        if (!above(nearest.value(), bound)) return nearest.bits;
        return nearest.bits & 0x8000 ? nearest.bits + 1 : nearest.bits - 1;
    }

    // The codes of two numbers, in the upper half of a word.
    __device__ __forceinline__ unsigned two_codes(unsigned two) const {
        unsigned found = 0;
#pragma unroll
        for (int i = 0; i < count; ++i) found += Pairs<Scalar>::above(two, twice[i]);
        // Each mask of the low half is 65,535: `found` is -(low + ((high - low) << 16)). The product is
        // (low + (high << BITS)) << 16, and low << BITS below it.
        constexpr unsigned one = 1u << BITS;
        return found * (0u - ((one + 1) << 16 | one));
    }

    // Four codes from two words as above, in the upper half of a word.
    static __device__ __forceinline__ unsigned four_codes(unsigned first, unsigned second) {
        return permuted(first, second, 0x7632) * (0x10000 + (1u << 2 * BITS));
    }

public:
    __device__ AllBounds(const float* bounds, float*) {
#pragma unroll
        for (int i = 0; i < count; ++i) twice[i] = rounded_down(bounds[i]) * 0x10001;
    }

    __device__ __forceinline__ Group<BITS> codes(const Eight<Scalar>& x, unsigned sign_mask) const {
        const unsigned masks = (sign_mask & 0xffff0000) | sign_mask >> 16;
        const unsigned low = four_codes(two_codes(x.words[0] & masks), two_codes(x.words[1] & masks));
        const unsigned high = four_codes(two_codes(x.words[2] & masks), two_codes(x.words[3] & masks));
        return low >> 16 | (high >> 16) << 4 * BITS;
    }
};

// From 5 bits on, 31 bounds are more work than a way down the tree.
template <class Scalar, bool all> struct SearchBy { using type = Tree; };
#if BITS <= 4
template <class Scalar> struct SearchBy<Scalar, true> { using type = AllBounds<Scalar>; };
#endif
using Search = SearchBy<SCALAR, Pairs<SCALAR>::compare>::type;
