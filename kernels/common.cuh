// What the kernels share: float types, eight elements at a time, streams of codes, random words.
//
// Elements are counted in 64 bits, tiles in 32. A warp works on tiles of 256 elements, eight neighbours a lane: eight
// codes of b bits are b whole bytes, so no two lanes write to one byte. CuPy always compiles with -ftz=true, so
// arithmetic that must equal torch's names its instructions.
#pragma once

#ifndef KERNEL
#define KERNEL extern "C" __global__ __launch_bounds__(256) void
#endif

using Index = long long;
using Word = unsigned long long;

constexpr int kThreads = 256, kLanes = 32, kWarps = kThreads / kLanes, kTile = 8 * kLanes;

__device__ __forceinline__ int lane() { return threadIdx.x % kLanes; }
__device__ __forceinline__ int warp() { return threadIdx.x / kLanes; }
__device__ __forceinline__ Index first_tile() { return Index(blockIdx.x) * kWarps + warp(); }
__device__ __forceinline__ Index tile_step() { return Index(gridDim.x) * kWarps; }
__device__ __forceinline__ int tiles_of(Index count) { return int((count + kTile - 1) / kTile); }

// Where a lane's eight elements and its tile's codes of so many bits are, and how many of both the tensor has from there.
template <int bits>
struct Span {
    Index element, byte;
    int left, bytes;  // of a lane that is past the end, `left` is negative
    __device__ __forceinline__ Span(int tile, Index count) : element(Index(tile) * kTile + 8 * lane()), byte(Index(tile) * kLanes * bits) {
        const Index rest = count - Index(tile) * kTile;
        const int elements = rest < kTile ? int(rest) : kTile;
        left = elements - 8 * lane();
        bytes = (elements * bits + 7) >> 3;  // shifted: a division rounds towards zero, which costs three instructions
    }
};

__device__ __forceinline__ bool aligned(const void* pointer) { return reinterpret_cast<Word>(pointer) % 16 == 0; }

// ---- Named instructions: subnormal numbers stay, nothing is fused, NVRTC needs no headers. The tests' host header
// replaces these.

