// Codes of groups: how a warp reads, rounds and writes 1024 elements. Needs groups.cuh, one SCALAR and one number of
// LANES.
//
// LANES lanes share a group of 32 * LANES elements, so that what a group costs once is shared by the 32 elements of a
// lane: four runs of eight neighbours, LANES * 8 apart, as the lanes of a group read its memory side by side. With
// LANES = 32 the warp's group may also be smaller than 1024. Whole pieces of 1024 at aligned addresses are read as
// vectors and their codes written as words; ends and the rest go element by element and byte by byte.

constexpr int kRuns = 4, kMine = 8 * kRuns, kPiece = kMine * kLanes, kGroups = kLanes / LANES, kApart = 8 * LANES;

__device__ __forceinline__ int place() { return lane() % LANES; }
__device__ __forceinline__ int mine() { return lane() / LANES; }

// A warp's steps through the groups of all rows, `kGroups` of one row at a time. A step needs no division, and with one
// row the start needs none. A step is at least 32 elements, so 32 bits count the steps of 2^37 elements.
template <bool many_rows>
struct Walk {
    unsigned row = 0, step = first_tile(), rows_on = 0, steps_on = tile_step();
    __device__ __forceinline__ explicit Walk(unsigned steps) {
        if (!many_rows) return;
        row = step / steps;
        step -= row * steps;
        rows_on = steps_on / steps;
        steps_on -= rows_on * steps;
    }
    __device__ __forceinline__ bool goes_on(unsigned rows, unsigned steps) const {
        return many_rows ? row < rows : step < steps;
    }
    __device__ __forceinline__ void on(unsigned steps) {
        row += rows_on;
        step += steps_on;
        if (many_rows && step >= steps) {
            step -= steps;
            ++row;
        }
    }
};

// ---- The elements of a lane, as they lie in memory.

template <class Scalar> constexpr bool kIsBrain = false;
template <> constexpr bool kIsBrain<BFloat16> = true;

struct Elements {
    static constexpr int per_word = 4 / sizeof(SCALAR), run_words = 8 / per_word;
    unsigned words[kMine / per_word];

    __device__ __forceinline__ void load(const SCALAR* source) {
        using Words = Vector<unsigned>;
#pragma unroll
        for (int i = 0; i < kMine / per_word; i += 4) {
            const SCALAR* from = source + i / run_words * kApart;
            const Words four = reinterpret_cast<const Words*>(from)[i % run_words / 4];
#pragma unroll
            for (int j = 0; j < 4; ++j) words[i + j] = four.lanes[j];
        }
    }

    // Loads those of `left` elements that are there, and in place of others the group's first one.
    __device__ __forceinline__ void load_some(const SCALAR* source, int left) {
        const int before = 8 * place();
        const unsigned first = left + before > 0 ? source[-before].bits : 0;
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const int element = i / 8 * kApart + i % 8;
            const unsigned bits = element < left ? source[element].bits : first;
            words[i / per_word] = i % per_word ? words[i / per_word] | bits << 16 : bits;
        }
    }

    static __device__ __forceinline__ float half_of(unsigned pair, int upper) {
        if (kIsBrain<SCALAR>) return __uint_as_float(upper ? pair & 0xffff0000 : pair << 16);
        return half_to_float(static_cast<unsigned short>(upper ? pair >> 16 : pair));
    }
    __device__ __forceinline__ float value(int i) const {
        return per_word == 1 ? __uint_as_float(words[i]) : half_of(words[i / per_word], i % per_word);
    }

    // The smallest and the largest value, NaN if one is NaN.
    __device__ __forceinline__ void extent(float& low, float& high) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        if (per_word == 2) {
            unsigned a = words[0], b = words[0];
#pragma unroll
            for (int i = 1; i < kMine / per_word; ++i) {
                if (kIsBrain<SCALAR>) {
                    asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(words[i]));
                    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(b) : "r"(words[i]));
                } else {
                    asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(words[i]));
                    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(b) : "r"(words[i]));
                }
            }
            low = least(half_of(a, 0), half_of(a, 1));
            high = most(half_of(b, 0), half_of(b, 1));
            return;
        }
