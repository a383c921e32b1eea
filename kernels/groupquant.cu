// Codes of 1 to 8 bits in groups with two bounds each; the twin of actbench/ops/groupquant. Compiled for one -DSCALAR
// (Float32, Float16, BFloat16) and one -DTILES: 1 for groups of at most 256, which stay in registers, 4 for larger
// ones, whose second read comes from the cache. Rows of different bits come with `widths`
// and their running sum.
#include "common.cuh"
#include "groups.cuh"

// The place of a row's codes; `start` is negative if they do not fit the buffer.
struct Place {
    int bits;
    Index start, end;
};

struct OneStream {
    static constexpr bool many_rows = false;
    int bits;
    Index size;
    __device__ __forceinline__ Place place(Index) const { return {bits, 0, size}; }
};

struct Streams {
    static constexpr bool many_rows = true;
    const int* widths;
    const Index* sums;
    Index eights, size;
    __device__ __forceinline__ Place place(Index row) const {
        const int bits = widths[row];
        const Index end = sums[row] * eights, start = end - bits * eights;
        if (bits < 1 || bits > 8 || start < 0 || end > size) return {1, -1, -1};
        return {bits, start, end};
    }
};

// The noise of eight elements from index `first` on: 16 bits each, four in a word.
template <bool many_rows>
__device__ __forceinline__ void noise_of(Word state, Index first, Word (&noise)[2]) {
    const int shift = first % 4 * 16;
    noise[0] = random_word(state, first / 4);
    noise[1] = random_word(state, first / 4 + 1);
    if (!many_rows || shift == 0) return;
    noise[0] = noise[0] >> shift | noise[1] << (64 - shift);
    noise[1] = noise[1] >> shift | random_word(state, first / 4 + 2) << (64 - shift);
}

__device__ __forceinline__ void rescale(float (&values)[8], float scale) {
    if (__float_as_uint(scale) == 127u << 23) return;  // 1
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = product(values[i], scale);
}

// Eight codes as one word, zero from `left` on.
__device__ __forceinline__ Word codes_of(
    const float (&values)[8], int left, float offset, float slope, int bits, const Word (&noise)[2]) {
    const unsigned top = ((1u << bits) - 1) << 16;
    unsigned codes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const unsigned place = nearest_count(product(difference(values[i], offset), slope));
        codes[i] = ((place < top ? place : top) + unsigned(noise[i / 4] >> (16 * (i % 4)) & 0xffff)) >> 16;
    }
    const Word eight = packed_codes(codes, bits);
    return left >= 8 ? eight : left > 0 ? eight & ((Word(1) << (left * bits)) - 1) : 0;
}

__device__ __forceinline__ void values_of(
    Word eight, int bits, unsigned most, float stride, const Scaled& scaled, float (&values)[8]) {
    const unsigned halves[2] = {unsigned(eight), unsigned(eight >> (4 * bits))};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const unsigned code = halves[i / 4] >> (i % 4 * bits) & most;
        values[i] = sum(product(float(code), stride), scaled.offset);
    }
    rescale(values, scaled.inverse);
}

__device__ __forceinline__ int tiles_of(int group_size) { return TILES == 1 ? 1 : (group_size + kTile - 1) / kTile; }

__device__ __forceinline__ int lesser_count(Index some, int most) { return some < most ? int(some) : most; }

// The word of the group in which this lane has `left` elements; `values` are left with those of the last tile.
__device__ __forceinline__ unsigned word_of(const SCALAR* from, int left, const Share& share, int group_size, float (&values)[8]) {
    Extent extent;
    for (int tile = 0; tile < tiles_of(group_size); ++tile) {
        load8(from + tile * kTile, left - tile * kTile, aligned(from), values);
        extent.take(values, left - tile * kTile);
    }
    return extent.word(share, kLargest<SCALAR>);
}

template <class Layout>
__device__ __forceinline__ void encode(
    const SCALAR* x, unsigned char* codes, unsigned* meta, const Layout& layout, unsigned rows, Index columns, int group_size,
    Word state, bool stochastic) {
    __shared__ Stage<8> stages[kWarps];
    const Share share(group_size);
    const unsigned groups = (columns + group_size - 1) / group_size, steps = (groups + share.groups - 1) / share.groups;
    const int together = share.groups * group_size, own = share.mine * group_size + 8 * share.place;
    for (Walk<Layout::many_rows> walk(steps); walk.goes_on(rows, steps); walk.on(steps)) {
        // The warp's first element in the row, the lane's first element, and the elements of its group from there on.
        const Index begin = Index(walk.step) * together, element = Index(walk.row) * columns + begin + own;
        const int left = lesser_count(columns - begin, (share.mine + 1) * group_size) - own;
        float values[8];
        const unsigned found = word_of(x + element, left, share, group_size, values);
        const Place place = layout.place(walk.row);
        const unsigned word = place.start < 0 ? kNanWord : found;
        if (share.place == 0 && left > 0) meta[Index(walk.row) * groups + walk.step * share.groups + share.mine] = word;
        if (place.start < 0) continue;
        const Scaled scaled(word);
        const float slope = above(scaled.span, 0) ? quotient(float(((1u << place.bits) - 1) << 16), scaled.span) : 0;
        for (int tile = 0; tile < tiles_of(group_size); ++tile) {
            const int here = left - tile * kTile;
            if (TILES > 1) load8(x + element + tile * kTile, here, aligned(x + element), values);
            Word noise[2] = {kNearest, kNearest};
            if (stochastic) noise_of<Layout::many_rows>(state, element + tile * kTile, noise);
            rescale(values, scaled.scale);
            const Word eight = codes_of(values, here, scaled.offset, slope, place.bits, noise);
            const Index byte = place.start + (begin / 8 + tile * kLanes) * place.bits;
            const int room = lesser_count(place.end - byte, (together / 8 - tile * kLanes) * place.bits);
            store_tile(eight, place.bits, codes + byte, room, stages[warp()]);
        }
    }
}

