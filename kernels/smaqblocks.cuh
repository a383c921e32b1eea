// Encodes and decodes SmaQ blocks; methods/formats/ops/smaq/format.py has the layout, reference.py the meaning of a
// code. Needs groups.cuh and outliers.cuh, and -DMAIN_BITS and -DOUTLIER_BITS.
//
// 32 main codes are MAIN_BITS whole words, so a lane packs its codes without a look at those of others. Elements and
// bytes pass through shared memory, so that the warp reads and writes neighbouring vectors of global memory.

constexpr int kHeader = 8, kRestBits = OUTLIER_BITS - MAIN_BITS;
constexpr int kMainSteps = (1 << (MAIN_BITS - 2)) - 1, kTailSteps = (1 << (OUTLIER_BITS - 2)) - 1;
constexpr unsigned kTag = 1u << (MAIN_BITS - 1), kNanHalf = 0x7fc0;

struct Form {
    int outliers, block, bytes;  // bytes of a whole block
    __device__ __forceinline__ Form(int outliers, int block) : outliers(outliers), block(block) {
        bytes = rest_start(block) + (outliers * kRestBits + 7) / 8;
    }
    __device__ __forceinline__ int outliers_of(int count) const {
        return count == block ? outliers : count * outliers / block;
    }
    static __device__ __forceinline__ int rest_start(int count) { return kHeader + (count + 7) / 8 * MAIN_BITS; }
    __device__ __forceinline__ int bytes_of(int count) const {
        if (count == block) return bytes;
        return rest_start(count) + (outliers_of((count + 7) / 8 * 8) * kRestBits + 7) / 8;
    }
};

// ---- A warp's shared memory: 32 elements a lane, or the bytes of its blocks.

template <class Scalar>
struct alignas(16) Room {
    static constexpr int size = Vector<Scalar>::size, vectors = kMine / size;
    Vector<Scalar> all[kLanes][vectors + 1];  // the last vector keeps the lanes' banks apart
    static_assert((LANES - 1) * sizeof(all[0]) >= kHeader + 4 * (LANES * OUTLIER_BITS + 1), "a block's bytes fit");

    __device__ __forceinline__ Scalar& at(int element) {  // of this lane's block
        return all[slot() * LANES + element / kMine][element % kMine / size].lanes[element % size];
    }
    __device__ __forceinline__ Vector<Scalar>& vector(int number) {
        return all[slot() * LANES + number / vectors][number % vectors];
    }
    // Where the search of a block's outliers ended, in the vector that is beside its last elements.
    __device__ __forceinline__ int& guess(int number) {
        return reinterpret_cast<int*>(all[slot() * LANES + LANES - 1] + vectors)[number];
    }
    __device__ __forceinline__ unsigned* words() { return reinterpret_cast<unsigned*>(all[slot() * LANES]); }
};

// Brings the first `count` elements of a block, and zeros, to its lanes.
template <class Scalar>
__device__ __forceinline__ void bring(const Scalar* source, int count, Room<Scalar>& room) {
    if (count == kMost && aligned(source)) {
#pragma unroll
        for (int i = 0; i < room.vectors; ++i)
            room.vector(i * LANES + rank()) = reinterpret_cast<const Vector<Scalar>*>(source)[i * LANES + rank()];
    } else {
        for (int i = rank(); i < kMost; i += LANES) room.at(i) = i < count ? source[i] : Scalar{0};
    }
    __syncwarp();
}

template <class Scalar>
__device__ __forceinline__ void load_block(const Scalar* source, int count, Room<Scalar>& room, float (&values)[kMine]) {
    bring(source, count, room);
#pragma unroll
    for (int i = 0; i < room.vectors; ++i) {
        const Vector<Scalar> part = room.all[lane()][i];
#pragma unroll
        for (int k = 0; k < room.size; ++k) values[i * room.size + k] = part.lanes[k].value();
    }
    __syncwarp();
}

// The bits of two neighbours, the first one lowest.
template <class Scalar>
__device__ __forceinline__ unsigned two_of(float first, float second) {
    return Scalar::nearest(first).bits | unsigned(Scalar::nearest(second).bits) << 16;
}
#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ unsigned two_of<BFloat16>(float first, float second) {
    unsigned result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
    return result;
}
#endif

// The lane's vector of numbers, as many as it has elements.
template <class Scalar>
__device__ __forceinline__ void put(const float* values, Vector<Scalar>& target) {
    constexpr int per_word = Room<Scalar>::size / 4;
    Vector<unsigned> part;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const float* const own = values + k * per_word;
        part.lanes[k] = per_word == 1 ? __float_as_uint(own[0]) : two_of<Scalar>(own[0], own[per_word - 1]);
    }
    reinterpret_cast<Vector<unsigned>&>(target) = part;
}