#endif
        low = high = value(0);
#pragma unroll
        for (int i = 1; i < kMine; ++i) {
            low = least(low, value(i));
            high = most(high, value(i));
        }
    }

    // The word of the group that LANES lanes share.
    __device__ __forceinline__ unsigned word() const {
        float low, high;
        extent(low, high);
#pragma unroll
        for (int flip = LANES / 2; flip > 0; flip /= 2) {
            low = least(low, __shfl_xor_sync(~0u, low, flip));
            high = most(high, __shfl_xor_sync(~0u, high, flip));
        }
        return word_of<SCALAR>(low, high);
    }
};

// ---- The codes of a lane. Four codes of b bits are one half; two halves, or one word of b <= 4, are eight codes.

struct Codes {
    unsigned halves[kRuns][2];
};

// A float from 256 up whose last bit is 2^-15 becomes 2^23 and its whole part less 256: the bits of 2^23, and the code.
__device__ __forceinline__ unsigned whole_part(float x) { return __float_as_uint(sum_down(x, 8388608.0f - 256.0f)); }

// What the bits of 2^23 add to a half. They are above the lowest 24 bits.
__device__ __forceinline__ unsigned added(int bits) {
    return kWhole + (kWhole << bits) + (kWhole << (2 * bits)) + (kWhole << (3 * bits));
}

// Rounds the values of a lane to halves, with what the bits of 2^23 add to them. The largest place is off by less than
// 2^-16, so it becomes the last code.
template <bool ordinary>
__device__ __forceinline__ void round_all(const Elements& elements, unsigned word, Noise noise, int bits, Codes& codes) {
    const Scaled scaled(word, ordinary);
    const bool differ = above(scaled.span, 0);
    const float span = differ ? scaled.span : 0;  // 0 where one is NaN: then all codes are 0
    const float slope = quotient(float((1u << bits) - 1), differ ? scaled.span : 1);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned packed = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float x = elements.value(8 * run + 4 * half + i);
                float d = difference(ordinary ? x : product(x, scaled.scale), scaled.offset);
                if (!ordinary) d = lesser(greater(d, 0), span);
                packed += whole_part(fused(d, slope, noise.next())) << (i * bits);
            }
            codes.halves[run][half] = packed;
        }
    }
}

// ---- Codes in memory. Lanes exchange runs through shared memory, so that each moves neighbouring bytes.

struct alignas(16) Exchange {
    static constexpr int apart = 4 * LANES + (LANES > 4 ? LANES : 4);  // words of a group: no bank meets another
    unsigned words[8 * kLanes];

    __device__ __forceinline__ unsigned* run(int number) { return words + mine() * apart + number * LANES + place(); }
    __device__ __forceinline__ Vector<unsigned>& four() {
        return *reinterpret_cast<Vector<unsigned>*>(words + mine() * apart + 4 * place());
    }
    __device__ __forceinline__ unsigned char* bytes() { return reinterpret_cast<unsigned char*>(words); }
    // The number of a run in the piece, in the order of its elements.
    static __device__ __forceinline__ int eight(int run) { return (mine() * kRuns + run) * LANES + place(); }
};

// Where word k of four runs comes from, as __byte_perm takes it: from the run `from` and the one after it.
__device__ constexpr int from_run(int bits, int k) { return 4 * k / bits; }
__device__ constexpr unsigned bytes_from(int bits, int k) {
    unsigned selector = 0;
    for (int i = 0; i < 4; ++i)
        selector |= unsigned((4 * k + i) / bits == from_run(bits, k) ? (4 * k + i) % bits : 4 + (4 * k + i) % bits) << (4 * i);
    return selector;
}

