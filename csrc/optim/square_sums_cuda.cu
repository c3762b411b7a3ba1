#include "optim/square_sums_cuda.h"

#include <cuda_runtime.h>

#include "device/cuda_context.h"
#include "optim/cuda_tile.h"
#include "optim/param_formats.h"
#include "optim/update.h"

namespace trainstream::optim {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kWarps = kThreads / 32;
constexpr unsigned kSums = 16;
constexpr unsigned kTilesPerWarp = 32 / kSums;
constexpr unsigned kGroup = CudaLanes::kWidth;
// Elements of a tile in shared memory at once, and a gap that gives both tiles their own banks.
constexpr unsigned kStep = 512;
constexpr unsigned kGap = kSums;
constexpr size_t kAdded = 1024;

template <NumberFormat kFormat>
struct Group {
    alignas(16) CudaNumber<kFormat> x[kGroup];
};

/// Elements [begin, begin + kStep) of a tile as floats; those from `count` on are 0, whose square
/// changes no sum. By one warp.
template <NumberFormat kFormat>
__device__ void stage(const CudaNumber<kFormat>* tile, size_t begin, size_t count, bool aligned,
                      float* staged) {
    for (unsigned place = threadIdx.x % 32 * kGroup; place < kStep; place += 32 * kGroup) {
        const size_t first = begin + place;
        Group<kFormat> group = {};
        if (aligned && first + kGroup <= count) {
            group = *reinterpret_cast<const Group<kFormat>*>(tile + first);
        } else {
            for (unsigned i = 0; i < kGroup; ++i) {
                group.x[i] = first + i < count ? tile[first + i] : CudaNumber<kFormat>{};
            }
        }
        load_gradient<CudaLanes, kFormat>(group.x, 0).store(staged + place);
    }
}

/// In the order of a tree, as the host does. Every NaN becomes the same one.
__device__ double combined(double sum) {
    for (unsigned half = kSums / 2; half > 0; half /= 2) {
        sum += __shfl_down_sync(0xFFFFFFFFU, sum, half, kSums);
    }
    return sum == sum ? sum : __longlong_as_double(0x7FF8000000000000);
}

/// A warp adds two tiles, since each has 16 sums that are one chain of additions each. The numbers
/// go through shared memory: loaded as they lie, read as the sums want them.
template <NumberFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    add_squares(const CudaNumber<kFormat>* grad, size_t count, bool aligned, double* tile_sums) {
    __shared__ alignas(16) float staged[kWarps][kTilesPerWarp][kStep + kGap];
    const unsigned warp = threadIdx.x / 32;
    const unsigned own_tile = threadIdx.x % 32 / kSums;
    const unsigned own_sum = threadIdx.x % kSums;
    const size_t first_tile = (size_t{blockIdx.x} * kWarps + warp) * kTilesPerWarp;
    double sum = 0;
    for (size_t begin = 0; begin < kTile; begin += kStep) {
        for (unsigned i = 0; i < kTilesPerWarp; ++i) {
            const size_t start = (first_tile + i) * kTile;
            const size_t rest = start < count ? count - start : 0;
            stage<kFormat>(grad + start, begin, rest < kTile ? rest : kTile, aligned,
                           staged[warp][i]);
        }
        __syncwarp();
        for (unsigned place = own_sum; place < kStep; place += kSums) {
            const double x = staged[warp][own_tile][place];
            sum = __fma_rn(x, x, sum);  // The product is exact, so fused or not is the same.
        }
        __syncwarp();
    }
    sum = combined(sum);
    const size_t tile = first_tile + own_tile;
    if (own_sum == 0 && tile * kTile < count) {
        tile_sums[tile] = sum;
    }
}

__global__ void __launch_bounds__(kThreads)
    add_in_order(const double* tile_sums, size_t tiles, double* total) {
    __shared__ double sums[kAdded];
    double sum = *total;
    for (size_t begin = 0; begin < tiles; begin += kAdded) {
        const size_t count = tiles - begin < kAdded ? tiles - begin : kAdded;
        for (size_t i = threadIdx.x; i < count; i += kThreads) {
            sums[i] = tile_sums[begin + i];
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            for (size_t i = 0; i < count; ++i) {
                sum += sums[i];
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        *total = sum;
    }
}

const void* kernel_of(NumberFormat format) {
    switch (format) {
        case NumberFormat::kBfloat16:
            return reinterpret_cast<const void*>(&add_squares<NumberFormat::kBfloat16>);
        case NumberFormat::kFloat16:
            return reinterpret_cast<const void*>(&add_squares<NumberFormat::kFloat16>);
        case NumberFormat::kFloat32:
            break;
    }
    return reinterpret_cast<const void*>(&add_squares<NumberFormat::kFloat32>);
}

}  // namespace

void tile_square_sums_cuda(NumberFormat format, const void* grad, size_t count, double* tile_sums,
                           void* stream) {
    if (count == 0) {
        return;
    }
    bool aligned = reinterpret_cast<uintptr_t>(grad) % 16 == 0;
    constexpr size_t kTilesPerBlock = kWarps * kTilesPerWarp;
    const size_t blocks = (tile_count(count) + kTilesPerBlock - 1) / kTilesPerBlock;
    void* arguments[] = {&grad, &count, &aligned, &tile_sums};
    check_cuda("cudaLaunchKernel (squares of a gradient)",
               cudaLaunchKernel(kernel_of(format), dim3(static_cast<unsigned>(blocks)),
                                dim3(kThreads), arguments, 0, static_cast<cudaStream_t>(stream)));
}

void add_in_order_cuda(const double* tile_sums, size_t tiles, double* total, void* stream) {
    void* arguments[] = {&tile_sums, &tiles, &total};
    check_cuda("cudaLaunchKernel (sum of a gradient's tiles)",
               cudaLaunchKernel(reinterpret_cast<const void*>(&add_in_order), dim3(1),
                                dim3(kThreads), arguments, 0, static_cast<cudaStream_t>(stream)));
}

}  // namespace trainstream::optim
