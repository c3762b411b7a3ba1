// csrc/optim/cuda_lanes.h: 8 lanes of one GPU thread. For .cu files alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/checksum.h"
#include "optim/number_formats.h"

namespace trainstream::optim {

/// See ScalarLanes for what each part means. A block of kThreads threads works on one tile; load()
/// and store() take what a thread holds of it in registers, in two runs of 4 numbers.
///
/// Runs of 4: the threads of a warp then touch 512 neighbouring bytes of fp32, 256 of bf16, in one
/// instruction. With 8 in a row each fp32 instruction would fill every other 16 bytes, and half a
/// sector is what the link to the host carries worst.
struct CudaLanes {
    static constexpr size_t kWidth = 8;
    static constexpr size_t kRun = 4;
    static constexpr size_t kRuns = kWidth / kRun;
    static constexpr size_t kThreads = kTile / kWidth;

    /// Where in the tile this thread's lane is.
    __device__ static uint32_t place_of(size_t lane) {
        const size_t run = lane / kRun;
        return static_cast<uint32_t>((run * kThreads + threadIdx.x) * kRun + lane % kRun);
    }

    template <typename T, typename Make>
    __device__ static T each(const Make& make) {
        T result;
#pragma unroll
        for (size_t lane = 0; lane < kWidth; ++lane) {
            result.x[lane] = make(lane);
        }
        return result;
    }

    struct Floats {
        float x[kWidth];

        __device__ static Floats all(float value) {
            return each<Floats>([=](size_t) { return value; });
        }
        __device__ static Floats load(const float* from) {
            return each<Floats>([=](size_t i) { return from[i]; });
        }
        __device__ void store(float* to) const {
#pragma unroll
            for (size_t i = 0; i < kWidth; ++i) {
                to[i] = x[i];
            }
        }

        // By name, since the compiler may fuse what operators say.
        __device__ Floats operator+(const Floats& b) const {
            return each<Floats>([&](size_t i) { return __fadd_rn(x[i], b.x[i]); });
        }
        __device__ Floats operator-(const Floats& b) const {
            return each<Floats>([&](size_t i) { return __fsub_rn(x[i], b.x[i]); });
        }
        __device__ Floats operator*(const Floats& b) const {
            return each<Floats>([&](size_t i) { return __fmul_rn(x[i], b.x[i]); });
        }
        __device__ Floats operator/(const Floats& b) const {
            return each<Floats>([&](size_t i) { return __fdiv_rn(x[i], b.x[i]); });
        }
        __device__ static Floats fma(const Floats& a, const Floats& b, const Floats& c) {
            return each<Floats>([&](size_t i) { return __fmaf_rn(a.x[i], b.x[i], c.x[i]); });
        }
        __device__ static Floats sqrt(const Floats& a) {
            return each<Floats>([&](size_t i) { return __fsqrt_rn(a.x[i]); });
        }
        __device__ Floats canonical() const {
            return each<Floats>(
                [&](size_t i) { return x[i] == x[i] ? x[i] : float_of_bits(kCanonicalNan); });
        }
    };

    struct Bits {
        uint32_t x[kWidth];

        __device__ static Bits all(uint32_t value) {
            return each<Bits>([=](size_t) { return value; });
        }
        /// `first` belongs to the first element of the tile, whichever thread's it is.
        __device__ static Bits count_from(uint32_t first) {
            return each<Bits>([=](size_t i) { return first + place_of(i); });
        }

        __device__ Bits operator+(const Bits& b) const {
            return each<Bits>([&](size_t i) { return x[i] + b.x[i]; });
        }
        __device__ Bits operator*(const Bits& b) const {
            return each<Bits>([&](size_t i) { return x[i] * b.x[i]; });
        }
        __device__ Bits operator^(const Bits& b) const {
            return each<Bits>([&](size_t i) { return x[i] ^ b.x[i]; });
        }
        __device__ Bits operator&(const Bits& b) const {
            return each<Bits>([&](size_t i) { return x[i] & b.x[i]; });
        }
        __device__ Bits operator<<(int places) const {
            return each<Bits>([&](size_t i) { return x[i] << places; });
        }
        __device__ Bits operator>>(int places) const {
            return each<Bits>([&](size_t i) { return x[i] >> places; });
        }
    };

    struct Halves {
        uint16_t x[kWidth];

        __device__ static Halves load(const uint16_t* from) {
            return each<Halves>([=](size_t i) { return from[i]; });
        }
        __device__ void store(uint16_t* to) const {
#pragma unroll
            for (size_t i = 0; i < kWidth; ++i) {
                to[i] = x[i];
            }
        }
    };

    __device__ static Bits bits_of(const Floats& a) {
        return each<Bits>([&](size_t i) { return bits_of_float(a.x[i]); });
    }
    __device__ static Floats float_of(const Bits& a) {
        return each<Floats>([&](size_t i) { return float_of_bits(a.x[i]); });
    }
    __device__ static Bits zero_extended(const Halves& a) {
        return each<Bits>([&](size_t i) { return static_cast<uint32_t>(a.x[i]); });
    }
    __device__ static Bits sign_extended(const Halves& a) {
        return each<Bits>(
            [&](size_t i) { return static_cast<uint32_t>(static_cast<int16_t>(a.x[i])); });
    }
    __device__ static Halves low_halves(const Bits& a) {
        return each<Halves>([&](size_t i) { return static_cast<uint16_t>(a.x[i] & 0xFFFFU); });
    }
    __device__ static Floats float_of_half(const Halves& a) {
        return each<Floats>([&](size_t i) { return optim::float_of_half(a.x[i]); });
    }
    __device__ static Halves half_of(const Floats& a) {
        return each<Halves>([&](size_t i) { return half_of_float(a.x[i]); });
    }
    __device__ static Floats where_equal(const Halves& a, const Halves& b, const Floats& equal,
                                         const Floats& other) {
        return each<Floats>([&](size_t i) { return a.x[i] == b.x[i] ? equal.x[i] : other.x[i]; });
    }

    /// Of this thread's weights; the tile's checksum is the sum over its threads.
    class Checksum {
    public:
        /// The factors depend on the thread alone, so the compiler computes them once.
        __device__ void add(const Halves& weights, size_t /*place*/) {
#pragma unroll
            for (size_t i = 0; i < kWidth; ++i) {
                const auto signed_weight = static_cast<int16_t>(weights.x[i]);
                sum_ += static_cast<uint32_t>(signed_weight * checksum_factor(place_of(i)));
            }
        }
        __device__ uint32_t total() const { return sum_; }

    private:
        uint32_t sum_ = 0;
    };
};

}  // namespace trainstream::optim
