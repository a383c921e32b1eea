// Encodes and decodes groups of rows, a warp's piece at a time. Needs groupcodes.cuh.

// Where the codes of a row are; `start` is negative if they do not fit the buffer. A layout knows it of each row, and the
// bits of all rows, or 0.
struct Held {
    int bits;
    Index start, end;
};

__device__ __forceinline__ Index lesser_count(Index some, Index most) { return some < most ? some : most; }

// What a warp works on in one step: `kGroups` groups of a row, from `begin` on.
struct Piece {
    int size, left;     // elements of a group, and those of this lane's group from the lane's first one on
    Index begin, rest;  // the first element in the row, and the elements from there on
    __device__ __forceinline__ Piece(unsigned step, Index before, Index end, int group_size) {
        size = LANES < kLanes ? kMine * LANES : group_size;
        begin = before + Index(step) * (kGroups * size);
        rest = end - begin;
        left = int(lesser_count(rest - mine() * size, size)) - 8 * place();
    }
    __device__ __forceinline__ int own() const { return mine() * size + 8 * place(); }
    __device__ __forceinline__ bool whole() const { return rest >= kPiece && size == kMine * LANES; }
};

__device__ __forceinline__ unsigned steps_of(unsigned groups) { return (groups + kGroups - 1) / kGroups; }

template <class Layout>
__device__ __forceinline__ void encode(
    const SCALAR* x, unsigned char* codes, unsigned* meta, const Layout& layout, unsigned rows, Index columns, int group_size,
    Word state, bool stochastic) {
    __shared__ Exchange exchanges[kWarps];
    const int size = LANES < kLanes ? kMine * LANES : group_size;
    const unsigned groups = (columns + size - 1) / size, steps = steps_of(groups);
    for (Walk<Layout::many_rows> walk(steps); walk.goes_on(rows, steps); walk.on(steps)) {
        const Piece piece(walk.step, 0, columns, group_size);
        const SCALAR* source = x + Index(walk.row) * columns + piece.begin;
        Elements elements;
        if (piece.whole() && aligned(source)) elements.load(source + piece.own());
        else elements.load_some(source + piece.own(), piece.left);
        const unsigned found = elements.word(), group = walk.step * kGroups + mine();
        const Index number = Index(walk.row) * groups + group;
        const Held held = layout.held(walk.row);
        const unsigned word = held.start < 0 ? kNanWord : found;
        if (place() == 0 && piece.left > 0) meta[number] = word;
        if (held.start < 0) continue;
        const Scaled scaled(word);
        constexpr int fixed = Layout::bits;
        const int bits = fixed ? fixed : held.bits;
        const float slope = above(scaled.span, 0) ? quotient(float((1u << bits) - 1), scaled.span) : 0;
        const Noise noise(state, unsigned(number) * LANES + place(), stochastic);
        Codes packed;
        if (__any_sync(~0u, scaled.scale != 1 || (kLargest<SCALAR> < 0x7f7f && is_cut<SCALAR>(word)))) round_all<true>(elements, scaled, slope, noise, bits, packed);
        else round_all<false>(elements, scaled, slope, noise, bits, packed);
        const Index byte = held.start + piece.begin / 8 * bits;
        unsigned char* target = codes + byte;
        if constexpr (are_words(fixed)) {
            if (piece.whole() && aligned(target)) {
                store_piece<fixed>(packed, target, exchanges[warp()]);
                continue;
            }
        }
        store_some(packed, bits, piece.left, target, lesser_count(held.end - byte, kGroups * piece.size / 8 * bits), exchanges[warp()]);
    }
}

// Decodes elements start .. start + columns - 1 of every row; for Streams, start is 0.
template <class Layout>
__device__ __forceinline__ void decode(
    const unsigned char* codes, const unsigned* meta, SCALAR* out, const Layout& layout, unsigned rows, Index columns,
    int group_size, Index start) {
    __shared__ Exchange exchanges[kWarps];
    const int size = LANES < kLanes ? kMine * LANES : group_size;
    const Index before = start / size, end = start + columns;
    const unsigned groups = (end + size - 1) / size - before, steps = steps_of(groups);
    for (Walk<Layout::many_rows> walk(steps); walk.goes_on(rows, steps); walk.on(steps)) {
        const Piece piece(walk.step, before * size, end, group_size);
        const Held held = layout.held(walk.row);
        constexpr int fixed = Layout::bits;
        const int bits = fixed ? fixed : held.bits;
        const bool there = piece.left + 8 * place() > 0 && held.start >= 0;
        const Index group = before + Index(walk.row) * groups + walk.step * kGroups + mine();
        const Scaled scaled(there ? meta[group] : kNanWord);
        const float step = quotient(scaled.span, float((1u << bits) - 1));
        const Index byte = held.start + piece.begin / 8 * bits;
        SCALAR* target = out + Index(walk.row) * columns + (piece.begin - start);
        const bool whole = piece.whole() && piece.begin >= start && aligned(target);
        Codes packed;
        bool loaded = false;
        if constexpr (are_words(fixed)) {
            if (whole && aligned(codes + byte)) {
                load_piece<fixed>(packed, codes + byte, exchanges[warp()]);
                loaded = true;
            }
        }
        if (!loaded) load_some(packed, bits, codes + byte, held.start < 0 ? 0 : held.end - byte, exchanges[warp()]);
        const bool extreme = __any_sync(~0u, there && scaled.scale != 1);
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            float values[8];
            values_of<fixed>(packed.halves[run], bits, step, scaled.offset, values);
            if (extreme) {
#pragma unroll
                for (int i = 0; i < 8; ++i) values[i] = product(values[i], scaled.inverse);
            }
            const int first = piece.own() + run * kApart;
            if (whole) store8(target + first, 8, true, values);
            else store_from(start - piece.begin - first, target + first, piece.left - run * kApart, values);
        }
    }
}
