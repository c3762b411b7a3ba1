// csrc/optim/cuda_tile.h: one tile in the registers of a block. For .cu files alone.
//
// Apart from update_cuda.cu, so that the same steps serve a tile in host memory, in device memory
// and in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "optim/cuda_lanes.h"
#include "optim/moment_formats.h"
#include "optim/param_formats.h"
#include "optim/slice.h"

namespace trainstream::optim {

/// What holds a number of a format.
template <NumberFormat kFormat>
using CudaNumber = std::conditional_t<kFormat == NumberFormat::kFloat32, float, uint16_t>;

/// Where the numbers of one tile lie. What the formats do not use is null.
struct CudaTileStreams {
    const void* grad;
    void* weight;
    void* mirror;
    int16_t* remainder;
    float* master;
    void* exp_avg;
    void* exp_avg_sq;
};

/// A thread's 8 numbers of one stream.
template <typename Number>
struct CudaNumbers {
    static constexpr size_t kRun = CudaLanes::kRun;
    using Run = std::conditional_t<sizeof(Number) == 4, uint4, uint2>;

    alignas(16) Number x[CudaLanes::kWidth];

    /// Of a whole tile whose address is a multiple of sizeof(Run).
    __device__ void load_runs(const void* tile) {
#pragma unroll
        for (size_t run = 0; run < CudaLanes::kRuns; ++run) {
            *reinterpret_cast<Run*>(x + run * kRun) =
                static_cast<const Run*>(tile)[run * CudaLanes::kThreads + threadIdx.x];
        }
    }
    __device__ void store_runs(void* tile) const {
#pragma unroll
        for (size_t run = 0; run < CudaLanes::kRuns; ++run) {
            static_cast<Run*>(tile)[run * CudaLanes::kThreads + threadIdx.x] =
                *reinterpret_cast<const Run*>(x + run * kRun);
        }
    }

    /// Of the first `count` elements of a tile, at any address; the others are 0.
    __device__ void load_elements(const void* tile, size_t count) {
#pragma unroll
        for (size_t lane = 0; lane < CudaLanes::kWidth; ++lane) {
            const size_t place = CudaLanes::place_of(lane);
            x[lane] = place < count ? static_cast<const Number*>(tile)[place] : Number{};
        }
    }
    __device__ void store_elements(void* tile, size_t count) const {
#pragma unroll
        for (size_t lane = 0; lane < CudaLanes::kWidth; ++lane) {
            const size_t place = CudaLanes::place_of(lane);
            if (place < count) {
                static_cast<Number*>(tile)[place] = x[lane];
            }
        }
    }
};

/// A thread's share of a tile. Loading all before using any keeps the whole tile in flight: one
/// trip to host memory takes about as long as 100 KiB take to pass.
template <NumberFormat kParam, NumberFormat kGrad, NumberFormat kMoments>
class CudaTile {
    static constexpr bool kRemainder = kParam == NumberFormat::kBfloat16;
    static constexpr bool kMaster = kParam == NumberFormat::kFloat16;

public:
    static constexpr bool kChecked = kRemainder;

    /// All of a tile whose streams are aligned as CudaNumbers::load_runs() wants them.
    __device__ void load_whole(const CudaTileStreams& from) {
        visit_state(from, [](auto& numbers, const void* tile) { numbers.load_runs(tile); });
        grad_.load_runs(from.grad);
    }
    __device__ void store_whole(const CudaTileStreams& to) {
        visit_state(to, [](const auto& numbers, void* tile) { numbers.store_runs(tile); });
        if (to.mirror != nullptr) {
            weight_.store_runs(to.mirror);
        }
    }

    /// The first `count` elements of a tile, wherever it lies.
    __device__ void load_part(const CudaTileStreams& from, size_t count) {
        visit_state(from,
                    [=](auto& numbers, const void* tile) { numbers.load_elements(tile, count); });
        grad_.load_elements(from.grad, count);
    }
    __device__ void store_part(const CudaTileStreams& to, size_t count) {
        visit_state(to,
                    [=](const auto& numbers, void* tile) { numbers.store_elements(tile, count); });
        if (to.mirror != nullptr) {
            weight_.store_elements(to.mirror, count);
        }
    }

    /// This thread's part of the checksum of the first `count` weights.
    __device__ uint32_t checksum(size_t count) const {
        CudaLanes::Checksum sum;
        if constexpr (kChecked) {
            // An element behind the end counts as 0: after an update with eps = 0 it is NaN.
            const auto weight_of = [&](size_t lane) {
                return CudaLanes::place_of(lane) < count ? weight_.x[lane] : uint16_t{0};
            };
            sum.add(CudaLanes::each<CudaLanes::Halves>(weight_of), 0);
        }
        return sum.total();
    }

    /// One step of the rule, with the host kernels' own way of reading and writing each format.
    template <typename Rule>
    __device__ void update(const typename Rule::Scalars& scalars, uint32_t remainder_mask,
                           uint32_t draw_index, uint32_t draw_key) {
        TileParam own_param = {weight_.x, nullptr, nullptr, nullptr, remainder_mask};
        if constexpr (kRemainder) {
            own_param.remainder = reinterpret_cast<int16_t*>(remainder_.x);
        }
        if constexpr (kMaster) {
            own_param.master = master_.x;
        }
        ParamLanes<CudaLanes, kParam> params(own_param);
        const MomentLanes<CudaLanes, kMoments> moments(
            TileMoments{exp_avg_.x, exp_avg_sq_.x, draw_index, draw_key});
        CudaLanes::Floats p = params.load(0);
        CudaLanes::Floats m = moments.load_m(0);
        CudaLanes::Floats v = moments.load_v(0);
        Rule::apply(scalars, load_gradient<CudaLanes, kGrad>(grad_.x, 0), p, m, v);
        params.store(0, p);
        moments.store(0, m, v);
    }

private:
    struct Nothing {};

    /// Everything that is both read and written.
    template <typename Visit>
    __device__ void visit_state(const CudaTileStreams& streams, const Visit& visit) {
        visit(weight_, streams.weight);
        if constexpr (kRemainder) {
            visit(remainder_, streams.remainder);
        }
        if constexpr (kMaster) {
            visit(master_, streams.master);
        }
        visit(exp_avg_, streams.exp_avg);
        visit(exp_avg_sq_, streams.exp_avg_sq);
    }

    CudaNumbers<CudaNumber<kParam>> weight_;
    std::conditional_t<kRemainder, CudaNumbers<uint16_t>, Nothing> remainder_;
    std::conditional_t<kMaster, CudaNumbers<float>, Nothing> master_;
    CudaNumbers<CudaNumber<kMoments>> exp_avg_;
    CudaNumbers<CudaNumber<kMoments>> exp_avg_sq_;
    CudaNumbers<CudaNumber<kGrad>> grad_;
};

}  // namespace trainstream::optim
