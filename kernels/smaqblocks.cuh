// Encodes a SmaQ block to bytes in shared memory, and decodes them. actbench/ops/smaq/format.py has the layout,
// reference.py the meaning of a code. Needs groups.cuh and outliers.cuh.

constexpr int kHeader = 8, kMost = TILES * kTile;
constexpr int kHuge = 253 << 23;  // the bits of 2^126
constexpr unsigned kNanHalf = 0x7fc0;

struct Form {
    int main_bits, outlier_bits, outliers, block;
    __device__ __forceinline__ int rest_bits() const { return outlier_bits - main_bits; }
    __device__ __forceinline__ int main_steps() const { return (1 << (main_bits - 2)) - 1; }
    __device__ __forceinline__ int tail_steps() const { return (1 << (outlier_bits - 2)) - 1; }
    __device__ __forceinline__ int outliers_of(int count) const { return count * outliers / block; }
    __device__ __forceinline__ int rest_start(int count) const { return kHeader + (count + 7) / 8 * main_bits; }
    __device__ __forceinline__ int bytes_of(int count) const {
        return rest_start(count) + (outliers_of((count + 7) / 8 * 8) * rest_bits() + 7) / 8;
    }
};

struct alignas(16) Shared {
    unsigned char bytes[kMost + 16];  // of a block
    unsigned char rests[kMost];       // high bits of the outliers' codes, one by one
};

// ---- Moves bytes between shared and global memory, in the widest units that both allow.

template <class Unit>
__device__ __forceinline__ void move_as(const unsigned char* from, unsigned char* to, int size) {
    const int units = size / int(sizeof(Unit));
#pragma unroll 1
    for (int i = lane(); i < units; i += kLanes) reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
    for (int i = units * sizeof(Unit) + lane(); i < size; i += kLanes) to[i] = from[i];
}

__device__ __forceinline__ void move(const unsigned char* from, unsigned char* to, int size) {
    const Word places = reinterpret_cast<Word>(from) | reinterpret_cast<Word>(to);
    if (places % 16 == 0) move_as<Bytes16>(from, to, size);
    else if (places % 4 == 0) move_as<unsigned>(from, to, size);
    else move_as<unsigned char>(from, to, size);
}

__device__ __forceinline__ void store_header(Shared& shared, unsigned mean, unsigned main_end, unsigned start, unsigned end) {
    if (lane() != 0) return;
    reinterpret_cast<unsigned*>(shared.bytes)[0] = mean | main_end << 16;
    reinterpret_cast<unsigned*>(shared.bytes)[1] = start | end << 16;
}

// ---- Encoding.

struct Slopes {
    unsigned top, last;
    float main, start, tail;
    __device__ __forceinline__ Slopes(const Form& form, const Parted& parted) {
        top = form.main_steps() << 16, last = form.tail_steps() << 16;
        start = wide(parted.tail_start);
        const float span = difference(wide(parted.tail_end), start);
        main = quotient(float(top), wide(parted.main_end));
        tail = above(span, 0) ? quotient(float(last), span) : 0;
    }
    // A code with all its bits, but for the tag of an outlier.
    __device__ __forceinline__ unsigned code(float distance, bool negative, bool outlier, unsigned noise, int sign_bit) const {
        const unsigned most = outlier ? last : top;
        const unsigned place = nearest_count(product(outlier ? difference(distance, start) : distance, outlier ? tail : main));
        const unsigned cut = place < most ? place : most;
        if (outlier) return (cut + noise) >> 16 | unsigned(negative) << sign_bit;
        return ((negative ? top - cut : top + cut) + noise) >> 16;
    }
};

// Writes codes to shared memory, and the high bits of outlier codes one by one.
__device__ __forceinline__ void store_codes_of(
    const Elements& elements, const Parted& parted, const Form& form, Word state, Index first, bool stochastic, Shared& shared) {
    const Slopes slopes(form, parted);
    const unsigned tag = 1u << (form.main_bits - 1);
    int before = 0;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int element = tile * kTile + 8 * lane(), mine = __popc(eight_of(parted.outliers, tile));
        int rank = before + counted<8>(mine, lanes_before());
        before += counted<8>(mine, ~0u);
        if (eight_of(elements.there, tile) == 0) continue;
        Word noise[2] = {kNearest, kNearest};
        if (stochastic) {
            noise[0] = random_word(state, (first + element) / 4);
            noise[1] = random_word(state, (first + element) / 4 + 1);
        }
        unsigned codes[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const bool outlier = has(parted.outliers, tile, i);
            const unsigned lanes = unsigned(noise[i / 4] >> (16 * (i % 4)) & 0xffff);
            const bool negative = has(elements.negative, tile, i);
            const unsigned code = slopes.code(elements.values[tile][i], negative, outlier, lanes, form.outlier_bits - 2);
            codes[i] = has(elements.there, tile, i) ? outlier ? tag | (code & (tag - 1)) : code : 0;
            if (outlier) shared.rests[rank++] = static_cast<unsigned char>(code >> (form.main_bits - 1));
        }
        const Word eight = packed_codes(codes, form.main_bits);
        unsigned char* target = shared.bytes + kHeader + element / 8 * form.main_bits;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < form.main_bits) target[i] = static_cast<unsigned char>(eight >> (8 * i));
    }
}

