// A block's elements, their mean, and which of them are outliers; methods/formats/ops/smaq/reference.py says what is
// computed. Needs groups.cuh, and one -DLANES: 8 for blocks of at most 256 elements, 32 for larger ones.
//
// Each lane has 32 neighbours of its block, so what a block costs once is shared by 32 elements, and a warp works on
// 32 / LANES blocks. All lanes of a warp take all branches that shuffle; a block past the end has no elements.

constexpr int kMine = 32, kPairs = kMine / 2, kMost = kMine * LANES, kSlots = kLanes / LANES;
constexpr int kHuge = 254 << 7, kHugeMean = 253 << 7;  // 2^127 and 2^126 as bfloat16
constexpr int kLeast = 37 << 7;                        // 2^-90
constexpr int kNear = 160;                             // from the largest key to that of 64 of 256 normal numbers
constexpr int kFew = 4;                                // steps of the search until equal keys are likely

__device__ __forceinline__ int rank() { return lane() % LANES; }  // which lane of its block
__device__ __forceinline__ int slot() { return lane() / LANES; }  // which block of the warp
__device__ __forceinline__ float wide(unsigned half) { return __uint_as_float(half << 16); }
__device__ __forceinline__ int of_mine(int count) {  // how many of a block's first elements are the lane's
    const int left = count - kMine * rank();
    return left < 0 ? 0 : left < kMine ? left : kMine;
}

// ---- A value of each lane of a block.

__device__ __forceinline__ int total(int mine) {
#pragma unroll
    for (int flip = LANES / 2; flip > 0; flip /= 2) mine += __shfl_xor_sync(~0u, mine, flip);
    return mine;
}

// The sum over the lanes before this one; `mine` becomes that over all lanes.
__device__ __forceinline__ unsigned sum_before(unsigned& mine) {
    unsigned before = 0;
#pragma unroll
    for (int flip = 1; flip < LANES; flip *= 2) {
        const unsigned other = __shfl_xor_sync(~0u, mine, flip);
        if (lane() & flip) before += other;
        mine += other;
    }
    return before;
}

// ---- Two 16-bit numbers a word. From sm_90 on each of these is one instruction.

__device__ __forceinline__ unsigned twice(unsigned half) { return __byte_perm(half, 0, 0x1010); }

#if __CUDA_ARCH__ >= 900
// Returns 1 for each key, at least -1, that is not below `cut`, and 0 for the others; less = twice(1 - cut).
__device__ __forceinline__ unsigned reached(unsigned keys, unsigned less) {
    unsigned result;
    asm("{ .reg .b32 t; add.s16x2 t, %1, %2; min.relu.s16x2 %0, t, %3; }"
        : "=r"(result) : "r"(keys), "r"(less), "r"(0x10001u));
    return result;
}
// The larger of `most` and keys + by, without signs.
__device__ __forceinline__ unsigned raised(unsigned keys, unsigned by, unsigned most) {
    unsigned result;
    asm("{ .reg .b32 t; add.u16x2 t, %1, %2; max.u16x2 %0, t, %3; }" : "=r"(result) : "r"(keys), "r"(by), "r"(most));
    return result;
}
__device__ __forceinline__ unsigned lowered(unsigned keys, unsigned by, unsigned least) {
    unsigned result;
    asm("{ .reg .b32 t; add.u16x2 t, %1, %2; min.u16x2 %0, t, %3; }" : "=r"(result) : "r"(keys), "r"(by), "r"(least));
    return result;
}
// Whether the keys of a word, at least -1, are not below a cut below 0x7f80; cuts = twice(cut). As bfloat16 they are
// ordered like integers, but for -1, which is NaN.
__device__ __forceinline__ void compare(unsigned keys, unsigned cuts, bool& first, bool& second) {
    unsigned low, high;
    asm("{ .reg .pred p, q; setp.ge.bf16x2 p|q, %2, %3; selp.u32 %0, 1, 0, p; selp.u32 %1, 1, 0, q; }"
        : "=r"(low), "=r"(high) : "r"(keys), "r"(cuts));
    first = low, second = high;
}
#else
__device__ __forceinline__ void compare(unsigned keys, unsigned cuts, bool& first, bool& second) {
    first = int(keys << 16) >= int(cuts << 16);
    second = int(keys) >= int(cuts & 0xffff0000);
}
__device__ __forceinline__ unsigned reached(unsigned keys, unsigned less) {
    const unsigned cut = twice(1 - less);
    return ((keys ^ 0x80008000u) - cut) >> 15 & 0x10001u;  // with 2^15 added no half borrows from the other
}
__device__ __forceinline__ unsigned raised(unsigned keys, unsigned by, unsigned most) {
    const unsigned low = (keys + by) & 0xffff, high = (keys & 0xffff0000) + (by & 0xffff0000);
    return (low > (most & 0xffff) ? low : most & 0xffff) | (high > (most & 0xffff0000) ? high : most & 0xffff0000);
}
__device__ __forceinline__ unsigned lowered(unsigned keys, unsigned by, unsigned least) {
    const unsigned low = (keys + by) & 0xffff, high = (keys & 0xffff0000) + (by & 0xffff0000);
    return (low < (least & 0xffff) ? low : least & 0xffff) | (high < (least & 0xffff0000) ? high : least & 0xffff0000);
}
#endif

