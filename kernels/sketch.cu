// Entries of random matrices, and the halves of the matrix that they are multiplied with; the twin of
// actbench/methods/randomized/ops/matrix.py and halves.py. Compiled for one -DSCALAR (Float32, Float16, BFloat16).
// Entry i of `out` is random number `first + i % period` of the seed, so any part can be made alone, and repeated.
#include "common.cuh"

// a - b, subnormal numbers too, which -ftz=true would make zero.
__device__ __forceinline__ float left_by(float a, float b) {
#ifdef __CUDA_ARCH__
    float result;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a - b;
#endif
}

// Stores eight entries at `start`, a multiple of 8 as the period is, and in all repetitions.
__device__ __forceinline__ void store_repeated(SCALAR* out, Index start, Index period, Index count, bool whole, const float (&values)[8]) {
    for (Index at = start; at < count; at += period) store8(out + at, count - at, whole, values);
}

// One bit an entry: 0 is +1, 1 is -1.
KERNEL sketch_rademacher(SCALAR* out, const Word* seed, Index first, Index period, Index count) {
    const bool whole = aligned(out);
    const Word state = state_of(seed);
    const Index made = period < count ? period : count;
    for (Index tile = first_tile(); tile * kTile < made; tile += tile_step()) {
        const Index start = tile * kTile + 8 * lane();
        if (start >= made) continue;
        const Word bits = random_bits(state, first + start);
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = (bits >> i) & 1 ? -1.0f : 1.0f;
        store_repeated(out, start, period, count, whole, values);
    }
}

// 16 bits an entry: its index in a table of 65,536 values.
KERNEL sketch_gaussian(const float* table, SCALAR* out, const Word* seed, Index first, Index period, Index count) {
    const bool whole = aligned(out);
    const Word state = state_of(seed);
    const Index made = period < count ? period : count;
    for (Index tile = first_tile(); tile * kTile < made; tile += tile_step()) {
        const Index start = tile * kTile + 8 * lane();
        if (start >= made) continue;
        float values[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Word bits = random_bits(state, 16 * Word(first + start + 4 * half));
#pragma unroll
            for (int i = 0; i < 4; ++i) values[4 * half + i] = table[(bits >> (16 * i)) & 0xffff];
        }
        store_repeated(out, start, period, count, whole, values);
    }
}

// Two bfloat16 numbers whose sum is x * scale to 2^-17 of it: the nearest one, and behind all of these the nearest to
// what that leaves, which float32 holds exactly.
KERNEL sketch_halves(const Float32* x, BFloat16* out, float scale, Index count) {
    const bool in = aligned(x), first = aligned(out), second = aligned(out + count);
    for (Index tile = first_tile(); tile * kTile < count; tile += tile_step()) {
        const Index start = tile * kTile + 8 * lane();
        if (start >= count) continue;
        float high[8], low[8];
        load8(x + start, count - start, in, high);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float scaled = product(high[i], scale);
            high[i] = BFloat16::nearest(scaled).value();
            low[i] = left_by(scaled, high[i]);
        }
        store8(out + start, count - start, first, high);
        store8(out + count + start, count - start, second, low);
    }
}
