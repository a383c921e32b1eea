// A step of an optimizer whose state is SmaQ blocks; the twin of actbench/ops/smaqstep, whose rules.py says what is
// computed. Compiled for one -DSCALAR (Float32, Float16, BFloat16) of parameters and gradients, and -DTILES=1: blocks
// have at most 256 elements. A warp reads, steps and writes one block at a time.
#include "common.cuh"
#include "groups.cuh"
#include "outliers.cuh"
#include "smaqblocks.cuh"

// ---- One more named instruction, as in common.cuh.

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float root(float x) {
    float result;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
#endif

// ---- A warp's block, eight numbers a lane.

// Returns half a main step.
__device__ __forceinline__ float read_block(
    const unsigned char* packed, const Form& form, int here, Shared& shared, float (&values)[8]) {
    move(packed, shared.bytes, form.bytes_of(here));
    __syncwarp();
    const Levels levels(form, shared);
    int before = 0;
    read_eight(form, levels, shared, 0, here, before, values);
    __syncwarp();
    return product(0.5f, levels.step);
}

__device__ __forceinline__ void write_block(
    const float (&values)[8], const Form& form, int here, Word state, Index first, Shared& shared, unsigned char* packed) {
    Elements elements(values, here);
    make_bytes(elements, form, here, state, first, true, shared);
    __syncwarp();
    move(shared.bytes, packed, form.bytes_of(here));
    __syncwarp();
}

// ---- Where a warp's block and the lane's elements begin, and how many elements each has.

struct Place {
    Index first, mine;
    int here, left;
    __device__ __forceinline__ Place(Index index, int block, Index count) {
        first = index * block, mine = first + 8 * lane();
        here = count - first < block ? int(count - first) : block;
        left = here - 8 * lane();
    }
};

KERNEL smaqstep_adam(
    SCALAR* param, const SCALAR* grad, unsigned char* means, unsigned char* roots, Index count, int main_bits,
    int outlier_bits, int outliers, int block, Word means_state, Word roots_state, float sign, float kept, float decay,
    unsigned from_gradient, float toward, float beta2, float rest2, float correction, float eps, float rate) {
    __shared__ Shared all[kWarps];
    __shared__ float parked[kWarps][8][kLanes];  // the second moment, while the first one needs the registers
    Shared& shared = all[warp()];
    const Form form{main_bits, outlier_bits, outliers, block};
    const int block_bytes = form.bytes_of(block);
    for (Index index = first_tile(); index * block < count; index += tile_step()) {
        const Place place(index, block, count);
        unsigned char *const mean_bytes = means + index * block_bytes, *const root_bytes = roots + index * block_bytes;
        float m[8], s[8], p[8], g[8];
        read_block(mean_bytes, form, place.here, shared, m);
        const float least = read_block(root_bytes, form, place.here, shared, s);
        load8(param + place.mine, place.left, aligned(param + place.mine), p);
        load8(grad + place.mine, place.left, aligned(grad + place.mine), g);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float weight = product(p[i], kept), gradient = sum(product(g[i], sign), product(p[i], decay));
            const float before = above(s[i], least) ? s[i] : least;
            m[i] = sum(from_gradient ? gradient : m[i], product(toward, difference(gradient, m[i])));
            s[i] = root(sum(product(product(before, before), beta2), product(product(gradient, rest2), gradient)));
            p[i] = sum(weight, quotient(product(m[i], rate), sum(quotient(s[i], correction), eps)));
            parked[warp()][i][lane()] = s[i];
        }
        store8(param + place.mine, place.left, aligned(param + place.mine), p);
        write_block(m, form, place.here, means_state, place.first, shared, mean_bytes);
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i] = parked[warp()][i][lane()];
        write_block(s, form, place.here, roots_state, place.first, shared, root_bytes);
    }
}

KERNEL smaqstep_sgd(
    SCALAR* param, const SCALAR* grad, unsigned char* buffers, Index count, int main_bits, int outlier_bits, int outliers,
    int block, Word state, float sign, float decay, float momentum, float added, unsigned nesterov, float rate) {
    __shared__ Shared all[kWarps];
    Shared& shared = all[warp()];
    const Form form{main_bits, outlier_bits, outliers, block};
    const int block_bytes = form.bytes_of(block);
    for (Index index = first_tile(); index * block < count; index += tile_step()) {
        const Place place(index, block, count);
        unsigned char* const bytes = buffers + index * block_bytes;
        float b[8], p[8], g[8];
        read_block(bytes, form, place.here, shared, b);
        load8(param + place.mine, place.left, aligned(param + place.mine), p);
        load8(grad + place.mine, place.left, aligned(grad + place.mine), g);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float gradient = sum(product(g[i], sign), product(p[i], decay));
            b[i] = sum(product(b[i], momentum), product(gradient, added));
            const float direction = nesterov ? sum(gradient, product(b[i], momentum)) : b[i];
            p[i] = sum(p[i], product(direction, rate));
        }
        store8(param + place.mine, place.left, aligned(param + place.mine), p);
        write_block(b, form, place.here, state, place.first, shared, bytes);
    }
}
