#include "optim/reconcile_cuda.h"

#include <cuda_runtime.h>

#include "device/cuda_context.h"
#include "optim/checksum.h"
#include "optim/update.h"

namespace trainstream::optim {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kWarps = kThreads / 32;
// A warp reads its tiles' checksums with one access of a 32-byte sector.
constexpr unsigned kTilesPerWarp = 8;
constexpr unsigned kTilesPerBlock = kWarps * kTilesPerWarp;
constexpr unsigned kGroup = 8;  // Weights in 16 bytes.

struct Task {
    const uint16_t* weights;
    size_t count;
    uint32_t* checksums;
    uint16_t* host_weights;
    int16_t* remainder;
    bool aligned;  // All three arrays begin at a multiple of 16 bytes.
};

struct Group {
    alignas(16) uint16_t x[kGroup];
};

__device__ uint32_t product(uint16_t weight, int factor) {
    return static_cast<uint32_t>(static_cast<int16_t>(weight) * factor);
}

/// By one warp; every lane gets the sum.
__device__ uint32_t tile_checksum(const uint16_t* tile, size_t count, bool whole,
                                  const int* factors) {
    const unsigned lane = threadIdx.x % 32;
    uint32_t sum = 0;
    if (whole) {
#pragma unroll
        for (unsigned place = lane * kGroup; place < kTile; place += 32 * kGroup) {
            const Group group = *reinterpret_cast<const Group*>(tile + place);
#pragma unroll
            for (unsigned i = 0; i < kGroup; ++i) {
                sum += product(group.x[i], factors[place + i]);
            }
        }
    } else {
        for (size_t place = lane; place < count; place += 32) {
            sum += product(tile[place], factors[place]);
        }
    }
    for (unsigned distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFU, sum, distance);
    }
    return sum;
}

/// By one warp.
__device__ void follow(const Task& task, size_t begin, size_t count, bool whole) {
    const unsigned lane = threadIdx.x % 32;
    const size_t step = whole ? kGroup : 1;
    for (size_t i = begin + lane * step; i < begin + count; i += 32 * step) {
        if (whole) {
            if (task.host_weights != nullptr) {
                *reinterpret_cast<Group*>(task.host_weights + i) =
                    *reinterpret_cast<const Group*>(task.weights + i);
            }
            *reinterpret_cast<Group*>(task.remainder + i) = Group{};
        } else {
            if (task.host_weights != nullptr) {
                task.host_weights[i] = task.weights[i];
            }
            task.remainder[i] = 0;
        }
    }
}

__global__ void __launch_bounds__(kThreads) reconcile(const __grid_constant__ Task task) {
    // As int: a load and a multiplication for each weight, with nothing to unpack.
    __shared__ alignas(16) int factors[kTile];
    const unsigned lane = threadIdx.x % 32;
    const size_t tiles = (task.count + kTile - 1) / kTile;
    const size_t first = (size_t{blockIdx.x} * kWarps + threadIdx.x / 32) * kTilesPerWarp;
    // Asked for before anything else: it may have to come over the link.
    const bool has_tile = lane < kTilesPerWarp && first + lane < tiles;
    const uint32_t lane_known = has_tile ? task.checksums[first + lane] : 0;
    for (unsigned place = threadIdx.x; place < kTile; place += kThreads) {
        factors[place] = checksum_factor(place);
    }
    __syncthreads();
    for (unsigned i = 0; i < kTilesPerWarp && first + i < tiles; ++i) {
        const size_t begin = (first + i) * kTile;
        const size_t count = task.count - begin < kTile ? task.count - begin : kTile;
        const bool whole = task.aligned && count == kTile;
        const uint32_t sum = tile_checksum(task.weights + begin, count, whole, factors);
        if (sum == __shfl_sync(0xFFFFFFFFU, lane_known, static_cast<int>(i))) {
            continue;
        }
        follow(task, begin, count, whole);
        if (lane == 0) {
            task.checksums[first + i] = sum;
        }
    }
}

bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

}  // namespace

void reconcile_cuda(const uint16_t* device_weights, size_t count, uint32_t* checksums,
                    uint16_t* host_weights, int16_t* remainder, void* stream) {
    if (count == 0) {
        return;
    }
    const bool aligned =
        is_aligned(device_weights) && is_aligned(host_weights) && is_aligned(remainder);
    Task task = {device_weights, count, checksums, host_weights, remainder, aligned};
    void* arguments[] = {&task};
    const size_t blocks = (tile_count(count) + kTilesPerBlock - 1) / kTilesPerBlock;
    check_cuda("cudaLaunchKernel (weights changed from outside)",
               cudaLaunchKernel(reinterpret_cast<const void*>(&reconcile),
                                dim3(static_cast<unsigned>(blocks)), dim3(kThreads), arguments, 0,
                                static_cast<cudaStream_t>(stream)));
}

}  // namespace trainstream::optim
