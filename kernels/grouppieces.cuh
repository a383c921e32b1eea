// Encodes and decodes groups of rows, a warp's piece at a time. Needs groupcodes.cuh.

// Where the codes of a row are; `start` is negative if they do not fit the buffer. A layout knows it of each row, and the
// bits of all rows, or 0.
struct Held {
    int bits;
    Index start, end;
};

__device__ __forceinline__ Index lesser_count(Index some, Index most) { return some < most ? some : most; }

// The groups of rows, `kGroups` of one row in each step of a warp.
template <bool many_rows>
struct Groups {
    int size;                      // elements of a group
    Index end;                     // of the elements of a row
    unsigned a_row, steps, whole;  // groups and steps of a row, and steps whose pieces are whole

    // Of the first group's elements `start` are left out. Then, or at an address that is not aligned, no piece is whole.
    __device__ __forceinline__ Groups(const SCALAR* elements, int start, Index columns, int group_size) {
        size = LANES < kLanes ? kMine * LANES : group_size;
        end = start + columns;
        a_row = (end + size - 1) / size;
        steps = (end + kGroups * size - 1) / (kGroups * size);
        const bool are_aligned = aligned(elements) && start == 0 && (!many_rows || columns * sizeof(SCALAR) % 16 == 0);
        whole = are_aligned && size == kMine * LANES ? columns / kPiece : 0;
    }
    __device__ __forceinline__ Index begin(unsigned step) const { return Index(step) * (kGroups * size); }
    // This lane's first element in a piece, and how many of its group there are from there on.
    __device__ __forceinline__ int own() const { return mine() * size + 8 * place(); }
    __device__ __forceinline__ int left(unsigned step) const {
        return int(lesser_count(end - begin(step) - mine() * size, size)) - 8 * place();
    }
    __device__ __forceinline__ unsigned number(unsigned row, unsigned step) const {
        return row * a_row + step * kGroups + mine();
    }
};

// Loads a lane's elements and returns how many there are.
template <bool many_rows>
__device__ __forceinline__ int load(Elements& elements, const SCALAR* row, const Groups<many_rows>& groups, unsigned step) {
    const SCALAR* source = row + groups.begin(step) + groups.own();
    if (step < groups.whole) {
        elements.load(source);
        return kPiece;
    }
    const int left = groups.left(step);
    elements.load_some(source, left);
    return left;
}

template <class Layout>
__device__ __forceinline__ void encode(
    const SCALAR* x, unsigned char* codes, unsigned* meta, const Layout& layout, unsigned rows, Index columns, int group_size,
    Word state, bool stochastic) {
    __shared__ Exchange exchanges[kWarps];
    constexpr int fixed = Layout::bits;
    const Groups<Layout::many_rows> groups(x, 0, columns, group_size);
    const unsigned whole = are_words(fixed) && aligned(codes) ? groups.whole : 0;
    for (Walk<Layout::many_rows> walk(groups.steps); walk.goes_on(rows, groups.steps); walk.on(groups.steps)) {
        Elements elements;
        const int left = load(elements, x + Index(walk.row) * columns, groups, walk.step);
        const unsigned bounds = elements.word(), number = groups.number(walk.row, walk.step);
        const Held held = layout.held(walk.row);
        const unsigned word = held.start < 0 ? kNanWord : bounds;
        if (place() == 0 && left > 0) meta[number] = word;
        if (held.start < 0) continue;
        const int bits = fixed ? fixed : held.bits;
        const Noise noise(state, number * LANES + place(), stochastic);
        Codes found;
        if (__any_sync(~0u, !is_ordinary<SCALAR>(word))) round_all<false>(elements, word, noise, bits, found);
        else round_all<true>(elements, word, noise, bits, found);
        unsigned char* target = codes + held.start + groups.begin(walk.step) / 8 * bits;
        if constexpr (are_words(fixed)) {
            if (walk.step < whole) {
                store_piece<fixed>(found, target, exchanges[warp()]);
                continue;
            }
        }
        const Index room = lesser_count(held.end - (target - codes), kGroups * groups.size / 8 * bits);
        store_some(found, bits, left, target, room, exchanges[warp()]);
    }
}

// Decodes elements start .. start + columns - 1 of every row, start less than a group; with several rows, start is 0.
template <class Layout>
__device__ __forceinline__ void decode(
    const unsigned char* codes, const unsigned* meta, SCALAR* out, const Layout& layout, unsigned rows, Index columns,
    int group_size, int start) {
    __shared__ Exchange exchanges[kWarps];
    constexpr int fixed = Layout::bits;
    const Groups<Layout::many_rows> groups(out, start, columns, group_size);
    const unsigned whole = are_words(fixed) && aligned(codes) ? groups.whole : 0;
    for (Walk<Layout::many_rows> walk(groups.steps); walk.goes_on(rows, groups.steps); walk.on(groups.steps)) {
        const Held held = layout.held(walk.row);
        const int bits = fixed ? fixed : held.bits;
        const bool in_whole = walk.step < whole;
        const int left = in_whole ? kPiece : groups.left(walk.step);
        const bool there = in_whole || (left + 8 * place() > 0 && held.start >= 0);
        const unsigned word = there ? meta[groups.number(walk.row, walk.step)] : kNanWord;
        const unsigned char* source = codes + held.start + groups.begin(walk.step) / 8 * bits;
        SCALAR* piece = out + Index(walk.row) * columns + groups.begin(walk.step);
        SCALAR* target = piece + groups.own() - start;
        const unsigned nothing = unsigned(columns >> 63);
        Codes found;
        float values[8];
        if constexpr (are_words(fixed)) {
            if (in_whole) load_piece<fixed>(found, source, exchanges[warp()]);  // while the word is on its way
            if (in_whole && !__any_sync(~0u, !is_ordinary<Float32>(word))) {
                const Scaled scaled(word, true);
                const Steps<fixed> steps(scaled, bits, nothing);
#pragma unroll
                for (int run = 0; run < kRuns; ++run) {
                    steps.values(found.halves[run], bits, scaled.offset, values);
                    store_run(piece, run, values);
                }
                continue;
            }
        }
        const Scaled scaled(word, false);
        const Steps<0> steps(scaled, bits, nothing);
        load_some(found, bits, source, held.start < 0 ? 0 : held.end - (source - codes), exchanges[warp()]);
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            steps.values(found.halves[run], bits, scaled.offset, values);
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = product(values[i], scaled.inverse);
            const int first = walk.step == 0 ? start - groups.own() - run * kApart : 0;
            store_from(first, target + run * kApart, left - run * kApart, values);
        }
    }
}
