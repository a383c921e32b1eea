// An activation and the codes of its input; the twin of actbench/ops/activate. Compiled for one -DSCALAR (Float32,
// Float16, BFloat16) and one -DBITS (1 to 8). Read x, write y and codes: each byte moves once.
#include "common.cuh"
#include "search.cuh"

// The functions follow torch's CUDA kernels, in float32 and in the same order, so that the bits agree; the compiler may
// fuse a product and a sum, as there. What may be subnormal uses named instructions. If the bits differ on some device,
// ops/activate finds out and calls torch's own function.

struct Gelu {
    static __device__ __forceinline__ float of(float x) {
        constexpr float alpha = 0.70710678118654752440;  // sqrt(1/2)
        return product(product(x, 0.5f), 1.0f + erff(x * alpha));
    }
};

struct GeluTanh {
    static __device__ __forceinline__ float of(float x) {
        constexpr float beta = 1.41421356237309504880 * 1.12837916709551257390 * 0.5;  // sqrt(2/pi)
        constexpr float kappa = 0.044715;
        const float cube = x * x * x;
        const float inner = beta * (x + kappa * cube);
        return product(product(0.5f, x), 1.0f + tanhf(inner));
    }
};

struct Silu {
    static __device__ __forceinline__ float of(float x) { return quotient(x, 1.0f + expf(-x)); }
};

template <class Function>
__device__ __forceinline__ void activate(
    const SCALAR* x, const float* bounds, SCALAR* out, unsigned char* packed, Index count, unsigned sign_mask) {
    __shared__ float tree[1 << BITS];
    __shared__ Stage<BITS> stages[kWarps];
    const Search search(bounds, tree);
    const int tiles = tiles_of(count);
    const bool whole_x = aligned(x), whole_out = aligned(out), whole_packed = aligned(packed);
    for (int tile = first_tile(); tile < tiles; tile += tile_step()) {
        const Span<BITS> at(tile, count);
        const auto loaded = load_words(x + at.element, at.left, whole_x, SCALAR::nan);
        store_codes<BITS>(search.codes(loaded, sign_mask), packed + at.byte, at.bytes, whole_packed, stages[warp()]);
        float values[8];
        widen(loaded, values);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = Function::of(values[i]);
        store8(out + at.element, at.left, whole_out, values);
    }
}

KERNEL activate_gelu(const SCALAR* x, const float* bounds, SCALAR* out, unsigned char* packed, Index count, unsigned sign_mask) {
    activate<Gelu>(x, bounds, out, packed, count, sign_mask);
}

KERNEL activate_gelu_tanh(const SCALAR* x, const float* bounds, SCALAR* out, unsigned char* packed, Index count, unsigned sign_mask) {
    activate<GeluTanh>(x, bounds, out, packed, count, sign_mask);
}

KERNEL activate_silu(const SCALAR* x, const float* bounds, SCALAR* out, unsigned char* packed, Index count, unsigned sign_mask) {
    activate<Silu>(x, bounds, out, packed, count, sign_mask);
}
