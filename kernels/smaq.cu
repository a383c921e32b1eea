// SmaQ blocks; the twin of methods/formats/ops/smaq, where format.py has the layout and reference.py the meaning of a
// code. Compiled for one -DSCALAR (Float32, Float16, BFloat16), -DMAIN_BITS, -DOUTLIER_BITS, and -DLANES: 8 for blocks of
// at most 256 elements, 32 for larger ones.
#include "common.cuh"
#include "groups.cuh"
#include "outliers.cuh"
#include "smaqblocks.cuh"

constexpr int kVector = Room<SCALAR>::size;

KERNEL smaq_encode(
    const SCALAR* x, unsigned char* packed, Index count, int outliers, int block, const Word* seed, unsigned stochastic) {
    __shared__ Room<SCALAR> rooms[kWarps];
    Room<SCALAR>& room = rooms[warp()];
    const Form form(outliers, block);
    const Word state = state_of(seed);
    room.guess(0) = -1;
    for (Index first = first_tile() * kSlots; first * block < count; first += tile_step() * kSlots) {
        const Index index = first + slot(), left = count - index * block;
        const int here = left < 0 ? 0 : left < block ? int(left) : block;
        float values[kMine];
        load_block(x + index * block, here, room, values);
        write_block(values, form, here, state, index * block, stochastic, 0, room, packed + index * form.bytes);
    }
}

template <class Scalar> __device__ __forceinline__ float limited(float value) { return value; }
template <> __device__ __forceinline__ float limited<Float16>(float value) {
    constexpr float most = 65504;
    return above(value, most) ? most : above(-most, value) ? -most : value;
}

// Decodes elements start .. start + count - 1; the packed bytes have room for `room_for`.
KERNEL smaq_decode(
    const unsigned char* packed, SCALAR* out, Index size, Index room_for, Index start, Index count, int outliers, int block) {
    __shared__ Room<SCALAR> rooms[kWarps];
    Room<SCALAR>& room = rooms[warp()];
    const Form form(outliers, block);
    const Index end = start + count;
    for (Index first = start / block + first_tile() * kSlots; first * block < end; first += tile_step() * kSlots) {
        const Index index = first + slot(), rest = room_for - index * block, left = size - index * form.bytes;
        const int here = rest < 0 ? 0 : rest < block ? int(rest) : block;
        const int bytes = left < 0 ? 0 : left < form.bytes ? int(left) : form.bytes;
        Coded coded(packed + index * form.bytes, bytes, here, room);
        float values[kVector];
        coded.decode([&](int i, float value) {
            values[i % kVector] = limited<SCALAR>(value);
            if (i % kVector == kVector - 1) put(values, room.all[lane()][i / kVector]);
        });
        const Index skipped = start - index * block, last = end - index * block;
        send(skipped < 0 ? 0 : int(skipped), last < here ? int(last) : here, room, out - skipped);
    }
}
