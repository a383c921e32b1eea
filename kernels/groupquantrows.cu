// Codes of rows of different bits, which come with `widths` and their running sum; otherwise as groupquant.cu. Compiled for
// one -DSCALAR and one -DLANES.
#include "common.cuh"
#include "groups.cuh"
#include "groupcodes.cuh"
#include "grouppieces.cuh"

struct Streams {
    static constexpr bool many_rows = true;
    static constexpr int bits = 0;
    const int* widths;
    const Index* sums;
    Index eights, size;
    __device__ __forceinline__ Held held(unsigned row) const {
        const int width = widths[row];
        const Index end = sums[row] * eights, start = end - width * eights;
        if (width < 1 || width > 8 || start < 0 || end > size) return {1, -1, -1};
        return {width, start, end};
    }
};

KERNEL groupquant_encode_rows(
    const SCALAR* x, unsigned char* codes, unsigned* meta, unsigned rows, Index columns, Index size, int group_size,
    const int* widths, const Index* sums, const Word* seed, unsigned stochastic) {
    const Streams streams{widths, sums, (columns + 7) / 8, size};
    encode(x, codes, meta, streams, rows, columns, group_size, state_of(seed), stochastic);
}

KERNEL groupquant_decode_rows(
    const unsigned char* codes, const unsigned* meta, SCALAR* out, unsigned rows, Index columns, Index size, int group_size,
    const int* widths, const Index* sums) {
    const Streams streams{widths, sums, (columns + 7) / 8, size};
    decode(codes, meta, out, streams, rows, columns, group_size, 0);
}

KERNEL groupquant_words(const SCALAR* x, unsigned* meta, unsigned rows, Index columns, int group_size) {
    const Groups<true> groups(x, 0, columns, group_size);
    for (Walk<true> walk(groups.steps); walk.goes_on(rows, groups.steps); walk.on(groups.steps)) {
        Elements elements;
        const int left = load(elements, x + Index(walk.row) * columns, groups, walk.step);
        const unsigned word = elements.word();
        if (place() == 0 && left > 0) meta[groups.number(walk.row, walk.step)] = word;
    }
}