// ---- A lane's distances from the mean of its block, and their keys: the upper 16 bits of the magnitudes, and -1 past
// the block's end. Word i holds the keys of elements 2i and 2i + 1.

struct Elements {
    float d[kMine];
    unsigned keys[kPairs];
    unsigned mean;  // as bfloat16
    int most;       // the largest key

    // Takes a block's first `count` values; the others become zeros.
    __device__ __forceinline__ Elements(float (&values)[kMine], int count) {
        const int mine = of_mine(count);
        if (mine < kMine) {
#pragma unroll
            for (int i = 0; i < kMine; ++i) values[i] = i < mine ? values[i] : 0;
        }
        mean = mean_of(values, count);
#pragma unroll
        for (int i = 0; i < kMine; ++i) d[i] = difference(values[i], wide(mean));
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const unsigned uppers = __byte_perm(__float_as_uint(d[2 * i]), __float_as_uint(d[2 * i + 1]), 0x7632);
            keys[i] = uppers & 0x7fff7fff;
        }
        if (mine < kMine) {
#pragma unroll
            for (int i = 0; i < kPairs; ++i)
                keys[i] |= (2 * i < mine ? 0 : 0xffff) | (2 * i + 1 < mine ? 0 : 0xffff0000);
        }
        unsigned after = 0;  // the number after the largest key, so that -1 counts as 0
#pragma unroll
        for (int i = 0; i < kPairs; ++i) after = raised(keys[i], 0x10001u, after);
#pragma unroll
        for (int flip = LANES / 2; flip > 0; flip /= 2) after = raised(__shfl_xor_sync(~0u, after, flip), 0, after);
        most = int((after & 0xffff) > (after >> 16) ? after & 0xffff : after >> 16) - 1;
    }

    static __device__ __forceinline__ unsigned mean_of(const float (&values)[kMine], int count) {
        float sums[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) sums[i] = sum(values[i], values[i + kPairs]);
#pragma unroll
        for (int half = kPairs / 2; half > 0; half /= 2) {
#pragma unroll
            for (int i = 0; i < kPairs / 2; ++i)
                if (i < half) sums[i] = sum(sums[i], sums[i + half]);
        }
        float all = product(sums[0], 1.0f / 1024);
#pragma unroll
        for (int flip = LANES / 2; flip > 0; flip /= 2) all = sum(all, __shfl_xor_sync(~0u, all, flip));
        const float whole = product(all, 1024.0f / kMost);  // a power of two: the quotient's value
        return BFloat16::nearest(count == kMost ? whole : quotient(all, product(float(count), 1.0f / 1024))).bits;
    }

    __device__ __forceinline__ bool huge() const { return most >= kHuge || (mean & 0x7fff) >= kHugeMean; }

    // How many of the lane's keys are not below `cut`.
    __device__ __forceinline__ int not_below(int cut) const {
        const unsigned less = twice(1 - cut);
        unsigned found = 0;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) found += reached(keys[i], less);
        return (found + (found >> 16)) & 0xffff;
    }

    // Which keys of the lane are equal to `cut`: bit i for element 2i, bit 16 + i for element 2i + 1.
    __device__ __forceinline__ unsigned equal_to(int cut) const {
        unsigned others = 0;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) others += lowered(keys[i], twice(-cut), 0x10001u) << i;
        return ~others;
    }

    // Makes keys -1, which no cut is below; the bits are as those of equal_to.
    __device__ __forceinline__ void drop(unsigned bits) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) keys[i] |= (bits >> i & 0x10001u) * 0xffff;
    }

    // The largest key of the block below `cut`, or -1, in the lower half, and the least other key in the upper half.
    __device__ __forceinline__ unsigned beside(int cut) const {
        const unsigned less = twice(-cut);
        unsigned below = twice(-1 - cut), above = 0x7fff7fff;  // keys less the cut: of those below it the sign is set
#pragma unroll
        for (int i = 0; i < kPairs; ++i) below = raised(keys[i], less, below), above = lowered(keys[i], less, above);
        below = (below & 0xffff) > (below >> 16) ? below : below >> 16;
        above = (above & 0xffff) < (above >> 16) ? above : above >> 16;
        unsigned both = (below & 0xffff) | (~above << 16);
#pragma unroll
        for (int flip = LANES / 2; flip > 0; flip /= 2) both = raised(__shfl_xor_sync(~0u, both, flip), 0, both);
        return ((both + cut) & 0xffff) | ((~both >> 16) + cut) << 16;
    }
};