#ifdef __CUDA_ARCH__
__device__ __forceinline__ bool above(float x, float bound) {
    unsigned result;
    asm("{ .reg .pred p; setp.gt.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }" : "=r"(result) : "f"(x), "f"(bound));
    return result;
}
__device__ __forceinline__ float product(float a, float b) {
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float quotient(float a, float b) {
    float result;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
    return wide;
}
// Two floats as Float16, the first one in the low half.
__device__ __forceinline__ unsigned floats_to_halves(float low, float high) {
    unsigned both;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }" : "=r"(both) : "f"(low), "f"(high));
#endif
    return both;
}
// Four bytes of the eight of low and high, each named by 3 bits of the selector; with the fourth, its highest bit eight
// times.
__device__ __forceinline__ unsigned permuted(unsigned low, unsigned high, unsigned selector) {
    unsigned result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
    return result;
}
// With uint4, NVRTC splits this store if the other branch writes to the same place piece by piece.
__device__ __forceinline__ void store16(void* target, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" : : "l"(target), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
#endif

// ---- Float types: read exactly, written as the bits of the nearest value, ties to even. Whatever NaN is narrowed
// becomes 0x7fff in both half types, as in torch on CUDA; torch on the CPU writes others.

// Two floats as BFloat16, the first one in the low half.
__device__ __forceinline__ unsigned floats_to_bfloats(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    const unsigned words[] = {__float_as_uint(low), __float_as_uint(high)};
    unsigned rounded[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const bool is_nan = (words[i] & 0x7fffffff) > 0x7f800000;
        rounded[i] = is_nan ? 0x7fff : (words[i] + 0x7fff + ((words[i] >> 16) & 1)) >> 16;
    }
    return rounded[0] | rounded[1] << 16;
#endif
}

struct Float32 {
    unsigned bits;
    static constexpr unsigned infinity = 0x7f800000, nan = 0x7fffffff;
    __device__ __forceinline__ float value() const { return __uint_as_float(bits); }
    static __device__ __forceinline__ Float32 nearest(float wide) { return {__float_as_uint(wide)}; }
};

struct Float16 {
    unsigned short bits;
    static constexpr unsigned infinity = 0x7c00, nan = 0x7fff;
    __device__ __forceinline__ float value() const { return half_to_float(bits); }
    static __device__ __forceinline__ unsigned two_nearest(float low, float high) { return floats_to_halves(low, high); }
    static __device__ __forceinline__ Float16 nearest(float wide) { return {static_cast<unsigned short>(two_nearest(wide, 0))}; }
};

struct BFloat16 {
    unsigned short bits;
    static constexpr unsigned infinity = 0x7f80, nan = 0x7fff;
    __device__ __forceinline__ float value() const { return __uint_as_float(unsigned(bits) << 16); }
    static __device__ __forceinline__ unsigned two_nearest(float low, float high) { return floats_to_bfloats(low, high); }
    static __device__ __forceinline__ BFloat16 nearest(float wide) { return {static_cast<unsigned short>(two_nearest(wide, 0))}; }
};

// ---- Eight elements a lane: one or two loads of 16 bytes, or one by one at an unaligned pointer or at the end.

template <class Scalar>
struct alignas(16) Vector {
    static constexpr int size = 16 / sizeof(Scalar);
    Scalar lanes[size];
};

// The words that eight elements fill: one each, or one for two, the first in the low half.
template <class Scalar>
struct Eight {
    static constexpr int size = 2 * sizeof(Scalar), per_word = 8 / size;
    unsigned words[size];
    __device__ __forceinline__ Scalar operator[](int i) const {
        return {static_cast<decltype(Scalar::bits)>(words[i / per_word] >> (i % per_word * 16))};
    }
};

// Elements past the end have the bits `missing`.
template <class Scalar>
__device__ __forceinline__ Eight<Scalar> load_words(const Scalar* source, Index left, bool whole, unsigned missing) {
    Eight<Scalar> loaded;
    if (whole && left >= 8) {
#pragma unroll
        for (int i = 0; i < loaded.size / 4; ++i) {
            const auto part = reinterpret_cast<const Vector<unsigned>*>(source)[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) loaded.words[4 * i + j] = part.lanes[j];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned bits = i < left ? source[i].bits : missing;
            if (i % loaded.per_word == 0) loaded.words[i / loaded.per_word] = bits;
            else loaded.words[i / loaded.per_word] |= bits << 16;
        }
    }
    return loaded;
}

template <class Scalar>
__device__ __forceinline__ void store_words(Scalar* target, Index left, bool whole, const Eight<Scalar>& stored) {
    if (whole && left >= 8) {
        const unsigned* words = stored.words;
#pragma unroll
        for (int i = 0; i < stored.size; i += 4)
            store16(target + i * stored.per_word, words[i], words[i + 1], words[i + 2], words[i + 3]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < left) target[i] = stored[i];
    }
}

template <class Scalar>
__device__ __forceinline__ void widen(const Eight<Scalar>& narrow, float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = narrow[i].value();
}

// Elements past the end are NaN, which no bound is below.
template <class Scalar>
__device__ __forceinline__ void load8(const Scalar* source, Index left, bool whole, float (&values)[8]) {
    widen(load_words(source, left, whole, Scalar::nan), values);
}

template <class Scalar>
__device__ __forceinline__ void store8(Scalar* target, Index left, bool whole, const float (&values)[8]) {
    Eight<Scalar> narrow;
#pragma unroll
    for (int i = 0; i < narrow.size; ++i)
        if constexpr (narrow.per_word == 1) narrow.words[i] = Scalar::nearest(values[i]).bits;
        else narrow.words[i] = Scalar::two_nearest(values[2 * i], values[2 * i + 1]);
    store_words(target, left, whole, narrow);
}

// Stores eight elements, except those before `skipped` and from `left` on.
template <class Scalar>
__device__ __forceinline__ void store_from(Index skipped, Scalar* target, int left, const float (&values)[8]) {
    if (skipped <= 0) {
        store8(target, left, aligned(target), values);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i >= skipped && i < left) target[i] = Scalar::nearest(values[i]);
    }
}

