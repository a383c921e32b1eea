// Groups of elements and their two bounds; methods/actnn/ops/groupquant/reference.py says what is computed. Needs
// common.cuh.

constexpr unsigned kNanWord = 0x7fc07fc0;

// ---- More named instructions, as in common.cuh.

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float sum(float a, float b) {
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float sum_down(float a, float b) {  // rounded down
    float result;
    asm("add.rm.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float difference(float a, float b) {
    float result;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float fused(float a, float b, float c) {  // a * b + c, rounded once
    float result;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
}
__device__ __forceinline__ float lesser(float a, float b) {  // if one is NaN, the other
    float result;
    asm("min.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float greater(float a, float b) {
    float result;
    asm("max.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float least(float a, float b) {  // if one is NaN, NaN
    float result;
#if __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
#else
    asm("{ .reg .pred p; .reg .f32 t; setp.nan.f32 p, %1, %2; min.f32 t, %1, %2; selp.f32 %0, 0f7FC00000, t, p; }"
        : "=f"(result) : "f"(a), "f"(b));
#endif
    return result;
}
__device__ __forceinline__ float most(float a, float b) {
    float result;
#if __CUDA_ARCH__ >= 800
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
#else
    asm("{ .reg .pred p; .reg .f32 t; setp.nan.f32 p, %1, %2; max.f32 t, %1, %2; selp.f32 %0, 0f7FC00000, t, p; }"
        : "=f"(result) : "f"(a), "f"(b));
#endif
    return result;
}
#endif

// ---- Bounds.

template <class Scalar> constexpr unsigned kLargest = 0x7f7f;
template <> constexpr unsigned kLargest<Float16> = 0x477f;

// The word of a group from its smallest and largest value: they become bfloat16, rounded outwards. To add 0xffff and cut
// the low half off rounds a magnitude up; without it, down. -0 becomes 0.
template <class Scalar>
__device__ __forceinline__ unsigned word_of(float low, float high) {
    unsigned a = __float_as_uint(low), b = __float_as_uint(high);
    if (!((a & 0x7fffffff) < 0x7f800000 && (b & 0x7fffffff) < 0x7f800000)) return kNanWord;
    if (sizeof(Scalar) == 4 || kLargest<Scalar> != 0x7f7f) {  // a bfloat16 is its own bound
        constexpr unsigned largest = kLargest<Scalar> << 16 | 0xffff;
        if (a >> 31) a += 0xffff;
        if (!(b >> 31)) b += 0xffff;
        a = a < (1u << 31 | largest) ? a : 1u << 31 | largest;
        b = int(b) < int(largest) ? b : largest;
    }
    a >>= 16;
    b >>= 16;
    return (a == 0x8000 ? 0 : a) | (b == 0x8000 ? 0 : b) << 16;
}

// Whether a group's bounds are below 2^60 and not below 2^-60, so that nothing needs a scale, and no value lies outside of
// them, as one beyond the largest bfloat16 may.
template <class Scalar>
__device__ __forceinline__ bool is_ordinary(unsigned word) {
    constexpr unsigned least = 67u << 23, huge = 187u << 23, cut = kLargest<Scalar> << 16;
    const unsigned low = word << 16 & 0x7fffffff, high = word & 0x7fff0000;
    return (low > high ? low : high) - least < (huge < cut ? huge : cut) - least;
}

// A power of two that keeps everything in range, its inverse, and the scaled offset and range.
struct Scaled {
    float scale = 1, inverse = 1, offset, span;
    __device__ __forceinline__ Scaled(unsigned word, bool ordinary) {
        offset = __uint_as_float(word << 16);
        float high = __uint_as_float(word & 0xffff0000);
        if (!ordinary) {
            const unsigned a = word << 16 & 0x7fffffff, b = word & 0x7fff0000;
            const unsigned largest = a > b ? a : b, up = 191u << 23, down = 63u << 23;  // 2^64, 2^-64
            if (largest >= 187u << 23) {  // 2^60
                scale = __uint_as_float(down);
                inverse = __uint_as_float(up);
            } else if (largest < 67u << 23) {  // 2^-60
                scale = __uint_as_float(up);
                inverse = __uint_as_float(down);
            }
            offset = product(offset, scale);
            high = product(high, scale);
        }
        span = difference(high, offset);
    }
};

constexpr unsigned kWhole = 0x4B000000;  // 2^23 as a float

// Eight codes to values: code * step and the offset are two roundings. A code that ends below bit 23 is masked where it
// lies in its half: under the exponent of 2^23 it counts 2^shift times, and the step as much less, without rounding.
template <int kBits>
struct Steps {
    static constexpr int kInPlace = kBits == 0 || kBits == 8 ? 0 : 23 / kBits < 4 ? 23 / kBits : 4;
    float steps[4], ground[4];  // what 2^23 itself counts, to be taken away

    unsigned exponent;

    // `nothing` is 0, but the compiler must not know it: else it fills a register anew for each mask.
    __device__ __forceinline__ Steps(const Scaled& scaled, int bits, unsigned nothing) {
        exponent = kWhole | nothing;
        const float step = quotient(scaled.span, float((1u << bits) - 1));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            steps[i] = i < kInPlace ? product(step, 1.0f / float(1u << (i * bits))) : step;
            ground[i] = product(steps[i], -8388608.0f);
        }
    }
    __device__ __forceinline__ void values(const unsigned (&halves)[2], int bits, float offset, float (&values)[8]) const {
        const unsigned most = (1u << bits) - 1;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned half = halves[i / 4];
            const int shift = i % 4 * bits;
            const unsigned code = i % 4 < kInPlace ? (half & most << shift) | exponent
                                  : kBits == 8     ? __byte_perm(half, kWhole, 0x7540 | i % 4)
                                                   : (half >> shift & most) | exponent;
            values[i] = sum(fused(__uint_as_float(code), steps[i % 4], ground[i % 4]), offset);
        }
    }
};
