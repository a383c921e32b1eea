// What host.h gives a meaning to and the kernels of the package do not use yet, each in a few lines.
#include "common.cuh"

// out[i]: the sum of the warp's values, by xor and by down shuffles.
KERNEL probe_sums(const float* x, float* by_xor, float* by_down) {
    float sum = x[threadIdx.x], down = sum;
    for (int flip = 16; flip > 0; flip /= 2) sum += __shfl_xor_sync(~0u, sum, flip);
    for (int by = 16; by > 0; by /= 2) {
        const float other = __shfl_down_sync(~0u, down, by);
        down += lane() + by < kLanes ? other : 0;
    }
    by_xor[threadIdx.x] = sum;
    by_down[threadIdx.x] = __shfl_sync(~0u, down, 0);
}

KERNEL probe_ballot(const float* x, unsigned* votes) { votes[threadIdx.x] = __ballot_sync(~0u, x[threadIdx.x] > 0); }

KERNEL probe_reversal(const float* x, float* out) {
    __shared__ float block[kThreads];
    const int last = kThreads - 1;
    const Index start = Index(blockIdx.x) * kThreads;
    block[threadIdx.x] = x[start + threadIdx.x];
    __syncthreads();
    out[start + threadIdx.x] = block[last - threadIdx.x];
}

KERNEL probe_deadlock(float* out) {
    if (threadIdx.x > 0) __syncthreads();
    out[0] = 1;
}

KERNEL probe_missing_barrier(const float* x, float* out) {
    __shared__ float block[kThreads];
    block[threadIdx.x] = x[threadIdx.x];
    out[threadIdx.x] = block[kThreads - 1 - threadIdx.x];
}

// out[32 * i + k]: number k of sequence first + i; behind them, what stands for it where nothing is random.
KERNEL probe_noise(float* out, Word state, unsigned first) {
    Noise noise(state, first + threadIdx.x, true), nearest(state, first + threadIdx.x, false);
    for (int k = 0; k < 32; ++k) {
        out[32 * threadIdx.x + k] = noise.next();
        out[32 * (blockDim.x + threadIdx.x) + k] = nearest.next();
    }
}
