// A step of an optimizer whose state is SmaQ blocks; the twin of methods/formats/ops/smaqstep, whose rules.py says what
// is computed. Compiled for one -DSCALAR (Float32, Float16, BFloat16) of parameters and gradients, -DMAIN_BITS,
// -DOUTLIER_BITS, and -DLANES=8: blocks have at most 256 elements. 8 lanes read, step and write one block at a time.
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

// ---- Where a lane's block begins, and its elements and bytes.

struct Place {
    Index first, byte;
    int here, bytes;
    __device__ __forceinline__ Place(Index index, const Form& form, Index count) {
        first = index * form.block, byte = index * form.bytes;
        const Index left = count - first;
        here = left < 0 ? 0 : left < form.block ? int(left) : form.block;
        bytes = here > 0 ? form.bytes_of(here) : 0;
    }
};

KERNEL smaqstep_adam(
    SCALAR* param, const SCALAR* grad, unsigned char* means, unsigned char* roots, Index count, int outliers, int block,
    Word means_state, Word roots_state, float sign, float kept, float decay, unsigned from_gradient, float toward,
    float beta2, float rest2, float correction, float eps, float rate) {
    __shared__ Room<SCALAR> rooms[kWarps];
    Room<SCALAR>& room = rooms[warp()];
    const Form form(outliers, block);
    int guess_mean = -1, guess_root = -1;
    for (Index index = first_tile() * kSlots; index * block < count; index += tile_step() * kSlots) {
        const Place place(index + slot(), form, count);
        unsigned char *const mean_bytes = means + place.byte, *const root_bytes = roots + place.byte;
        float p[kMine], g[kMine], m[kMine], s[kMine];
        load_block(param + place.first, place.here, room, p);
        load_block(grad + place.first, place.here, room, g);
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            g[i] = sum(product(g[i], sign), product(p[i], decay));
            p[i] = product(p[i], kept);
        }
        read_block(mean_bytes, place.bytes, place.here, room, m);
#pragma unroll
        for (int i = 0; i < kMine; ++i) m[i] = sum(from_gradient ? g[i] : m[i], product(toward, difference(g[i], m[i])));
        const float least = read_block(root_bytes, place.bytes, place.here, room, s);
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const float before = above(s[i], least) ? s[i] : least;
            s[i] = root(sum(product(product(before, before), beta2), product(product(g[i], rest2), g[i])));
            p[i] = sum(p[i], quotient(product(m[i], rate), sum(quotient(s[i], correction), eps)));
        }
        store_block(p, 0, place.here, room, param + place.first);
        write_block(m, form, place.here, means_state, place.first, true, guess_mean, room, mean_bytes);
        write_block(s, form, place.here, roots_state, place.first, true, guess_root, room, root_bytes);
    }
}

KERNEL smaqstep_sgd(
    SCALAR* param, const SCALAR* grad, unsigned char* buffers, Index count, int outliers, int block, Word state,
    float sign, float decay, float momentum, float added, unsigned nesterov, float rate) {
    __shared__ Room<SCALAR> rooms[kWarps];
    Room<SCALAR>& room = rooms[warp()];
    const Form form(outliers, block);
    int guess = -1;
    for (Index index = first_tile() * kSlots; index * block < count; index += tile_step() * kSlots) {
        const Place place(index + slot(), form, count);
        float p[kMine], g[kMine], b[kMine];
        load_block(param + place.first, place.here, room, p);
        load_block(grad + place.first, place.here, room, g);
        read_block(buffers + place.byte, place.bytes, place.here, room, b);
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const float gradient = sum(product(g[i], sign), product(p[i], decay));
            b[i] = sum(product(b[i], momentum), product(gradient, added));
            const float direction = nesterov ? sum(gradient, product(b[i], momentum)) : b[i];
            p[i] = sum(p[i], product(direction, rate));
        }
        store_block(p, 0, place.here, room, param + place.first);
        write_block(b, form, place.here, state, place.first, true, guess, room, buffers + place.byte);
    }
}
