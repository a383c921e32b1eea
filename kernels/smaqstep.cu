// A step of an optimizer whose state is SmaQ blocks; the twin of methods/formats/ops/smaqstep, whose rules.py says what
// is computed. Compiled for one -DSCALAR (Float32, Float16, BFloat16) of parameters and gradients, -DMAIN_BITS,
// -DOUTLIER_BITS, and -DLANES=8: blocks have at most 256 elements. 8 lanes read, step and write one block at a time.
// From sm_90 on two blocks share a processor, with 128 registers a lane; before, and with more than one high bit of an
// outlier, that is too few.
#ifndef KERNEL
#define KERNEL extern "C" __global__ __launch_bounds__(256, __CUDA_ARCH__ >= 900 && OUTLIER_BITS - MAIN_BITS < 2 ? 2 : 1) void
#endif
#include "common.cuh"
#include "groups.cuh"
#include "outliers.cuh"
#include "smaqblocks.cuh"

constexpr int kVector = Room<SCALAR>::size;

// ---- One more named instruction, as in common.cuh.

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float root(float x) {
    float result;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
#endif

// ---- Where a lane's block begins, and its elements and bytes. What follows from the block's number is computed again
// where it is used: registers are scarce.

struct Place {
    unsigned index;
    int here;
    __device__ __forceinline__ Place(unsigned index, const Form& form, Index count) : index(index) {
        const Index left = count - first(form);
        here = left < 0 ? 0 : left < form.block ? int(left) : form.block;
    }
    __device__ __forceinline__ Index first(const Form& form) const { return Index(index) * form.block; }
    __device__ __forceinline__ Index byte(const Form& form) const { return Index(index) * form.bytes; }
    __device__ __forceinline__ int bytes(const Form& form) const { return here > 0 ? form.bytes_of(here) : 0; }
};

// The gradient of the loss, or of its negative, and of the weight decay.
__device__ __forceinline__ void load_gradient(
    const SCALAR* grad, const SCALAR* param, int here, float sign, float decay, Room<SCALAR>& room, float (&g)[kMine]) {
    load_block(grad, here, room, g);
#pragma unroll
    for (int i = 0; i < kMine; ++i) g[i] = product(g[i], sign);
    if (decay == 0) return;
    float p[kMine];
    load_block(param, here, room, p);
#pragma unroll
    for (int i = 0; i < kMine; ++i) g[i] = sum(g[i], product(p[i], decay));
}

KERNEL smaqstep_adam(
    SCALAR* param, const SCALAR* grad, unsigned char* means, unsigned char* roots, Index count, int outliers, int block,
    Word means_state, Word roots_state, float sign, float kept, float decay, unsigned from_gradient, float toward,
    float beta2, float rest2, float correction, float eps, float rate) {
    __shared__ Room<SCALAR> rooms[kWarps];
    Room<SCALAR>& room = rooms[warp()];
    const Form form(outliers, block);
    room.guess(0) = room.guess(1) = -1;
    for (unsigned index = first_tile() * kSlots; Index(index) * block < count; index += tile_step() * kSlots) {
        const Place place(index + slot(), form, count);
        // 32 elements a lane of four tensors do not fit the registers: a root takes the place of its gradient, and the
        // parameter is read again.
        float g[kMine], m[kMine];
        load_gradient(grad + place.first(form), param + place.first(form), place.here, sign, decay, room, g);
        Coded(means + place.byte(form), place.bytes(form), place.here, room).decode([&](int i, float mean) {
            m[i] = sum(from_gradient ? g[i] : mean, product(toward, difference(g[i], mean)));
        });
        Coded coded(roots + place.byte(form), place.bytes(form), place.here, room);
        const float least = product(0.5f, coded.levels.step);
        bring(param + place.first(form), place.here, room);
        float stepped[kVector];
        coded.decode([&](int i, float before) {
            Vector<SCALAR>& part = room.all[lane()][i / kVector];
            const float weight = product(part.lanes[i % kVector].value(), kept);
            before = greater(before, least);
            g[i] = root(sum(product(product(before, before), beta2), product(product(g[i], rest2), g[i])));
            stepped[i % kVector] = sum(weight, quotient(product(m[i], rate), sum(product(g[i], correction), eps)));
            if (i % kVector == kVector - 1) put(stepped, part);
        });
        send(0, place.here, room, param + place.first(form));
#pragma unroll 1
        for (int moment = 0; moment < 2; ++moment) {  // one copy of the code
            unsigned char* const packed = moment == 0 ? means : roots;
            const Word state = moment == 0 ? means_state : roots_state;
            write_block(m, form, place.here, state, place.first(form), true, moment, room, packed + place.byte(form));
#pragma unroll
            for (int i = 0; i < kMine; ++i) m[i] = g[i];
        }
    }
}

KERNEL smaqstep_sgd(
    SCALAR* param, const SCALAR* grad, unsigned char* buffers, Index count, int outliers, int block, Word state,
    float sign, float decay, float momentum, float added, unsigned nesterov, float rate) {
    __shared__ Room<SCALAR> rooms[kWarps];
    Room<SCALAR>& room = rooms[warp()];
    const Form form(outliers, block);
    room.guess(0) = -1;
    for (unsigned index = first_tile() * kSlots; Index(index) * block < count; index += tile_step() * kSlots) {
        const Place place(index + slot(), form, count);
        float b[kMine];
        load_gradient(grad + place.first(form), param + place.first(form), place.here, sign, decay, room, b);
        Coded coded(buffers + place.byte(form), place.bytes(form), place.here, room);
        bring(param + place.first(form), place.here, room);
        float stepped[kVector];
        coded.decode([&](int i, float before) {
            Vector<SCALAR>& part = room.all[lane()][i / kVector];
            const float gradient = b[i];
            b[i] = sum(product(before, momentum), product(gradient, added));
            const float direction = nesterov ? sum(gradient, product(b[i], momentum)) : b[i];
            stepped[i % kVector] = sum(part.lanes[i % kVector].value(), product(direction, rate));
            if (i % kVector == kVector - 1) put(stepped, part);
        });
        send(0, place.here, room, param + place.first(form));
        write_block(b, form, place.here, state, place.first(form), true, 0, room, buffers + place.byte(form));
    }
}
