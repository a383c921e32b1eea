// Entries of random matrices; the twin of actbench/ops/sketch. Compiled for one -DSCALAR (Float32, Float16,
// BFloat16). Entry i of `out` is random number `first + i` of the state, so any part can be made alone.
#include "common.cuh"

// One bit an entry: 0 is +1, 1 is -1.
KERNEL sketch_rademacher(SCALAR* out, Word state, Index first, Index count) {
    const bool whole = aligned(out);
    for (Index tile = first_tile(); tile * kTile < count; tile += tile_step()) {
        const Index start = tile * kTile + 8 * lane();
        const Word bits = random_bits(state, first + start);
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = (bits >> i) & 1 ? -1.0f : 1.0f;
        store8(out + start, count - start, whole, values);
    }
}

// 16 bits an entry: its index in a table of 65,536 values.
KERNEL sketch_gaussian(const float* table, SCALAR* out, Word state, Index first, Index count) {
    const bool whole = aligned(out);
    for (Index tile = first_tile(); tile * kTile < count; tile += tile_step()) {
        const Index start = tile * kTile + 8 * lane();
        float values[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Word bits = random_bits(state, 16 * Word(first + start + 4 * half));
#pragma unroll
            for (int i = 0; i < 4; ++i) values[4 * half + i] = table[(bits >> (16 * i)) & 0xffff];
        }
        store8(out + start, count - start, whole, values);
    }
}
