#include "optim/update_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "base/assert.h"
#include "device/cuda_context.h"
#include "optim/bulk_copy.h"
#include "optim/cuda_tile.h"
#include "optim/update.h"

namespace trainstream::optim {
namespace {

using Format = NumberFormat;
using Rule = AdamW;

constexpr unsigned kThreads = CudaLanes::kThreads;
constexpr unsigned kWarps = kThreads / 32;

/// What a launch is told.
struct Task {
    Slice slice;
    Rule::Scalars scalars;
    RoundingKey key;
    bool aligned;  // Every stream begins at a multiple of 16 bytes.
};

/// The address of element `i`; null stays null.
template <Format kFormat, typename Void>
__device__ Void* at(Void* numbers, size_t i) {
    constexpr size_t kBytes = sizeof(CudaNumber<kFormat>);
    const auto address = reinterpret_cast<uintptr_t>(numbers);
    return numbers == nullptr ? nullptr : reinterpret_cast<Void*>(address + i * kBytes);
}

template <Format kParam, Format kGrad, Format kMoments>
__device__ CudaTileStreams streams_at(const Slice& slice, size_t tile) {
    const size_t i = tile * kTile;
    return {
        .grad = at<kGrad>(slice.grad, i),
        .weight = at<kParam>(slice.weight, i),
        .mirror = at<kParam>(slice.weight_mirror, i),
        .remainder = slice.remainder == nullptr ? nullptr : slice.remainder + i,
        .master = slice.master == nullptr ? nullptr : slice.master + i,
        .exp_avg = at<kMoments>(slice.exp_avg, i),
        .exp_avg_sq = at<kMoments>(slice.exp_avg_sq, i),
    };
}

/// Adds a number of every thread of the block, for one use a tile. Two of them alternate, so that
/// none is written before everyone has read it.
struct BlockSum {
    uint32_t warps[kWarps];

    __device__ uint32_t operator()(uint32_t value) {
#pragma unroll
        for (unsigned distance = 16; distance > 0; distance /= 2) {
            value += __shfl_xor_sync(0xFFFFFFFFU, value, distance);
        }
        if (threadIdx.x % 32 == 0) {
            warps[threadIdx.x / 32] = value;
        }
        __syncthreads();
        uint32_t sum = 0;
#pragma unroll
        for (const uint32_t warp : warps) {
            sum += warp;
        }
        return sum;
    }
};

/// What the threads of a block tell each other about a tile's checksum.
struct ChecksumBoard {
    BlockSum before;
    BlockSum after;
    uint32_t known;  // The table's; read over the link by one thread.
};

/// One tile, once its numbers are in registers: `registers` has been loaded from it.
template <typename Registers>
__device__ void update_registers(const Task& task, size_t tile, size_t count, uint32_t known,
                                 Registers& registers, ChecksumBoard& board) {
    uint32_t remainder_mask = UINT32_MAX;
    if constexpr (Registers::kChecked) {
        if (threadIdx.x == 0) {
            board.known = known;
        }
        const uint32_t sum = board.before(registers.checksum(count));
        remainder_mask = sum == board.known ? UINT32_MAX : 0;
    }
    const uint64_t index = task.slice.first + tile * kTile;
    registers.template update<Rule>(task.scalars, remainder_mask, static_cast<uint32_t>(index),
                                    draw_key(task.key, index));
    if constexpr (Registers::kChecked) {
        const uint32_t sum = board.after(registers.checksum(count));
        if (threadIdx.x == 0) {
            task.slice.checksums[tile] = sum;
        }
    }
}

template <typename Registers>
__device__ uint32_t known_checksum(const Task& task, size_t tile) {
    return Registers::kChecked && threadIdx.x == 0 ? task.slice.checksums[tile] : 0;
}

__device__ size_t count_in(const Slice& slice, size_t tile) {
    const size_t rest = slice.count - tile * kTile;
    return rest < kTile ? rest : kTile;
}

template <Format kParam, Format kGrad, Format kMoments>
__device__ void update_in_place(const Task& task, size_t tile, ChecksumBoard& board) {
    using Registers = CudaTile<kParam, kGrad, kMoments>;
    const CudaTileStreams streams = streams_at<kParam, kGrad, kMoments>(task.slice, tile);
    const size_t count = count_in(task.slice, tile);
    const uint32_t known = known_checksum<Registers>(task, tile);
    Registers registers;
    if (task.aligned && count == kTile) {
        registers.load_whole(streams);
        update_registers(task, tile, kTile, known, registers, board);
        registers.store_whole(streams);
    } else {
        registers.load_part(streams, count);
        update_registers(task, tile, count, known, registers, board);
        registers.store_part(streams, count);
    }
}

template <Format kParam, Format kGrad, Format kMoments>
__global__ void __launch_bounds__(kThreads, 2) update_direct(const __grid_constant__ Task task) {
    __shared__ ChecksumBoard board;
    for (size_t tile = blockIdx.x; tile * kTile < task.slice.count; tile += gridDim.x) {
        update_in_place<kParam, kGrad, kMoments>(task, tile, board);
    }
}

/// The tiles of one block in shared memory: kAhead are coming, one is worked on, the others leave.
template <Format kParam, Format kGrad, Format kMoments>
struct Stages {
    static constexpr unsigned kStages = 4;