// ---- Which elements are outliers, and where main values and outliers end, as bfloat16.

struct Parted {
    int cut;          // the lane's outliers are those whose keys are not below it
    unsigned before;  // outliers of the lanes before this one
    unsigned main_end, tail_start = 0, tail_end = kLeast;

    // `guess` is where the search begins if it is not negative, and then where it ended.
    __device__ __forceinline__ Parted(Elements& elements, int count, int wanted, int& guess) {
        int low = 0, high = elements.most + 1;         // at least `wanted` keys reach `low`, and fewer `high`
        int mine_low = of_mine(count), mine_high = 0;  // how many of this lane do
        if (wanted == 0) low = high, mine_low = 0;
        bool exact = wanted == 0 || wanted == count;  // so many reach `low`
        int middle = guess < 0 ? high - kNear : guess;
        for (int steps = 1; __any_sync(~0u, !exact && high - low > 1); ++steps) {
            middle = middle < high - 1 ? middle : high - 1;
            middle = middle > low + 1 ? middle : low + 1;
            const int mine = elements.not_below(middle), off = total(mine) - wanted;
            const bool goes_on = !exact && high - low > 1, up = goes_on && off >= 0, down = goes_on && off < 0;
            low = up ? middle : low, mine_low = up ? mine : mine_low;
            high = down ? middle : high, mine_high = down ? mine : mine_high;
            exact = exact || (up && off == 0);
            // One key has, nearly, one of 256 normal numbers. If a few steps do not end the search there are equal keys,
            // or others: step further and further, and then halve.
            if (steps < kFew) middle += off + (off >> 2) + (off > 0);
            else middle = low > 0 && high <= elements.most ? low + (high - low) / 2 : middle + off * (2 << (steps < 16 ? steps : 16));
        }
        guess = low;

        // If too many reach the cut, the first of those that are equal to it are outliers.
        const int equal = exact ? 0 : mine_low - mine_high, larger = exact ? mine_low : mine_high;
        unsigned all = larger | equal << 16;
        const unsigned before_both = sum_before(all);
        const int wanted_equal = wanted - int(all & 0xffff), equal_before = before_both >> 16;
        before = (before_both & 0xffff) + (equal_before < wanted_equal ? equal_before : wanted_equal);
        int kept = wanted_equal - equal_before;
        kept = kept < 0 ? 0 : kept < equal ? kept : equal;
        cut = exact || kept > 0 ? low : high;
        const unsigned ends = elements.beside(low);
        const bool divided = kept > 0 && kept < equal;
        if (__any_sync(~0u, divided)) {
            unsigned last = divided ? elements.equal_to(low) : 0;
            for (int i = 0; i < kept && divided; ++i) {
                const unsigned even = last & (0 - last) & 0xffff, odd = last >> 16 & (0 - (last >> 16));
                last ^= even - 1 <= odd - 1 ? even : odd << 16;  // the first one
            }
            elements.drop(last);
        }

        const unsigned main = (exact ? ends : low) & 0xffff;
        main_end = end_above(main);
        if (wanted == 0) return;
        tail_start = ends >> 16;
        tail_end = end_above(elements.most);
    }

    static __device__ __forceinline__ unsigned end_above(unsigned key) {
        const unsigned end = (key + 1) & 0xffff;
        return end > kLeast ? end : kLeast;
    }
};
