// The backward pass of batch norm from the codes of its input; the twin of methods/actnn/ops/batchnorm. Compiled for one
// -DSCALAR (Float32, Float16, BFloat16), one -DBITS, 1 to 8, one -DGROUP, the elements of a group, and one -DVECTOR, the
// elements that a lane reads at once, at most 16 bytes: 8 or 4, which divides the elements of a channel in a sample.
//
// Each warp works on the elements of one channel in one sample, which lie side by side: so what belongs to a channel is
// read once for all of them, and codes are decoded in registers, not to memory.
#include "common.cuh"
#include "groups.cuh"

constexpr int kStep = VECTOR * kLanes;

// Neighbours of a channel's elements: gradients, and what the input's codes stand for.
struct Neighbours {
    float dy[VECTOR], x[VECTOR];
};

// What one load or store moves where memory is aligned.
struct alignas(VECTOR * sizeof(SCALAR)) Packet {
    SCALAR lanes[VECTOR];
};

__device__ __forceinline__ void load(const SCALAR* source, bool whole, float (&values)[VECTOR]) {
    if (whole) {
        const Packet some = *reinterpret_cast<const Packet*>(source);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) values[i] = some.lanes[i].value();
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) values[i] = source[i].value();
    }
}

template <class Scalar>  // of one SCALAR, half types alone round two at once
__device__ __forceinline__ void store(Scalar* target, bool whole, const float (&values)[VECTOR]) {
    Packet narrow;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        if constexpr (sizeof(Scalar) == 4) {
            narrow.lanes[i] = Scalar::nearest(values[i]);
        } else if (i % 2 == 0) {  // one instruction rounds two
            const unsigned both = Scalar::two_nearest(values[i], values[i + 1]);
            narrow.lanes[i] = {static_cast<decltype(Scalar::bits)>(both)};
            narrow.lanes[i + 1] = {static_cast<decltype(Scalar::bits)>(both >> 16)};
        }
    }
    if (whole && sizeof(Packet) == 16) {
        const unsigned* words = reinterpret_cast<const unsigned*>(&narrow);
        store16(target, words[0], words[1], words[2], words[3]);
    } else if (whole) {
        *reinterpret_cast<Packet*>(target) = narrow;
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) target[i] = narrow.lanes[i];
    }
}

// The codes of the neighbours from `element` on, the first one lowest: eight begin at a whole byte, four at half of one.
__device__ __forceinline__ Group<BITS> codes_at(const unsigned char* codes, Index element) {
    constexpr int bytes = (VECTOR * BITS + 7) / 8;
    const unsigned char* source = codes + (element * BITS >> 3);
    Group<BITS> found = 0;
#pragma unroll
    for (int i = 0; i < bytes; ++i) found |= Group<BITS>(source[i]) << (8 * i);
    return VECTOR * BITS % 8 ? found >> (element * BITS & 7) : found;
}

__device__ __forceinline__ Neighbours load_neighbours(
    const SCALAR* dy, const unsigned char* codes, const unsigned* words, Index element, bool whole, unsigned nothing) {
    Neighbours some;
    load(dy + element, whole, some.dy);
    const Group<BITS> packed = codes_at(codes, element);
    const unsigned word = words[element / GROUP];
    const Scaled scaled(word, is_ordinary<Float32>(word));
    const Steps<BITS> steps(scaled, BITS, nothing);
    const unsigned halves[2] = {unsigned(packed), unsigned(packed >> (4 * BITS))};
    float values[8];
    steps.values(halves, BITS, scaled.offset, values);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) some.x[i] = product(values[i], scaled.inverse);
    return some;
}

// Writes the sums of dy and of dy * (x - mean) of each row, a channel in a sample: a lane adds up its first, second ...
// neighbours, then those, and then the lanes are added.
KERNEL batchnorm_sums(
    const SCALAR* dy, const unsigned char* codes, const unsigned* words, const float* mean, float* sums, unsigned rows,
    unsigned channels, unsigned columns) {
    const unsigned nothing = columns >> 31;  // 0, which the compiler must not know (Steps)
    const bool whole = aligned(dy);
    for (Index row = first_tile(); row < rows; row += tile_step()) {
        const float center = mean[unsigned(row) % channels];
        float of_dy[VECTOR] = {}, of_products[VECTOR] = {};
        for (unsigned column = VECTOR * lane(); column < columns; column += kStep) {
            const Neighbours some = load_neighbours(dy, codes, words, row * columns + column, whole, nothing);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                of_dy[i] = sum(of_dy[i], some.dy[i]);
                of_products[i] = sum(of_products[i], product(some.dy[i], difference(some.x[i], center)));
            }
        }
#pragma unroll
        for (int half = VECTOR / 2; half > 0; half /= 2) {
#pragma unroll
            for (int i = 0; i < half; ++i) {
                of_dy[i] = sum(of_dy[i], of_dy[i + half]);
                of_products[i] = sum(of_products[i], of_products[i + half]);
            }
        }
#pragma unroll
        for (int flip = kLanes / 2; flip > 0; flip /= 2) {
            of_dy[0] = sum(of_dy[0], __shfl_xor_sync(~0u, of_dy[0], flip));
            of_products[0] = sum(of_products[0], __shfl_xor_sync(~0u, of_products[0], flip));
        }
        if (lane() == 0) {
            sums[row] = of_dy[0];
            sums[row + rows] = of_products[0];
        }
    }
}

// Adds the sums of all samples up, in their order, and writes the gradients of weight and bias. The first sample's sums are
// replaced by the means of dy and, times invstd^2, of dy * (x - mean).
KERNEL batchnorm_totals(
    float* sums, const float* invstd, float* for_weight, float* for_bias, unsigned rows, unsigned channels, float count) {
    for (unsigned channel = blockIdx.x * kThreads + threadIdx.x; channel < channels; channel += gridDim.x * kThreads) {
        float of_dy = 0, of_products = 0;
        for (Index row = channel; row < rows; row += channels) {
            of_dy = sum(of_dy, sums[row]);
            of_products = sum(of_products, sums[row + rows]);
        }
        for_bias[channel] = of_dy;
        for_weight[channel] = product(of_products, invstd[channel]);
        sums[channel] = quotient(of_dy, count);
        sums[channel + rows] = product(quotient(of_products, count), product(invstd[channel], invstd[channel]));
    }
}

// Writes dx = (dy - mean of dy - (x - mean) * mean of dy * (x - mean) * invstd^2) * weight * invstd.
KERNEL batchnorm_gradient(
    const SCALAR* dy, const unsigned char* codes, const unsigned* words, const float* mean, const float* invstd,
    const float* weight, const float* sums, SCALAR* dx, unsigned rows, unsigned channels, unsigned columns) {
    const unsigned nothing = columns >> 31;
    const bool whole = aligned(dy) && aligned(dx);
    for (Index row = first_tile(); row < rows; row += tile_step()) {
        const unsigned channel = unsigned(row) % channels;
        const float center = mean[channel], level = sums[channel], slope = sums[channel + rows];
        const float factor = product(weight[channel], invstd[channel]);
        for (unsigned column = VECTOR * lane(); column < columns; column += kStep) {
            const Index element = row * columns + column;
            const Neighbours some = load_neighbours(dy, codes, words, element, whole, nothing);
            float values[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const float off = difference(difference(some.dy[i], level), product(difference(some.x[i], center), slope));
                values[i] = product(off, factor);
            }
            store(dx + element, whole, values);
        }
    }
}