    static constexpr uint32_t kWeightBytes = kTile * sizeof(CudaNumber<kParam>);
    static constexpr uint32_t kMomentBytes = kTile * sizeof(CudaNumber<kMoments>);
    static constexpr uint32_t kGradBytes = kTile * sizeof(CudaNumber<kGrad>);
    static constexpr uint32_t kRemainderBytes = kParam == Format::kBfloat16 ? kTile * 2 : 0;
    static constexpr uint32_t kMasterBytes = kParam == Format::kFloat16 ? kTile * 4 : 0;
    static constexpr uint32_t kStageBytes =
        kWeightBytes + kRemainderBytes + kMasterBytes + 2 * kMomentBytes + kGradBytes;
    static constexpr uint32_t kAllBytes = kStages * kStageBytes;

#if defined(__CUDA_ARCH__) && TS_HAS_BULK_COPY
    static constexpr unsigned kAhead = 2;
    uint8_t* memory;
    BulkBarrier* full;  // One a stage.

    __device__ CudaTileStreams streams(unsigned stage) const {
        uint8_t* next = memory + stage * kStageBytes;
        const auto take = [&](uint32_t size_bytes) {
            uint8_t* const taken = next;
            next += size_bytes;
            return static_cast<void*>(taken);
        };
        CudaTileStreams streams = {};
        streams.weight = take(kWeightBytes);
        streams.remainder = static_cast<int16_t*>(take(kRemainderBytes));
        streams.master = static_cast<float*>(take(kMasterBytes));
        streams.exp_avg = take(kMomentBytes);
        streams.exp_avg_sq = take(kMomentBytes);
        streams.grad = take(kGradBytes);
        return streams;
    }

    /// By one thread.
    __device__ void fetch(unsigned stage, const CudaTileStreams& from) const {
        const CudaTileStreams to = streams(stage);
        BulkBarrier& barrier = full[stage];
        barrier.expect(kStageBytes);
        bulk_copy_in(to.weight, from.weight, kWeightBytes, barrier);
        if constexpr (kRemainderBytes != 0) {
            bulk_copy_in(to.remainder, from.remainder, kRemainderBytes, barrier);
        }
        if constexpr (kMasterBytes != 0) {
            bulk_copy_in(to.master, from.master, kMasterBytes, barrier);
        }
        bulk_copy_in(to.exp_avg, from.exp_avg, kMomentBytes, barrier);
        bulk_copy_in(to.exp_avg_sq, from.exp_avg_sq, kMomentBytes, barrier);
        bulk_copy_in(const_cast<void*>(to.grad), from.grad, kGradBytes, barrier);
    }