KERNEL groupquant_encode(
    const SCALAR* x, unsigned char* codes, unsigned* meta, Index count, Index size, int group_size, int bits, Word state,
    unsigned stochastic) {
    encode(x, codes, meta, OneStream{bits, size}, 1, count, group_size, state, stochastic);
}

KERNEL groupquant_encode_rows(
    const SCALAR* x, unsigned char* codes, unsigned* meta, unsigned rows, Index columns, Index size, int group_size,
    const int* widths, const Index* sums, Word state, unsigned stochastic) {
    const Streams streams{widths, sums, (columns + 7) / 8, size};
    encode(x, codes, meta, streams, rows, columns, group_size, state, stochastic);
}

KERNEL groupquant_words(const SCALAR* x, unsigned* meta, unsigned rows, Index columns, int group_size) {
    const Share share(group_size);
    const unsigned groups = (columns + group_size - 1) / group_size, steps = (groups + share.groups - 1) / share.groups;
    const int together = share.groups * group_size, own = share.mine * group_size + 8 * share.place;
    for (Walk<true> walk(steps); walk.goes_on(rows, steps); walk.on(steps)) {
        const Index begin = Index(walk.step) * together, rest = columns - begin;
        const int left = lesser_count(rest, (share.mine + 1) * group_size) - own;
        float values[8];
        const unsigned word = word_of(x + Index(walk.row) * columns + begin + own, left, share, group_size, values);
        if (share.place == 0 && left > 0) meta[Index(walk.row) * groups + walk.step * share.groups + share.mine] = word;
    }
}

// Decodes elements start .. start + columns - 1 of every row; for Streams, start is 0.
template <class Layout>
__device__ __forceinline__ void decode(
    const unsigned char* codes, const unsigned* meta, SCALAR* out, const Layout& layout, unsigned rows, Index columns,
    int group_size, Index start) {
    __shared__ Stage<8> stages[kWarps];
    const Share share(group_size);
    const Index before = start / group_size;
    const unsigned groups = (start + columns + group_size - 1) / group_size - before;
    const unsigned steps = (groups + share.groups - 1) / share.groups;
    const int together = share.groups * group_size, own = share.mine * group_size + 8 * share.place;
    for (Walk<Layout::many_rows> walk(steps); walk.goes_on(rows, steps); walk.on(steps)) {
        const Index begin = before * group_size + Index(walk.step) * together, rest = start + columns - begin;
        const int left = lesser_count(rest, (share.mine + 1) * group_size) - own;
        const Place place = layout.place(walk.row);
        const bool there = left > 0 && place.start >= 0;
        const Index group = before + Index(walk.row) * groups + walk.step * share.groups + share.mine;
        const Scaled scaled(there ? meta[group] : kNanWord);
        const unsigned most = (1u << place.bits) - 1;
        const float stride = quotient(scaled.span, float(most));
        for (int tile = 0; tile < tiles_of(group_size); ++tile) {
            const Index byte = place.start + (begin / 8 + tile * kLanes) * place.bits;
            const Word eight = place.start < 0 ? 0 : load_tile(place.bits, codes + byte, place.end - byte, stages[warp()]);
            float values[8];
            values_of(eight, place.bits, most, stride, scaled, values);
            const Index first = begin + own + tile * kTile;
            store_from(start - first, out + Index(walk.row) * columns + (first - start), left - tile * kTile, values);
        }
    }
}

KERNEL groupquant_decode(
    const unsigned char* codes, const unsigned* meta, SCALAR* out, Index count, Index size, int group_size, int bits,
    Index start) {
    decode(codes, meta, out, OneStream{bits, size}, 1, count, group_size, start);
}

KERNEL groupquant_decode_rows(
    const unsigned char* codes, const unsigned* meta, SCALAR* out, unsigned rows, Index columns, Index size, int group_size,
    const int* widths, const Index* sums) {
    const Streams streams{widths, sums, (columns + 7) / 8, size};
    decode(codes, meta, out, streams, rows, columns, group_size, 0);
}