// Packs the high bits of `found` outlier codes, eight a lane.
__device__ __forceinline__ void store_rests(const Form& form, int found, int start, int size, Shared& shared) {
    const int bits = form.rest_bits();
    if (bits == 0) return;
    for (int group = lane(); start + group * bits < size; group += kLanes) {
        Word eight = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (8 * group + i < found) eight |= Word(shared.rests[8 * group + i]) << (i * bits);
        for (int i = 0; i < bits && start + group * bits + i < size; ++i)
            shared.bytes[start + group * bits + i] = static_cast<unsigned char>(eight >> (8 * i));
    }
}

// Makes the bytes of a block of `here` elements, whose first is number `first` of the tensor. The warp must synchronise
// before it reads them.
__device__ __forceinline__ void make_bytes(
    Elements& elements, const Form& form, int here, Word state, Index first, bool stochastic, Shared& shared) {
    const int wanted = form.outliers_of(here), bytes = form.bytes_of(here), most = elements.most();
    if (most >= kHuge) {
        for (int i = kHeader + lane(); i < bytes; i += kLanes) shared.bytes[i] = 0;
        store_header(shared, kNanHalf, kNanHalf, kNanHalf, kNanHalf);
        return;
    }
    const unsigned mean = elements.mean(most, here);
    elements.subtract(wide(mean));
    const Parted parted(elements, elements.most(), here, wanted);
    store_header(shared, mean, parted.main_end, parted.tail_start, parted.tail_end);
    store_codes_of(elements, parted, form, state, first, stochastic, shared);
    __syncwarp();
    store_rests(form, wanted, form.rest_start(here), bytes, shared);
}

// ---- Decoding.

struct Levels {
    int steps, tail_steps;
    float mean, step, start, tail_step;
    __device__ __forceinline__ Levels(const Form& form, const Shared& shared) {
        const unsigned* header = reinterpret_cast<const unsigned*>(shared.bytes);
        steps = form.main_steps(), tail_steps = form.tail_steps();
        mean = wide(header[0]), start = wide(header[1]);
        step = quotient(wide(header[0] >> 16), float(steps));
        tail_step = quotient(difference(wide(header[1] >> 16), start), float(tail_steps));
    }
    __device__ __forceinline__ float main(int code) const { return sum(product(float(code - steps), step), mean); }
    __device__ __forceinline__ float tail(int code) const {
        const float distance = sum(product(float(code & tail_steps), tail_step), start);
        return sum(__uint_as_float(__float_as_uint(distance) | unsigned(code > tail_steps) << 31), mean);
    }
};

// A lane's eight numbers of a tile, in a block with room for `here`. `before` counts the outliers of earlier tiles;
// this tile's are added.
__device__ __forceinline__ void read_eight(
    const Form& form, const Levels& levels, const Shared& shared, int tile, int here, int& before, float (&values)[8]) {
    const int element = tile * kTile + 8 * lane(), more = form.rest_bits();
    const unsigned tag = 1u << (form.main_bits - 1);
    Word eight = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < form.main_bits && element < here)
            eight |= Word(shared.bytes[kHeader + element / 8 * form.main_bits + i]) << (8 * i);
    const unsigned halves[2] = {unsigned(eight), unsigned(eight >> (4 * form.main_bits))};
    unsigned tags = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) tags |= (halves[i / 4] >> (i % 4 * form.main_bits + form.main_bits - 1) & 1) << i;
    const int mine = __popc(tags);
    unsigned bit = 8 * form.rest_start(here) + (before + counted<8>(mine, lanes_before())) * more;  // of the rests
    before += counted<8>(mine, ~0u);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const unsigned low = halves[i / 4] >> (i % 4 * form.main_bits) & (tag - 1);
        values[i] = levels.main(low);
        if (tags >> i & 1) {
            const unsigned two = shared.bytes[bit / 8] | shared.bytes[bit / 8 + 1] << 8;
            values[i] = levels.tail(low | (two >> bit % 8 & ((1u << more) - 1)) * tag);
            bit += more;
        }
    }
}