__device__ constexpr bool are_words(int bits) { return bits == 2 || bits == 3 || bits == 4 || bits == 8; }

template <int count>
__device__ __forceinline__ void store_words(unsigned* target, const unsigned (&words)[count]) {
    if constexpr (count % 4 == 0) {
#pragma unroll
        for (int i = 0; i < count; i += 4) store16(target + i, words[i], words[i + 1], words[i + 2], words[i + 3]);
    } else if constexpr (count % 2 == 0) {
        *reinterpret_cast<Word*>(target) = words[0] | Word(words[1]) << 32;
    } else {
#pragma unroll
        for (int i = 0; i < count; ++i) target[i] = words[i];
    }
}

template <int count>
__device__ __forceinline__ void load_words(const unsigned* source, unsigned (&words)[count]) {
    constexpr int together = count % 4 == 0 ? 4 : count % 2 == 0 ? 2 : 1;
    struct alignas(4 * together) Words {
        unsigned lanes[together];
    };
#pragma unroll
    for (int i = 0; i < count; i += together) {
        const Words some = reinterpret_cast<const Words*>(source)[i / together];
#pragma unroll
        for (int j = 0; j < together; ++j) words[i + j] = some.lanes[j];
    }
}

// Writes the codes of a whole piece to an aligned address.
template <int bits>
__device__ __forceinline__ void store_piece(const Codes& codes, unsigned char* target, Exchange& exchange) {
    if constexpr (bits == 8) {
#pragma unroll
        for (int run = 0; run < kRuns; ++run)
        {
            const unsigned halves[2] = {codes.halves[run][0] - added(8), codes.halves[run][1] - added(8)};
            store_words<2>(reinterpret_cast<unsigned*>(target) + Exchange::eight(run) * 2, halves);
        }
    } else {
        unsigned eights[kRuns], words[bits];
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            eights[run] = codes.halves[run][0] + (codes.halves[run][1] << (4 * bits));
            if (bits == 4) eights[run] -= added(4) + (added(4) << 16);  // of fewer bits, no byte from the fourth on is read
        }
        if (LANES > 1) {
#pragma unroll
            for (int run = 0; run < kRuns; ++run) *exchange.run(run) = eights[run];
            __syncwarp();
            const Vector<unsigned> four = exchange.four();
            __syncwarp();
#pragma unroll
            for (int run = 0; run < kRuns; ++run) eights[run] = four.lanes[run];
        }
#pragma unroll
        for (int k = 0; k < bits; ++k) {
            const int from = from_run(bits, k);
            words[k] = bits == 4 ? eights[k] : __byte_perm(eights[from], eights[from + 1], bytes_from(bits, k));
        }
        store_words<bits>(reinterpret_cast<unsigned*>(target) + lane() * bits, words);
    }
}

// Copies the bytes of a piece, as many as `room` has: as vectors where all are there and lie at aligned addresses.
__device__ __forceinline__ void copy_bytes(unsigned char* target, const unsigned char* source, int bits, Index room) {
    const int bytes = kPiece / 8 * bits;
    if (room >= bytes && aligned(target) && aligned(source)) {
#pragma unroll 1  // two turns at most
        for (int i = lane(); i < bytes / 16; i += kLanes)
            reinterpret_cast<Bytes16*>(target)[i] = reinterpret_cast<const Bytes16*>(source)[i];
    } else {
        for (int i = lane(); i < bytes && i < room; i += kLanes) target[i] = source[i];
    }
}

// Writes those of a lane's codes that it has elements for, and at most `room` bytes of the piece.
__device__ __forceinline__ void store_some(
    const Codes& codes, int bits, int left, unsigned char* target, Index room, Exchange& exchange) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
        const int here = left - run * kApart;
        Word eight = (codes.halves[run][0] - added(bits)) | Word(codes.halves[run][1] - added(bits)) << (4 * bits);
        if (here < 8) eight = here > 0 ? eight & ((Word(1) << (here * bits)) - 1) : 0;
        unsigned char* bytes = exchange.bytes() + exchange.eight(run) * bits;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < bits) bytes[i] = static_cast<unsigned char>(eight >> (8 * i));
    }
    __syncwarp();
    copy_bytes(target, exchange.bytes(), bits, room);
    __syncwarp();
}