// ---- A tile's codes are 32 * bits bytes of one little-endian stream. They pass through shared memory, so that the
// warp moves them as 2 * bits neighbouring vectors. `left` is the bytes of the stream from `target` on.

using Bytes16 = Vector<unsigned char>;

template <bool small> struct GroupOf { using type = unsigned; };
template <> struct GroupOf<false> { using type = Word; };
template <int bits> using Group = typename GroupOf<bits <= 4>::type;  // eight codes, the first one lowest

template <int bits>
struct alignas(16) Stage {
    unsigned char bytes[kLanes * bits];
};

template <int bits>
__device__ __forceinline__ void store_codes(Group<bits> group, unsigned char* target, Index left, bool whole, Stage<bits>& stage) {
#pragma unroll
    for (int i = 0; i < bits; ++i) stage.bytes[lane() * bits + i] = static_cast<unsigned char>(group >> (8 * i));
    __syncwarp();
    if (whole && left >= kLanes * bits) {
        if (lane() < 2 * bits) reinterpret_cast<Bytes16*>(target)[lane()] = reinterpret_cast<Bytes16*>(stage.bytes)[lane()];
    } else {
        for (int i = lane(); i < kLanes * bits && i < left; i += kLanes) target[i] = stage.bytes[i];
    }
    __syncwarp();
}

template <int bits>
__device__ __forceinline__ Group<bits> load_codes(const unsigned char* source, Index left, bool whole, Stage<bits>& stage) {
    if (whole && left >= kLanes * bits) {
        if (lane() < 2 * bits) reinterpret_cast<Bytes16*>(stage.bytes)[lane()] = reinterpret_cast<const Bytes16*>(source)[lane()];
    } else {
        for (int i = lane(); i < kLanes * bits && i < left; i += kLanes) stage.bytes[i] = source[i];
    }
    __syncwarp();
    Group<bits> group = 0;
#pragma unroll
    for (int i = 0; i < bits; ++i) group |= Group<bits>(stage.bytes[lane() * bits + i]) << (8 * i);
    __syncwarp();
    return group;
}

// ---- Random words: a hash of a state and a counter (splitmix64), as in actbench/ops/noise.py.

__device__ __forceinline__ Word random_word(Word state, Word index) {
    Word word = state + (index + 1) * 0x9E3779B97F4A7C15ull;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return word ^ (word >> 31);
}

// The state of a seed in memory: the host, which need not know the seed, cannot make it.
__device__ __forceinline__ Word state_of(const Word* seed) {
    return random_word(*seed, 0);
}

// 64 bits of the endless stream of a state's words, from bit `position` on.
__device__ __forceinline__ Word random_bits(Word state, Word position) {
    const int shift = position % 64;
    const Word low = random_word(state, position / 64) >> shift;
    return shift == 0 ? low : low | random_word(state, position / 64 + 1) << (64 - shift);
}

// ---- Noise for rounding: a sequence of 32 numbers of 15 bits, as in actbench/ops/noise.py.

struct Noise {
    unsigned word, increment;

    __device__ __forceinline__ Noise(Word state, unsigned sequence, bool stochastic) {
        word = sequence * 0x9E3779B1u + unsigned(state);
        word = (word ^ word >> 16) * 0x85EBCA6Bu + unsigned(state >> 32);
        word ^= word >> 13;
        increment = word | 1;
        word *= 0xC2B2AE35u;
        word ^= word >> 16;
        if (!stochastic) word = 1u << 31, increment = 0;  // which every step returns to
    }

    // Returns 256 + n / 2^15 for the next number n; 256.5 for the nearest code.
    __device__ __forceinline__ float next() {
        word = word * 0xADB4A92Du + increment;
        return __uint_as_float(__funnelshift_r(word, 0x8700u, 17));  // 0x43800000 | word >> 17, in one instruction
    }
};
