// A block's elements, their mean, and which of them are outliers; actbench/ops/smaq/reference.py says what is computed.
// Needs groups.cuh, one SCALAR and one number of TILES; all tiles stay in registers. Distances from the mean are
// compared by keys, the bits of their floats, which have the same order.

constexpr int kInfinity = 0x7f800000;
constexpr int kNear = 2 << 23, kMany = 12;  // a quarter, where the search begins; steps until equal keys are likely
constexpr unsigned kLeast = 37 << 7;        // 2^-90 as bfloat16

// ---- Sums and maxima over all lanes.

__device__ __forceinline__ int total(int mine) {
#pragma unroll
    for (int flip = kLanes / 2; flip > 0; flip /= 2) mine += __shfl_xor_sync(~0u, mine, flip);
    return mine;
}

__device__ __forceinline__ int largest(int mine) {
#pragma unroll
    for (int flip = kLanes / 2; flip > 0; flip /= 2) {
        const int other = __shfl_xor_sync(~0u, mine, flip);
        mine = mine > other ? mine : other;
    }
    return mine;
}

// The sum over the lanes in the mask `lanes` of counts that are at most `most`.
template <int most>
__device__ __forceinline__ int counted(int mine, unsigned lanes) {
    int found = 0;
#pragma unroll
    for (int bit = 0; 1 << bit <= most; ++bit) found += __popc(__ballot_sync(~0u, mine >> bit & 1) & lanes) << bit;
    return found;
}

__device__ __forceinline__ unsigned lanes_before() { return (1u << lane()) - 1; }

// ---- A block's elements: eight a lane and tile, and zeros past its end. A lane's bits of all its tiles share a word.

static_assert(8 * TILES <= 32, "one bit for each element of a lane");

__device__ __forceinline__ unsigned eight_of(unsigned bits, int tile) { return bits >> (8 * tile) & 0xff; }
__device__ __forceinline__ bool has(unsigned bits, int tile, int i) { return bits >> (8 * tile + i) & 1; }
__device__ __forceinline__ unsigned first_bits(int left) { return left >= 8 ? 0xff : left > 0 ? (1u << left) - 1 : 0; }

struct Elements {
    float values[TILES][8];
    unsigned there, negative;  // a bit for each: is it an element, is it below the mean

    __device__ __forceinline__ int key(int tile, int i) const { return __float_as_uint(values[tile][i]); }
    __device__ __forceinline__ int magnitude(int tile, int i) const { return key(tile, i) & 0x7fffffff; }

    __device__ __forceinline__ Elements(const SCALAR* block, int count) {
        there = 0;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int first = tile * kTile + 8 * lane(), left = count - first;
            there |= first_bits(left) << (8 * tile);
            load8(block + first, left, aligned(block), values[tile]);
#pragma unroll
            for (int i = 0; i < 8; ++i) values[tile][i] = has(there, tile, i) ? values[tile][i] : 0;
        }
    }

    // A block of one tile, from registers.
    __device__ __forceinline__ Elements(const float (&given)[8], int count) {
        there = first_bits(count - 8 * lane());
#pragma unroll
        for (int i = 0; i < 8; ++i) values[0][i] = has(there, 0, i) ? given[i] : 0;
    }

    __device__ __forceinline__ int most() const {
        int found = 0;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 8; ++i) found = found > magnitude(tile, i) ? found : magnitude(tile, i);
        }
        return largest(found);
    }

    // The mean as the bits of a bfloat16.
    __device__ __forceinline__ unsigned mean(int most, int count) const {
        const int exponent = most >> 23 > 33 ? most >> 23 : 33;
        const float scale = __uint_as_float((273 - exponent) << 23), inverse = __uint_as_float((exponent - 19) << 23);
        int sum_of = 0;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int whole = nearest_count(product(__uint_as_float(magnitude(tile, i)), scale));
                sum_of += key(tile, i) < 0 ? -whole : whole;
            }
        }
        return BFloat16::nearest(product(quotient(float(total(sum_of)), float(count)), inverse)).bits;
    }

    // Replaces the values by their distances from the mean.
    __device__ __forceinline__ void subtract(float mean) {
        negative = 0;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                values[tile][i] = has(there, tile, i) ? difference(values[tile][i], mean) : 0;
                negative |= unsigned(key(tile, i) < 0 && magnitude(tile, i) != 0) << (8 * tile + i);
                values[tile][i] = __uint_as_float(magnitude(tile, i));
            }
        }
    }

    __device__ __forceinline__ int not_below(int cut) const {
        int found = 0;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 8; ++i) found += key(tile, i) >= cut;
        }
        return counted<8 * TILES>(found, ~0u);
    }

    // The largest key below `cut`, or 0, and the least that is not, or infinity.
    __device__ __forceinline__ void beside(int cut, int& below, int& least) const {
        below = 0, least = kInfinity;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int mine = key(tile, i);
                if (mine < cut) below = below > mine ? below : mine;
                else least = least < mine ? least : mine;
            }
        }
        below = largest(below);
        least = -largest(-least);
    }
};

