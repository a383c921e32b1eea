// SmaQ blocks; the twin of actbench/ops/smaq, where format.py has the layout and reference.py the meaning of a code.
// Compiled for one -DSCALAR (Float32, Float16, BFloat16) and one -DTILES: 1 for blocks of at most 256 elements, 4 for
// larger ones. A warp works on one block, which stays in registers; its bytes pass through shared memory.
#include "common.cuh"
#include "groups.cuh"
#include "outliers.cuh"
#include "smaqblocks.cuh"

KERNEL smaq_encode(
    const SCALAR* x, unsigned char* packed, Index count, int main_bits, int outlier_bits, int outliers,
    int block, Word state, unsigned stochastic) {
    __shared__ Shared all[kWarps];
    Shared& shared = all[warp()];
    const Form form{main_bits, outlier_bits, outliers, block};
    const int block_bytes = form.bytes_of(block);
    for (Index index = first_tile(); index * block < count; index += tile_step()) {
        const Index left = count - index * block;
        const int here = left < block ? int(left) : block;
        Elements elements(x + index * block, here);
        make_bytes(elements, form, here, state, index * block, stochastic, shared);
        __syncwarp();
        move(shared.bytes, packed + index * block_bytes, form.bytes_of(here));
        __syncwarp();
    }
}

template <class Scalar> __device__ __forceinline__ float limited(float value) { return value; }
template <> __device__ __forceinline__ float limited<Float16>(float value) {
    constexpr float most = 65504;
    return above(value, most) ? most : above(-most, value) ? -most : value;
}

// Decodes elements start .. start + count - 1; the packed bytes have room for `room`.
KERNEL smaq_decode(
    const unsigned char* packed, SCALAR* out, Index size, Index room, Index start, Index count, int main_bits,
    int outlier_bits, int outliers, int block) {
    __shared__ Shared all[kWarps];
    Shared& shared = all[warp()];
    const Form form{main_bits, outlier_bits, outliers, block};
    const int block_bytes = form.bytes_of(block);
    for (Index index = start / block + first_tile(); index * block < start + count; index += tile_step()) {
        const Index rest = room - index * block, left = size - index * block_bytes;
        const int here = rest < block ? int(rest) : block;
        move(packed + index * block_bytes, shared.bytes, left < block_bytes ? int(left) : block_bytes);
        __syncwarp();
        const Levels levels(form, shared);
        int before = 0;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            float values[8];
            read_eight(form, levels, shared, tile, here, before, values);
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = limited<SCALAR>(values[i]);
            const int element = tile * kTile + 8 * lane();
            const Index first = index * block + element, end = start + count - first;
            store_from(start - first, out + (first - start), end < here - element ? int(end) : here - element, values);
        }
        __syncwarp();
    }
}
