// Runs CUDA kernels on the CPU: a block's threads are fibers of one thread, which change places only at barriers.
// Odd blocks run their threads last to first, so that a missing barrier shows in one of the two orders.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __shared__ static
#define KERNEL static void

struct Dim {
    unsigned x = 1, y = 1, z = 1;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace host {

constexpr unsigned kWarpSize = 32, kMostThreads = 1024, kStackBytes = 64 << 10;

struct Barrier {
    unsigned members = 0, waiting = 0, rounds = 0;
};
struct Warp {
    Barrier barrier;
    uint64_t values[kWarpSize];
};

static ucontext_t scheduler, fibers[kMostThreads];
static bool finished[kMostThreads];
static std::vector<char> stacks(size_t(kMostThreads) * kStackBytes);
static Barrier block;
static Warp warps[kMostThreads / kWarpSize];
static bool moved;  // since the scheduler's last look: nothing moves in a deadlock

inline Warp& warp() { return warps[threadIdx.x / kWarpSize]; }
inline unsigned lane() { return threadIdx.x % kWarpSize; }

inline void wait(Barrier& barrier) {
    const unsigned round = barrier.rounds, me = threadIdx.x;
    moved = true;
    if (++barrier.waiting == barrier.members) {
        barrier.waiting = 0;
        ++barrier.rounds;
    }
    while (barrier.rounds == round) swapcontext(&fibers[me], &scheduler);
}

// A value from every lane of the warp, read by each before any of them goes on.
template <class Value, class Read>
auto exchange(Value value, Read read) {
    static_assert(sizeof(Value) <= 8);
    Warp& mine = warp();
    mine.values[lane()] = 0;
    std::memcpy(&mine.values[lane()], &value, sizeof value);
    wait(mine.barrier);
    const auto result = read([&mine](unsigned from) {
        Value other;
        std::memcpy(&other, &mine.values[from], sizeof other);
        return other;
    });
    wait(mine.barrier);
    return result;
}

template <class Body>
struct Launch {
    static Body* body;
    static void run() {
        (*body)();
        finished[threadIdx.x] = moved = true;
    }
};
template <class Body>
Body* Launch<Body>::body = nullptr;

// Runs one block; returns whether all of its threads came to their end.
template <class Body>
bool run_block(Body& body) {
    const unsigned threads = blockDim.x;
    Launch<Body>::body = &body;
    block = Barrier{threads};
    for (unsigned first = 0; first < threads; first += kWarpSize)
        warps[first / kWarpSize].barrier = Barrier{threads - first < kWarpSize ? threads - first : kWarpSize};
    for (unsigned thread = 0; thread < threads; ++thread) {
        getcontext(&fibers[thread]);
        fibers[thread].uc_stack.ss_sp = &stacks[size_t(thread) * kStackBytes];
        fibers[thread].uc_stack.ss_size = kStackBytes;
        fibers[thread].uc_link = &scheduler;
        makecontext(&fibers[thread], Launch<Body>::run, 0);
        finished[thread] = false;
    }
    unsigned left = threads;
    do {
        moved = false;
        left = threads;
        for (unsigned turn = 0; turn < threads; ++turn) {
            const unsigned thread = blockIdx.x % 2 ? threads - 1 - turn : turn;
            threadIdx.x = thread;
            if (!finished[thread]) swapcontext(&scheduler, &fibers[thread]);
            left -= finished[thread];
        }
    } while (left && moved);
    return left == 0;
}

template <class... Arguments, size_t... i>
bool run_grid(void (*kernel)(Arguments...), unsigned grid, unsigned threads, void** values, std::index_sequence<i...>) {
    gridDim.x = grid;
    blockDim.x = threads;
    auto body = [&] { kernel(*static_cast<Arguments*>(values[i])...); };
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        if (!run_block(body)) return false;
    return true;
}

// Arguments as cuLaunchKernel takes them, a pointer to each, and their sizes, which the driver does not ask for.
// Returns what is wrong, or null.
template <class... Arguments>
const char* launch(
    void (*kernel)(Arguments...), unsigned grid, unsigned threads, unsigned count, void** values, const size_t* sizes) {
    const size_t expected[] = {sizeof(Arguments)...};
    if (count != sizeof...(Arguments)) return "a wrong number of arguments";
    if (std::memcmp(sizes, expected, sizeof expected) != 0) return "an argument of a wrong size";
    const bool ended = run_grid(kernel, grid, threads, values, std::index_sequence_for<Arguments...>{});
    return ended ? nullptr : "some threads wait for ever at a barrier";
}

}  // namespace host

inline void __syncthreads() { host::wait(host::block); }
inline void __syncwarp(unsigned = ~0u) { host::wait(host::warp().barrier); }

template <class Value>
Value __shfl_sync(unsigned, Value value, int from, int width = 32) {
    const unsigned start = host::lane() / width * width;
    return host::exchange(value, [=](auto of) { return of(start + from % width); });
}
template <class Value>
Value __shfl_xor_sync(unsigned mask, Value value, int flip, int width = 32) {
    return __shfl_sync(mask, value, host::lane() % width ^ flip, width);
}
template <class Value>
Value __shfl_down_sync(unsigned mask, Value value, unsigned by, int width = 32) {
    const unsigned from = host::lane() % width + by;
    return __shfl_sync(mask, value, from < unsigned(width) ? from : host::lane() % width, width);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
    return host::exchange(vote, [](auto of) {
        unsigned votes = 0;
        for (unsigned i = 0; i < host::warp().barrier.members; ++i) votes |= unsigned(of(i)) << i;
        return votes;
    });
}

inline unsigned atomicOr(unsigned* place, unsigned bits) {  // threads change places only at barriers
    const unsigned before = *place;
    *place |= bits;
    return before;
}

inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline bool __any_sync(unsigned, bool vote) { return __ballot_sync(~0u, vote) != 0; }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = uint64_t(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return unsigned((uint64_t(high) << 32 | low) >> (by & 31));
}
inline unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) result |= (x >> i & 1) << (31 - i);
    return result;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }

template <class To, class From>
To bits_as(From value) {
    To result;
    static_assert(sizeof result == sizeof value);
    std::memcpy(&result, &value, sizeof result);
    return result;
}
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }

// ---- What kernels/common.cuh writes as instructions.

inline unsigned above(float x, float bound) { return x > bound; }
inline float product(float a, float b) { return a * b; }
inline float quotient(float a, float b) { return a / b; }

inline float half_to_float(unsigned short bits) {
    const unsigned magnitude = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
    if (magnitude < 0x400) return (sign ? -1.0f : 1.0f) * float(magnitude) * 0x1p-24f;
    const unsigned exponent_shift = magnitude >= 0x7c00 ? 224u << 23 : 112u << 23;
    return __uint_as_float(sign | ((magnitude << 13) + exponent_shift));
}

inline unsigned short float_to_half(float wide) {
    const unsigned sign = __float_as_uint(wide) >> 16 & 0x8000u, magnitude = __float_as_uint(wide) & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;    // the one NaN that the device makes
    if (magnitude >= 0x477ff000u) return sign | 0x7c00;  // 65520 and more
    if (magnitude < 113u << 23)  // below 2^-14: the last bit of 0.5 + x stands for 2^-24, and rounds there
        return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u);
    return sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13);
}

inline unsigned floats_to_halves(float low, float high) { return float_to_half(low) | unsigned(float_to_half(high)) << 16; }

// A byte of the result is one of the eight of high and low, or 255 times its highest bit where the selector has an 8.
inline unsigned permuted(unsigned low, unsigned high, unsigned selector) {
    const uint64_t source = uint64_t(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned nibble = selector >> 4 * i & 15, byte = source >> 8 * (nibble & 7) & 255;
        result |= (nibble & 8 ? byte >> 7 ? 255 : 0 : byte) << 8 * i;
    }
    return result;
}

inline void store16(void* target, unsigned a, unsigned b, unsigned c, unsigned d) {
    const unsigned words[] = {a, b, c, d};
    std::memcpy(target, words, sizeof words);
}

// ---- What kernels/search.cuh writes as instructions.

inline unsigned masks(bool low, bool high) { return (low ? 0xffff : 0) | (high ? 0xffff0000 : 0); }
inline unsigned halves_above(unsigned two, unsigned bounds) {
    return masks(half_to_float(two) > half_to_float(bounds), half_to_float(two >> 16) > half_to_float(bounds >> 16));
}
inline unsigned bfloats_above(unsigned two, unsigned bounds) {
    const unsigned high = 0xffff0000;
    return masks(
        __uint_as_float(two << 16) > __uint_as_float(bounds << 16),
        __uint_as_float(two & high) > __uint_as_float(bounds & high));
}

// ---- What kernels/groups.cuh writes as instructions.

inline float sum(float a, float b) { return a + b; }
inline float difference(float a, float b) { return a - b; }
inline float fused(float a, float b, float c) { return std::fma(a, b, c); }
inline float sum_down(float a, float b) {
    const double exact = double(a) + double(b);
    const float near = float(exact);
    return near > exact ? std::nextafter(near, -INFINITY) : near;
}
inline float least(float a, float b) { return a != a || b != b ? NAN : std::fmin(a, b); }
inline float most(float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); }
inline float lesser(float a, float b) { return std::fmin(a, b); }
inline float greater(float a, float b) { return std::fmax(a, b); }

// ---- What kernels/outliers.cuh and kernels/smaqblocks.cuh write as an instruction.

inline float magnitude(float x) { return std::fabs(x); }

inline unsigned masked_with(unsigned bits, unsigned mask, unsigned others) { return (bits & mask) | others; }
inline void take_tail(unsigned tag, unsigned code, float step, float start, float& distance, unsigned& signs) {
    if (tag == 0) return;
    const float far = sum(product(difference(__uint_as_float(code), 0x1p23f), step), start);
    distance = __uint_as_float(__float_as_uint(far) | (signs & 0x80000000u));
    signs <<= 1;
}

// ---- What kernels/smaqstep.cu writes as an instruction.

inline float root(float x) { return std::sqrt(x); }