// Writes elements first .. end - 1 of the block that the lanes have put into the room.
template <class Scalar>
__device__ __forceinline__ void send(int first, int end, Room<Scalar>& room, Scalar* target) {
    __syncwarp();
    if (first <= 0 && end >= kMost && aligned(target)) {
#pragma unroll
        for (int i = 0; i < room.vectors; ++i)
            reinterpret_cast<Vector<Scalar>*>(target)[i * LANES + rank()] = room.vector(i * LANES + rank());
    } else {
        for (int i = rank(); i < kMost && i < end; i += LANES)
            if (i >= first) target[i] = room.at(i);
    }
    __syncwarp();
}

// ---- Moves a block's bytes between shared and global memory, in the widest units that both allow.

template <class Unit>
__device__ __forceinline__ void move_as(const unsigned char* from, unsigned char* to, int size) {
    const int units = size / int(sizeof(Unit));
#pragma unroll 1
    for (int i = rank(); i < units; i += LANES) reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
#pragma unroll 1
    for (int i = units * sizeof(Unit) + rank(); i < size; i += LANES) to[i] = from[i];
}

__device__ __forceinline__ void move(const void* source, void* target, int size) {
    const auto from = static_cast<const unsigned char*>(source);
    const auto to = static_cast<unsigned char*>(target);
    const Word places = reinterpret_cast<Word>(from) | reinterpret_cast<Word>(to);
    if (places % 16 == 0) move_as<Bytes16>(from, to, size);
    else if (places % 4 == 0) move_as<unsigned>(from, to, size);
    else move_as<unsigned char>(from, to, size);
}