// ---- Which elements are outliers, one bit each, and where main values and outliers end, as bfloat16.

__device__ __forceinline__ unsigned end_above(int key) {
    const unsigned half = (unsigned(key) + 0xffff) >> 16;
    return half > kLeast ? half : kLeast;
}

struct Parted {
    unsigned outliers = 0, main_end, tail_start = 0, tail_end = kLeast;

    __device__ __forceinline__ Parted(const Elements& elements, int most, int count, int wanted) {
        int cut = most + 1, spare = 0;
        if (wanted > 0) cut = search(elements, most, count, wanted, spare);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 8; ++i) outliers |= unsigned(elements.key(tile, i) >= cut) << (8 * tile + i);
        }
        outliers &= elements.there;
        if (spare > 0) drop(elements, cut, spare);
        ends(elements, most, wanted);
    }

    // Returns a cut that at least `wanted` keys reach. `spare` is how many more reach it; those equal the cut.
    static __device__ __forceinline__ int search(const Elements& elements, int most, int count, int wanted, int& spare) {
        int low = 0, high = most + 1, found = count;
        int middle = most - kNear > most / 2 ? most - kNear : most / 2;
        for (int steps = 1; found != wanted && high - low > 1; ++steps) {
            middle = middle > low + 1 ? middle : low + 1;
            middle = middle < high - 1 ? middle : high - 1;
            const int here = elements.not_below(middle);
            if (here >= wanted) low = middle, found = here;
            else high = middle;
            if (steps == kMany) {
                int below, least, unused;
                elements.beside(low, unused, least);
                elements.beside(high, below, unused);
                low = least, high = below + 1;
            }
            middle = low + (high - low) / 2;
        }
        spare = found - wanted;
        return low;
    }

    // Of the keys equal to `cut`, the last `spare` become no outliers.
    __device__ __forceinline__ void drop(const Elements& elements, int cut, int spare) {
        unsigned equal = 0;
        int before = 0;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 8; ++i) equal |= unsigned(elements.key(tile, i) == cut) << (8 * tile + i);
        }
        equal &= elements.there;
        const int all = counted<8 * TILES>(__popc(equal), ~0u);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int mine = __popc(eight_of(equal, tile));
            int place = before + counted<8>(mine, lanes_before());
            before += counted<8>(mine, ~0u);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (!has(equal, tile, i)) continue;
                if (place >= all - spare) outliers &= ~(1u << (8 * tile + i));
                ++place;
            }
        }
    }

    __device__ __forceinline__ void ends(const Elements& elements, int most, int wanted) {
        int main = 0, start = kInfinity;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int mine = elements.key(tile, i);
                if (has(outliers, tile, i)) start = start < mine ? start : mine;
                else main = main > mine ? main : mine;
            }
        }
        main_end = end_above(largest(main));
        if (wanted == 0) return;
        tail_start = unsigned(-largest(-start)) >> 16;
        tail_end = end_above(most);
    }
};

__device__ __forceinline__ float wide(unsigned half) { return __uint_as_float(half << 16); }
