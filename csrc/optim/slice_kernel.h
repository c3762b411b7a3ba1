// csrc/optim/slice_kernel.h: the loops over a slice, for any rule, set of lanes and formats.
//
// For the kernel files alone: update_scalar.cpp, update_avx2.cpp, update_avx512.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/adamw.h"
#include "optim/checksum.h"
#include "optim/moment_formats.h"
#include "optim/param_formats.h"
#include "optim/rounding.h"
#include "optim/slice.h"

namespace trainstream::optim {

/// The address of element `i`; null stays null.
template <NumberFormat kFormat, typename Void>
static inline Void* address_of(Void* numbers, size_t i) {
    constexpr size_t kBytes = kFormat == NumberFormat::kFloat32 ? 4 : 2;
    const auto address = reinterpret_cast<uintptr_t>(numbers);
    return numbers == nullptr ? nullptr : reinterpret_cast<Void*>(address + i * kBytes);
}

/// Asks for the cache line that a loop at element `i` comes to 4 KiB later.
///
/// The hardware's prefetching starts anew at each page of 4 KiB and each tile. Asking took one core
/// from 0.81 to 1.05 of the read-modify-write rate (bf16 weights, fp32 moments) and from 0.97 to
/// 1.05 (fp32), and doubled the reading of bf16 gradients (bench/optim_bench.cpp, Xeon with
/// AVX-512). 2 KiB did nearly as well, but 4 KiB is a tile of bf16 weights, so the pass of the
/// checksum finds them too. Beyond an array's end it does nothing.
///
/// Always inline: gcc 12 takes a function that only prefetches for one without effect, and drops
/// the call.
template <NumberFormat kFormat>
[[gnu::always_inline]] static inline void prefetch(const void* numbers, size_t i) {
    constexpr size_t kAhead = 4096 / (kFormat == NumberFormat::kFloat32 ? 4 : 2);
    __builtin_prefetch(address_of<kFormat>(numbers, i + kAhead));
}

/// Vector: the lanes. One: a single lane compiled in the same file, for what is left of a tile.
template <typename Rule, typename Vector, typename One>
class SliceKernel {
public:
    static void update(Formats formats, const Slice& slice, const typename Rule::Scalars& scalars,
                       RoundingKey key) {
        switch (formats.param) {
            case NumberFormat::kFloat32:
                return update_param<NumberFormat::kFloat32>(formats, slice, scalars, key);
            case NumberFormat::kBfloat16:
                return update_param<NumberFormat::kBfloat16>(formats, slice, scalars, key);
            case NumberFormat::kFloat16:
                return update_param<NumberFormat::kFloat16>(formats, slice, scalars, key);
        }
    }

private:
    using Scalars = typename Rule::Scalars;
    using Format = NumberFormat;

    struct Tile {
        const void* grad;
        TileParam param;
        TileMoments moments;
    };

    template <Format kParam>
    static void update_param(Formats formats, const Slice& slice, const Scalars& scalars,
                             RoundingKey key) {
        switch (formats.grad) {
            case Format::kFloat32:
                return update_grad<kParam, Format::kFloat32>(formats, slice, scalars, key);
            case Format::kBfloat16:
                return update_grad<kParam, Format::kBfloat16>(formats, slice, scalars, key);
            case Format::kFloat16:
                return update_grad<kParam, Format::kFloat16>(formats, slice, scalars, key);
        }
    }

    template <Format kParam, Format kGrad>
    static void update_grad(Formats formats, const Slice& slice, const Scalars& scalars,
                            RoundingKey key) {
        if (formats.moments == Format::kFloat32) {
            update_tiles<kParam, kGrad, Format::kFloat32>(slice, scalars, key);
        } else {
            update_tiles<kParam, kGrad, Format::kBfloat16>(slice, scalars, key);
        }
    }

    template <Format kParam, Format kGrad, Format kMoments>
    static void update_tiles(const Slice& slice, const Scalars& scalars, RoundingKey key) {
        for (size_t begin = 0; begin < slice.count; begin += kTile) {
            const size_t count = slice.count - begin < kTile ? slice.count - begin : kTile;
            Tile tile = tile_at<kParam, kGrad, kMoments>(slice, begin, key);
            if constexpr (kParam == Format::kBfloat16) {
                const auto* weights = static_cast<const uint16_t*>(tile.param.weight);
                const bool untouched =
                    checksum_of(weights, count) == slice.checksums[begin / kTile];
                tile.param.remainder_mask = untouched ? UINT32_MAX : 0;
            }
            const size_t whole = count - count % Vector::kWidth;
            uint32_t sum = update_range<Vector, kParam, kGrad, kMoments>(tile, scalars, 0, whole);
            sum += update_range<One, kParam, kGrad, kMoments>(tile, scalars, whole, count);
            if constexpr (kParam == Format::kBfloat16) {
                slice.checksums[begin / kTile] = sum;
            }
        }
    }