// ---- Encoding.

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float magnitude(float x) {
    float result;
    asm("abs.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
#endif


// The high bits of outliers' codes, the first one lowest: they are taken in at the low end, the last one first.
struct Rests {
    unsigned words[kRestBits + 1] = {};
    __device__ __forceinline__ void take(unsigned top) {  // the bits stand at its high end
#pragma unroll
        for (int i = kRestBits - 1; i >= 0; --i) {
            const unsigned below = i == 0 ? top : words[i - 1];
            words[i] = words[i] << kRestBits | below >> (32 - kRestBits);
        }
    }
    // Writes them into zeroed words, from a bit on. Other lanes write to the same words.
    __device__ __forceinline__ void store(unsigned* target, int bit) const {
        const int shift = bit % 32;
        target += bit / 32;
#pragma unroll
        for (int i = 0; i <= kRestBits; ++i)
            atomicOr(target + i, words[i] << shift | (i == 0 || shift == 0 ? 0 : words[i - 1] >> (32 - shift)));
    }
};

// The noise of a lane's elements, the last one first: the generator of common.cuh, run backwards.
struct Backwards {
    static constexpr unsigned kInverse = 0x2A988EA5u, kPower = 0xC9BACC81u, kSum = 0x49E62560u;  // of 32 steps
    unsigned word, increment;
    __device__ __forceinline__ explicit Backwards(const Noise& noise) {
        word = noise.word * kPower + noise.increment * kSum;
        increment = 0 - noise.increment * kInverse;
        asm("" : "+r"(increment));  // else the compiler takes the product apart again, at each element
    }
    __device__ __forceinline__ float next() {
        const unsigned here = word;
        word = word * kInverse + increment;
        return __uint_as_float(__funnelshift_r(here, 0x8700u, 17));
    }
};

// Zeros all codes of a lane but the first `count`.
__device__ __forceinline__ void keep_codes(int count, unsigned* words) {
#pragma unroll
    for (int i = 0; i < MAIN_BITS; ++i) {
        const int bits = count * MAIN_BITS - 32 * i;
        words[i] &= bits >= 32 ? ~0u : bits > 0 ? (1u << bits) - 1 : 0;
    }
}

struct Codes {
    unsigned words[MAIN_BITS] = {};
    Rests rests;

    __device__ __forceinline__ Codes(const Elements& elements, const Parted& parted, const Noise& noise) {
        const float start = wide(parted.tail_start), span = difference(wide(parted.tail_end), start);
        const float slope = quotient(float(kMainSteps), wide(parted.main_end)), tail_slope = quotient(float(kTailSteps), span);
        // The sum with the noise is 256 and more; a sum that is rounded down from 2^23 on has the code as its low bits.
        constexpr float main_code = 8388608.0f - 256 + kMainSteps, tail_code = 8388608.0f - 256 + (kRestBits == 1 ? kTag : 0);
        Backwards noises(noise);
        unsigned fours[kMine / 4] = {};
        bool even, odd;  // whether the elements of a pair are outliers
#pragma unroll
        for (int i = kMine - 1; i >= 0; --i) {
            if (i % 2) compare(elements.keys[i / 2], twice(parted.cut), even, odd);
            const bool outlier = i % 2 ? odd : even;
            const unsigned sign = __float_as_uint(elements.d[i]) >> 31;
            const float fraction = noises.next();
            float place = fused(elements.d[i], slope, fraction);
            if (outlier) place = fused(difference(magnitude(elements.d[i]), start), tail_slope, fraction);
            unsigned code = __float_as_uint(sum_down(place, outlier ? tail_code : main_code));
            if (kRestBits == 1) {
                if (outlier) rests.take(__float_as_uint(elements.d[i]));
            } else {
                code -= kLeading;
                const unsigned whole = code | sign << (OUTLIER_BITS - 2);
                if (outlier) code = kTag | (whole & (kTag - 1));
                code += kLeading;
                if (kRestBits > 0 && outlier) rests.take(whole >> (MAIN_BITS - 1) << kTop);
            }
            fours[i / 4] += code << (i % 4 * MAIN_BITS);
        }
#pragma unroll
        for (int i = 0; i < kMine / 4; ++i) {
            const unsigned one = 1u << MAIN_BITS, two = one * one;
            const unsigned four = fours[i] - kLeading * (1 + one + two + one * two);
            const int bit = 4 * i * MAIN_BITS, shift = bit % 32;
            words[bit / 32] |= four << shift;
            if (shift + 4 * MAIN_BITS > 32) words[bit / 32 + 1] |= four >> (32 - shift);
        }
    }

    static constexpr unsigned kLeading = 0x4b000000;  // the bits of 2^23
    static constexpr int kTop = kRestBits > 0 ? 32 - kRestBits : 0;
};

// Encodes the first `count` values of a lane's block, whose first element is number `first` of the tensor, to `target`.
// Searches of one number begin where the one before has ended.
template <class Scalar>
__device__ __forceinline__ void write_block(
    float (&values)[kMine], const Form& form, int count, Word state, Index first, bool stochastic, int search,
    Room<Scalar>& room, unsigned char* target) {
    Elements elements(values, count);
    const bool huge = elements.huge();
    int guess = room.guess(search);
    const Parted parted(elements, count, huge ? 0 : form.outliers_of(count), guess);
    room.guess(search) = guess;
    Codes codes(elements, parted, Noise(state, unsigned(first / kMine) + rank(), stochastic));
    const int mine = huge ? 0 : of_mine(count);
    if (mine < kMine) keep_codes(mine, codes.words);
    if (huge) codes.rests = Rests();

    unsigned *const words = room.words(), *const own = words + 2 + rank() * MAIN_BITS;
#pragma unroll
    for (int i = 0; i < MAIN_BITS; ++i) own[i] = codes.words[i];
    if (kRestBits > 0) {
#pragma unroll
        for (int i = 0; i < kRestBits; ++i) words[2 + LANES * MAIN_BITS + i * LANES + rank()] = 0;
        words[2 + LANES * OUTLIER_BITS] = 0;
    }
    if (rank() == 0) {
        words[0] = huge ? kNanHalf * 0x10001u : elements.mean | parted.main_end << 16;
        words[1] = huge ? kNanHalf * 0x10001u : parted.tail_start | parted.tail_end << 16;
    }
    __syncwarp();
    if (kRestBits > 0) {
        codes.rests.store(words, 8 * form.rest_start(count) + int(parted.before) * kRestBits);
        __syncwarp();
    }
    move(words, target, count > 0 ? form.bytes_of(count) : 0);
    __syncwarp();
}

// ---- Decoding.

// If `tag` is not 0, takes the distance of an outlier from its code, 2^23 and more, and the highest bit of `signs`, which
// moves on. Written out, as the compiler would copy what each instruction may leave as it is.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ void take_tail(unsigned tag, unsigned code, float step, float start, float& distance, unsigned& signs) {
    asm("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p sub.rn.f32 %0, %3, 0f4B000000; @p mul.rn.f32 %0, %0, %4;"
        " @p add.rn.f32 %0, %0, %5; @p lop3.b32 %0, %0, %1, 0x80000000, 0xf8; @p shl.b32 %1, %1, 1; }"
        : "+f"(distance), "+r"(signs) : "r"(tag), "f"(__uint_as_float(code)), "f"(step), "f"(start));
}
__device__ __forceinline__ unsigned masked_with(unsigned bits, unsigned mask, unsigned others) {  // bits & mask | others
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(bits), "r"(mask), "r"(others));
    return result;
}
#endif

