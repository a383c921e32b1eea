// Codes of -DBITS bits (1 to 8) as one little-endian stream; the twin of actbench/ops/bitpack.
#include "common.cuh"

// Eight bytes, one code in each; zero past the end.
__device__ __forceinline__ Word load_bytes(const unsigned char* source, Index left, bool whole) {
    if (whole && left >= 8) return *reinterpret_cast<const Word*>(source);
    Word word = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < left) word |= Word(source[i]) << (8 * i);
    return word;
}

__device__ __forceinline__ void store_bytes(Word word, unsigned char* target, Index left, bool whole) {
    if (whole && left >= 8) {
        *reinterpret_cast<Word*>(target) = word;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < left) target[i] = static_cast<unsigned char>(word >> (8 * i));
}

KERNEL pack_codes(const unsigned char* codes, unsigned char* packed, Index count) {
    __shared__ Stage<BITS> stages[kWarps];
    const Index bytes = (count * BITS + 7) / 8;
    const bool whole_codes = aligned(codes), whole_packed = aligned(packed);
    for (Index tile = first_tile(); tile * kTile < count; tile += tile_step()) {
        const Index start = tile * kTile + 8 * lane(), byte = tile * kLanes * BITS;
        const Word word = load_bytes(codes + start, count - start, whole_codes);
        Group<BITS> group = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) group |= Group<BITS>((word >> (8 * i)) & ((1 << BITS) - 1)) << (BITS * i);
        store_codes<BITS>(group, packed + byte, bytes - byte, whole_packed, stages[warp()]);
    }
}

KERNEL unpack_codes(const unsigned char* packed, unsigned char* codes, Index count) {
    __shared__ Stage<BITS> stages[kWarps];
    const Index bytes = (count * BITS + 7) / 8;
    const bool whole_packed = aligned(packed), whole_codes = aligned(codes);
    for (Index tile = first_tile(); tile * kTile < count; tile += tile_step()) {
        const Index start = tile * kTile + 8 * lane(), byte = tile * kLanes * BITS;
        const Group<BITS> group = load_codes<BITS>(packed + byte, bytes - byte, whole_packed, stages[warp()]);
        Word word = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) word |= Word((group >> (BITS * i)) & ((1 << BITS) - 1)) << (8 * i);
        store_bytes(word, codes + start, count - start, whole_codes);
    }
}