    template <typename L, Format kParam, Format kGrad, Format kMoments>
    static uint32_t update_range(const Tile& tile, const Scalars& scalars, size_t begin,
                                 size_t end) {
        // Copies, which no store below can change as far as the compiler knows: they stay in
        // registers.
        const Scalars s = scalars;
        const void* const grad = tile.grad;
        ParamLanes<L, kParam> params(tile.param);
        const MomentLanes<L, kMoments> moments(tile.moments);
        for (size_t i = begin; i < end; i += L::kWidth) {
            if constexpr (L::kWidth > 1) {
                prefetch_tile<kParam, kGrad, kMoments>(tile, i);
            }
            typename L::Floats p = params.load(i);
            typename L::Floats m = moments.load_m(i);
            typename L::Floats v = moments.load_v(i);
            Rule::apply(s, load_gradient<L, kGrad>(grad, i), p, m, v);
            params.store(i, p);
            moments.store(i, m, v);
        }
        return params.checksum();
    }

    template <Format kParam, Format kGrad, Format kMoments>
    [[gnu::always_inline]] static void prefetch_tile(const Tile& tile, size_t i) {
        prefetch<kGrad>(tile.grad, i);
        prefetch<kParam>(tile.param.weight, i);
        if constexpr (kParam == Format::kBfloat16) {
            prefetch<Format::kBfloat16>(tile.param.remainder, i);
        } else if constexpr (kParam == Format::kFloat16) {
            prefetch<Format::kFloat32>(tile.param.master, i);
        }
        prefetch<kMoments>(tile.moments.exp_avg, i);
        prefetch<kMoments>(tile.moments.exp_avg_sq, i);
    }

    static uint32_t checksum_of(const uint16_t* weights, size_t count) {
        const size_t whole = count - count % Vector::kWidth;
        typename Vector::Checksum vector;
        for (size_t i = 0; i < whole; i += Vector::kWidth) {
            vector.add(Vector::Halves::load(weights + i), i);
        }
        typename One::Checksum rest;
        for (size_t i = whole; i < count; ++i) {
            rest.add(One::Halves::load(weights + i), i);
        }
        return vector.total() + rest.total();
    }

    template <Format kParam, Format kGrad, Format kMoments>
    static Tile tile_at(const Slice& slice, size_t begin, RoundingKey key) {
        const uint64_t index = slice.first + begin;
        return {
            .grad = address_of<kGrad>(slice.grad, begin),
            .param = {.weight = address_of<kParam>(slice.weight, begin),
                      .mirror = address_of<kParam>(slice.weight_mirror, begin),
                      .remainder = slice.remainder == nullptr ? nullptr : slice.remainder + begin,
                      .master = slice.master == nullptr ? nullptr : slice.master + begin,
                      .remainder_mask = 0},
            .moments = {.exp_avg = address_of<kMoments>(slice.exp_avg, begin),
                        .exp_avg_sq = address_of<kMoments>(slice.exp_avg_sq, begin),
                        .draw_index = static_cast<uint32_t>(index),
                        .draw_key = draw_key(key, index)},
        };
    }
};

/// Adds the squares of a gradient, tile by tile.
template <typename Vector, typename One>
class SquareKernel {
public:
    /// Writes one sum a tile.
    static void sums(NumberFormat format, const void* grad, size_t count, double* tile_sums) {
        switch (format) {
            case NumberFormat::kFloat32:
                return sums_of<NumberFormat::kFloat32>(grad, count, tile_sums);
            case NumberFormat::kBfloat16:
                return sums_of<NumberFormat::kBfloat16>(grad, count, tile_sums);
            case NumberFormat::kFloat16:
                return sums_of<NumberFormat::kFloat16>(grad, count, tile_sums);
        }
    }

private:
    static constexpr size_t kSums = 16;

    template <NumberFormat kFormat>
    static void sums_of(const void* grad, size_t count, double* tile_sums) {
        for (size_t begin = 0; begin < count; begin += kTile) {
            const size_t end = count - begin < kTile ? count : begin + kTile;
            *tile_sums++ = tile_sum<kFormat>(grad, begin, end);
        }
    }

    template <NumberFormat kFormat>
    static double tile_sum(const void* grad, size_t begin, size_t end) {
        const size_t whole = end - (end - begin) % kSums;
        typename Vector::Squares squares;
        for (size_t i = begin; i < whole; i += kSums) {
            prefetch<kFormat>(grad, i);
            for (size_t part = 0; part < kSums; part += Vector::kWidth) {
                squares.add(load_gradient<Vector, kFormat>(grad, i + part), part);
            }
        }
        double sums[kSums];
        squares.store(sums);
        for (size_t i = whole; i < end; ++i) {
            const auto x = static_cast<double>(load_gradient<One, kFormat>(grad, i).x);
            sums[i - whole] += x * x;
        }
        return combined(sums);
    }

    /// In the order of a tree, whoever computed the sums. Every NaN becomes the same one.
    static double combined(double* sums) {
        for (size_t half = kSums / 2; half > 0; half /= 2) {
            for (size_t i = 0; i < half; ++i) {
                sums[i] += sums[i + half];
            }
        }
        return sums[0] == sums[0] ? sums[0] : __builtin_nan("");
    }
};

}  // namespace trainstream::optim