struct Levels {
    float mean, step, start, tail_step;
    __device__ __forceinline__ Levels() {}
    __device__ __forceinline__ explicit Levels(const unsigned* header) {
        mean = wide(header[0]), start = wide(header[1]);
        step = quotient(wide(header[0] >> 16), float(kMainSteps));
        tail_step = quotient(difference(wide(header[1] >> 16), start), float(kTailSteps));
    }
};

// By how many bits code k of four is shifted while it is made a float: 0 if it would reach the exponent.
__device__ constexpr int shift_of(int k) {
    constexpr int bits = OUTLIER_BITS - 2 > MAIN_BITS - 1 ? OUTLIER_BITS - 2 : MAIN_BITS - 1;
    return k * MAIN_BITS + bits <= 23 ? k * MAIN_BITS : 0;
}

// A lane's codes in registers.
struct Coded {
    Levels levels;
    unsigned words[MAIN_BITS + 1] = {}, rests[kRestBits + 1] = {};
    // A zero that the compiler does not know, and the bits of 2^23: an instruction has room for one number, a mask.
    unsigned leading;

    // Reads the first `size` bytes of a lane's block, which has room for `here` elements.
    template <class Scalar>
    __device__ __forceinline__ Coded(const unsigned char* source, int size, int here, Room<Scalar>& room) {
        const unsigned* const all = room.words();
        move(source, room.words(), size);
        __syncwarp();
        levels = Levels(all);
        leading = 0x4b000000 | unsigned(here) >> 31;
        unsigned tags[MAIN_BITS] = {}, outliers = 0;
#pragma unroll
        for (int i = 0; i < MAIN_BITS; ++i) words[i] = all[2 + rank() * MAIN_BITS + i];
        const int mine = of_mine(here);
        if (mine < kMine) keep_codes(mine, words);
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const int bit = i * MAIN_BITS + MAIN_BITS - 1;
            tags[bit / 32] |= 1u << bit % 32;
        }
#pragma unroll
        for (int i = 0; i < MAIN_BITS; ++i) outliers += __popc(words[i] & tags[i]);
        const int bit = 8 * Form::rest_start(here) + int(sum_before(outliers)) * kRestBits;
#pragma unroll
        for (int i = 0; i < kRestBits; ++i) rests[i] = __funnelshift_r(all[bit / 32 + i], all[bit / 32 + i + 1], bit % 32);
        if (kRestBits == 1) rests[0] = __brev(rests[0]);  // signs, the first one highest
        __syncwarp();
    }

    // Calls take(i, value) for each of the lane's elements, in order.
    template <class Take>
    __device__ __forceinline__ void decode(const Take& take) {
        // A code is made a float where it lies, as 2^23 + code * 2^shift, and its step divided by 2^shift.
        constexpr float two23 = 8388608.0f;
        float steps[4], tail_steps[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float down = 1.0f / (1 << shift_of(k));
            steps[k] = product(levels.step, down), tail_steps[k] = product(levels.tail_step, down);
        }
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const int at = i / 4 * 4 * MAIN_BITS, k = i % 4, shift = shift_of(k);
            unsigned four = words[at / 32] >> at % 32;
            if (at % 32 + 4 * MAIN_BITS > 32) four |= words[at / 32 + 1] << (32 - at % 32);
            if (shift == 0) four >>= k * MAIN_BITS;
            const unsigned low = masked_with(four, (kTag - 1) << shift, leading), tag = four & (kTag << shift);
            float distance = product(difference(__uint_as_float(low), two23 + float(kMainSteps << shift)), steps[k]);
            if (kRestBits == 1) {
                take_tail(tag, low, tail_steps[k], levels.start, distance, rests[0]);
            } else if (tag) {
                const unsigned whole = (low - leading) >> shift | (rests[0] & ((1u << kRestBits) - 1)) << (MAIN_BITS - 1);
                unsigned sign = whole << (33 - OUTLIER_BITS);
                take_tail(tag, (whole & kTailSteps) << shift | leading, tail_steps[k], levels.start, distance, sign);
#pragma unroll
                for (int w = 0; w < kRestBits; ++w) rests[w] = __funnelshift_r(rests[w], rests[w + 1], kRestBits);
            }
            take(i, sum(distance, levels.mean));
        }
    }
};