    /// By the same thread, after the block has met.
    __device__ void give_back(unsigned stage, const CudaTileStreams& to) const {
        const CudaTileStreams from = streams(stage);
        bulk_copy_out(to.weight, from.weight, kWeightBytes);
        if (to.mirror != nullptr) {
            bulk_copy_out(to.mirror, from.weight, kWeightBytes);
        }
        if constexpr (kRemainderBytes != 0) {
            bulk_copy_out(to.remainder, from.remainder, kRemainderBytes);
        }
        if constexpr (kMasterBytes != 0) {
            bulk_copy_out(to.master, from.master, kMasterBytes);
        }
        bulk_copy_out(to.exp_avg, from.exp_avg, kMomentBytes);
        bulk_copy_out(to.exp_avg_sq, from.exp_avg_sq, kMomentBytes);
        bulk_end_group();
    }
#endif
};

#if defined(__CUDA_ARCH__) && TS_HAS_BULK_COPY
/// The whole tiles of a slice whose streams are aligned.
template <Format kParam, Format kGrad, Format kMoments>
__device__ void update_whole_tiles(const Task& task, uint8_t* memory, ChecksumBoard& board) {
    using Registers = CudaTile<kParam, kGrad, kMoments>;
    using Ring = Stages<kParam, kGrad, kMoments>;
    __shared__ BulkBarrier full[Ring::kStages];
    const Ring ring = {memory, full};
    const size_t tiles = task.slice.count / kTile;
    const auto streams_of = [&](size_t tile) {
        return streams_at<kParam, kGrad, kMoments>(task.slice, tile);
    };
    const auto fetch = [&](unsigned turn) {  // The block's tile number `turn`, if it has so many.
        const size_t tile = blockIdx.x + size_t{turn} * gridDim.x;
        if (tile < tiles) {
            ring.fetch(turn % Ring::kStages, streams_of(tile));
        }
    };
    if (threadIdx.x == 0) {
        for (BulkBarrier& barrier : full) {
            barrier.start();
        }
        for (unsigned turn = 0; turn < Ring::kAhead; ++turn) {
            fetch(turn);
        }
    }
    __syncthreads();
    unsigned turn = 0;
    for (size_t tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
        const unsigned stage = turn % Ring::kStages;
        const uint32_t known = known_checksum<Registers>(task, tile);
        if (threadIdx.x == 0) {
            // The stage it goes to was given back kStages - kAhead turns ago, kStages - kAhead - 1
            // groups lie after that one.
            bulk_wait_read<Ring::kStages - Ring::kAhead - 1>();
            fetch(turn + Ring::kAhead);
        }
        full[stage].wait(turn / Ring::kStages % 2);
        Registers registers;
        registers.load_whole(ring.streams(stage));
        update_registers(task, tile, kTile, known, registers, board);
        registers.store_whole(ring.streams(stage));
        bulk_show_writes();
        __syncthreads();
        if (threadIdx.x == 0) {
            ring.give_back(stage, streams_of(tile));
        }
    }
    if (threadIdx.x == 0) {
        bulk_wait_written();
    }
}
#endif

template <Format kParam, Format kGrad, Format kMoments>
__global__ void __launch_bounds__(kThreads, 2) update_bulk(const __grid_constant__ Task task) {
    __shared__ ChecksumBoard board;
    size_t first_in_place = 0;
#if defined(__CUDA_ARCH__) && TS_HAS_BULK_COPY
    extern __shared__ __align__(128) uint8_t memory[];
    if (task.aligned) {
        update_whole_tiles<kParam, kGrad, kMoments>(task, memory, board);
        first_in_place = task.slice.count / kTile;
    }
#endif
    for (size_t tile = first_in_place + blockIdx.x; tile * kTile < task.slice.count;
         tile += gridDim.x) {
        update_in_place<kParam, kGrad, kMoments>(task, tile, board);
    }
}

struct Kernel {
    const void* function;
    size_t shared_bytes;
};

template <Format kParam, Format kGrad, Format kMoments>
Kernel kernel_of(CudaForm form) {
    if (form == CudaForm::kDirect) {
        return {reinterpret_cast<const void*>(&update_direct<kParam, kGrad, kMoments>), 0};
    }
    return {reinterpret_cast<const void*>(&update_bulk<kParam, kGrad, kMoments>),
            Stages<kParam, kGrad, kMoments>::kAllBytes};
}

template <Format kParam, Format kGrad>
Kernel kernel_of(Format moments, CudaForm form) {
    return moments == Format::kFloat32 ? kernel_of<kParam, kGrad, Format::kFloat32>(form)
                                       : kernel_of<kParam, kGrad, Format::kBfloat16>(form);
}

template <Format kParam>
Kernel kernel_of(Format grad, Format moments, CudaForm form) {
    switch (grad) {
        case Format::kBfloat16:
            return kernel_of<kParam, Format::kBfloat16>(moments, form);
        case Format::kFloat16:
            return kernel_of<kParam, Format::kFloat16>(moments, form);
        case Format::kFloat32:
            break;
    }
    return kernel_of<kParam, Format::kFloat32>(moments, form);
}

Kernel kernel_of(Formats formats, CudaForm form) {
    switch (formats.param) {
        case Format::kBfloat16:
            return kernel_of<Format::kBfloat16>(formats.grad, formats.moments, form);
        case Format::kFloat16:
            return kernel_of<Format::kFloat16>(formats.grad, formats.moments, form);
        case Format::kFloat32:
            break;
    }
    return kernel_of<Format::kFloat32>(formats.grad, formats.moments, form);
}

bool is_aligned(const Slice& slice) {
    const void* const streams[] = {slice.grad,      slice.weight,    slice.weight_mirror,
                                   slice.master,    slice.remainder, slice.exp_avg,
                                   slice.exp_avg_sq};
    return std::all_of(std::begin(streams), std::end(streams), [](const void* stream) {
        return reinterpret_cast<uintptr_t>(stream) % 16 == 0;
    });
}

}  // namespace

void update_cuda(Formats formats, const Slice& slice, const AdamW::Scalars& scalars,
                 RoundingKey key, void* stream, const CudaLaunch& launch) {
    TS_ASSERT_EQ(slice.first % kTile, 0U);
    TS_ASSERT(formats.moments != NumberFormat::kFloat16);
    if (slice.count == 0) {
        return;
    }
    const Kernel kernel = kernel_of(formats, launch.form);
    if (kernel.shared_bytes > 0) {  // More than 48 KiB are had only when asked for.
        check_cuda(
            "cudaFuncSetAttribute",
            cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(kernel.shared_bytes)));
    }
    Task task = {slice, scalars, key, is_aligned(slice)};
    void* arguments[] = {&task};
    const auto blocks =
        static_cast<unsigned>(std::min<size_t>(launch.blocks, tile_count(slice.count)));
    check_cuda("cudaLaunchKernel (optimizer update)",
               cudaLaunchKernel(kernel.function, dim3(blocks), dim3(kThreads), arguments,
                                kernel.shared_bytes, static_cast<cudaStream_t>(stream)));
}

}  // namespace trainstream::optim
