// Codes of one stream in groups with two bounds each; the twin of methods/actnn/ops/groupquant. Compiled for one -DSCALAR
// (Float32, Float16, BFloat16), one -DBITS, 1 to 8, and one -DLANES, the lanes that share a group (groupcodes.cuh).
#include "common.cuh"
#include "groups.cuh"
#include "groupcodes.cuh"
#include "grouppieces.cuh"

struct OneStream {
    static constexpr bool many_rows = false;
    static constexpr int bits = BITS;
    Index size;
    __device__ __forceinline__ Held held(unsigned) const { return {bits, 0, size}; }
};

KERNEL groupquant_encode(
    const SCALAR* x, unsigned char* codes, unsigned* meta, Index count, Index size, int group_size, const Word* seed,
    unsigned stochastic) {
    encode(x, codes, meta, OneStream{size}, 1, count, group_size, state_of(seed), stochastic);
}

KERNEL groupquant_decode(
    const unsigned char* codes, const unsigned* meta, SCALAR* out, Index count, Index size, int group_size, int start) {
    decode(codes, meta, out, OneStream{size}, 1, count, group_size, start);
}