// Of floats, a lane decodes two times four neighbours of a run, which lie beside those of the next lane: so a store of the
// warp writes whole sectors of 32 bytes. With eight neighbours a lane each store would write half of every sector.
constexpr bool kFoursApart = sizeof(SCALAR) == 4 && LANES > 1;

// Where a lane's values of a whole piece go, and the second four of a run behind the first.
__device__ __forceinline__ int first_four(int run) { return mine() * kMine * LANES + run * kApart + (kFoursApart ? 4 : 8) * place(); }
constexpr int kNextFour = kFoursApart ? 4 * LANES : 4;

// Reads the codes of a whole piece from an aligned address.
template <int bits>
__device__ __forceinline__ void load_piece(Codes& codes, const unsigned char* source, Exchange& exchange) {
    if constexpr (bits == 8) {
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            const unsigned* words = reinterpret_cast<const unsigned*>(source);
            if (kFoursApart) {
                words += first_four(run) / 4;
                codes.halves[run][0] = words[0];
                codes.halves[run][1] = words[LANES];
            } else {
                load_words<2>(words + Exchange::eight(run) * 2, codes.halves[run]);
            }
        }
    } else {
        unsigned words[bits];
        load_words<bits>(reinterpret_cast<const unsigned*>(source) + lane() * bits, words);
        Vector<unsigned> four;
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            const int word = run * bits / 4, next = word + 1 < bits ? word + 1 : word;
            four.lanes[run] = __funnelshift_r(words[word], words[next], run * bits % 4 * 8);
        }
        if (LANES > 1) {
            exchange.four() = four;
            __syncwarp();
#pragma unroll
            for (int run = 0; run < kRuns; ++run) {
                if (kFoursApart) {
                    const unsigned* eights = exchange.run(run) - place() + place() / 2;
                    codes.halves[run][0] = eights[0] >> (place() % 2 * 4 * bits);
                    codes.halves[run][1] = eights[LANES / 2] >> (place() % 2 * 4 * bits);
                } else {
                    four.lanes[run] = *exchange.run(run);
                }
            }
            __syncwarp();
        }
        if (kFoursApart) return;
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            codes.halves[run][0] = four.lanes[run];
            codes.halves[run][1] = four.lanes[run] >> (4 * bits);
        }
    }
}

// Writes a run of a whole piece to aligned addresses.
template <class Scalar>
__device__ __forceinline__ void store_run(Scalar* piece, int run, const float (&values)[8]) {
    Scalar* target = piece + first_four(run);
    if constexpr (sizeof(Scalar) == 4) {
#pragma unroll
        for (int i = 0; i < 8; i += 4)
            store16(
                target + (i ? kNextFour : 0), Scalar::nearest(values[i]).bits, Scalar::nearest(values[i + 1]).bits,
                Scalar::nearest(values[i + 2]).bits, Scalar::nearest(values[i + 3]).bits);
    } else {
        store8(target, 8, true, values);
    }
}

// Reads those codes of a piece that lie in `room` bytes; others are anything.
__device__ __forceinline__ void load_some(Codes& codes, int bits, const unsigned char* source, Index room, Exchange& exchange) {
    copy_bytes(exchange.bytes(), source, bits, room);
    __syncwarp();
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
        const unsigned char* bytes = exchange.bytes() + exchange.eight(run) * bits;
        Word eight = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < bits) eight |= Word(bytes[i]) << (8 * i);
        codes.halves[run][0] = static_cast<unsigned>(eight);
        codes.halves[run][1] = static_cast<unsigned>(eight >> (4 * bits));
    }
    __syncwarp();
}
