// Groups of elements and their two bounds; methods/actnn/ops/groupquant/reference.py says what is computed. Needs
// common.cuh.
//
// A warp works on one group, eight neighbours a lane, in tiles of 256. Groups of 32, 64 and 128 share a tile.

constexpr unsigned kNanWord = 0x7fc07fc0;
constexpr Word kNearest = 0x8000800080008000;

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
__device__ __forceinline__ unsigned nearest_count(float x) {  // 0 for NaN and below zero
    unsigned result;
    asm("cvt.rni.u32.f32 %0, %1;" : "=r"(result) : "f"(x));
    return result;
}
#endif

// ---- The elements of a lane.

struct Share {
    int lanes, groups, place, mine;  // lanes of a group, groups of a warp; this lane's place in its group, and its group
    __device__ __forceinline__ explicit Share(int group_size) {
        const int wanted = group_size / 8;
        lanes = wanted < kLanes && (wanted & (wanted - 1)) == 0 ? wanted : kLanes;
        groups = kLanes / lanes;
        place = lane() & (lanes - 1);
        mine = lane() / lanes;
    }
};

// A warp's steps through the groups of all rows. A step needs no division, and with one row the start needs none. A
// step is at least 32 elements, so 32 bits count the steps of 2^37 elements.
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

// ---- Bounds.

template <class Scalar> constexpr unsigned kLargest = 0x7f7f;
template <> constexpr unsigned kLargest<Float16> = 0x477f;

// A finite bound as bfloat16: its magnitude is rounded up if its sign bit equals `up`, else cut off.
__device__ __forceinline__ unsigned bound(float value, unsigned up, unsigned largest) {
    const unsigned bits = __float_as_uint(value), sign = bits >> 31;
    unsigned magnitude = ((bits & 0x7fffffff) + (sign == up ? 0xffff : 0)) >> 16;
    magnitude = magnitude < largest ? magnitude : largest;
    return magnitude == 0 ? 0 : sign << 15 | magnitude;
}

struct Extent {
    float low = __uint_as_float(0x7f800000), high = __uint_as_float(0xff800000);
    bool bad = false;

    __device__ __forceinline__ void take(float (&values)[8], int left) {
        if (left <= 0) return;
        if (left < 8) {
#pragma unroll
            for (int i = 1; i < 8; ++i) values[i] = i < left ? values[i] : values[0];
        }
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            low = lesser(low, values[i]);
            high = greater(high, values[i]);
            const unsigned magnitude = __float_as_uint(values[i]) & 0x7fffffff;
            largest = largest > magnitude ? largest : magnitude;
        }
        bad = bad || largest >= 0x7f800000;
    }

    // Returns the word of a group, from the extents of all its lanes.
    __device__ __forceinline__ unsigned word(const Share& share, unsigned most) {
#pragma unroll
        for (int flip = kLanes / 2; flip > 0; flip /= 2) {
            if (flip < share.lanes) {
                low = lesser(low, __shfl_xor_sync(~0u, low, flip));
                high = greater(high, __shfl_xor_sync(~0u, high, flip));
            }
        }
        const unsigned group = ~0u >> (kLanes - share.lanes) << (share.mine * share.lanes);
        if (__ballot_sync(~0u, bad) & group) return kNanWord;
        return bound(low, 1, most) | bound(high, 0, most) << 16;
    }
};

// A power of two that keeps everything in range, its inverse, and the scaled offset and range.
struct Scaled {
    float scale = 1, inverse = 1, offset, span;
    __device__ __forceinline__ explicit Scaled(unsigned word) {
        const float low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xffff0000);
        const unsigned a = __float_as_uint(low) & 0x7fffffff, b = __float_as_uint(high) & 0x7fffffff;
        const unsigned largest = a > b ? a : b, up = 191u << 23, down = 63u << 23;  // 2^64, 2^-64
        if (largest >= 187u << 23) {  // 2^60
            scale = __uint_as_float(down);
            inverse = __uint_as_float(up);
        } else if (largest < 67u << 23) {  // 2^-60
            scale = __uint_as_float(up);
            inverse = __uint_as_float(down);
        }
        offset = product(low, scale);
        span = difference(product(high, scale), offset);
    }
};

// ---- Eight codes as one word, and a tile's codes, for bits that are known only at run time; see common.cuh.

__device__ __forceinline__ Word packed_codes(const unsigned (&codes)[8], int bits) {
    const unsigned one = 1u << bits, two = one * one, three = two * one;
    const unsigned low = codes[0] + codes[1] * one + codes[2] * two + codes[3] * three;
    const unsigned high = codes[4] + codes[5] * one + codes[6] * two + codes[7] * three;
    return low | Word(high) << (4 * bits);
}

__device__ __forceinline__ void store_tile(Word group, int bits, unsigned char* target, Index left, Stage<8>& stage) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < bits) stage.bytes[lane() * bits + i] = static_cast<unsigned char>(group >> (8 * i));
    __syncwarp();
    if (aligned(target) && left >= kLanes * bits) {
        if (lane() < 2 * bits) reinterpret_cast<Bytes16*>(target)[lane()] = reinterpret_cast<Bytes16*>(stage.bytes)[lane()];
    } else {
        for (int i = lane(); i < kLanes * bits && i < left; i += kLanes) target[i] = stage.bytes[i];
    }
    __syncwarp();
}

__device__ __forceinline__ Word load_tile(int bits, const unsigned char* source, Index left, Stage<8>& stage) {
    if (aligned(source) && left >= kLanes * bits) {
        if (lane() < 2 * bits) reinterpret_cast<Bytes16*>(stage.bytes)[lane()] = reinterpret_cast<const Bytes16*>(source)[lane()];
    } else {
        for (int i = lane(); i < kLanes * bits && i < left; i += kLanes) stage.bytes[i] = source[i];
    }
    __syncwarp();
    Word group = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < bits) group |= Word(stage.bytes[lane() * bits + i]) << (8 * i);
    __syncwarp();
    return group;
}
