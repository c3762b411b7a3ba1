// csrc/optim/scalar_lanes.h: one lane, in plain C++; and what a set of lanes has to offer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/checksum.h"
#include "optim/number_formats.h"

namespace trainstream::optim {

/// A set of lanes: kWidth elements that are worked on at once.
///
///   Floats     fp32: all, load, store, + - * /, fma, sqrt, canonical; each rounds once, to nearest
///   Bits       uint32: all, count_from (n, n + 1, ...), + * ^ & << >>
///   Halves     16 bits each, in memory only: load, store
///   Checksum   adds weights, each times the factor of its place in the tile
///   Squares    16 sums in double: element i goes to sum i % 16
///   bits_of, float_of, float_of_half, half_of, zero_extended, sign_extended, low_halves,
///   where_equal (the third where first and second are equal, else the fourth)
///
/// kBuild: which kernel file this copy is compiled in. Its machine code differs from file to file,
/// so its type must too, or the linker would keep one copy for all.
template <int kBuild>
struct ScalarLanes {
    static constexpr size_t kWidth = 1;

    struct Floats {
        float x;

        static Floats all(float value) { return {value}; }
        static Floats load(const float* from) { return {*from}; }
        void store(float* to) const { *to = x; }

        Floats operator+(Floats b) const { return {x + b.x}; }
        Floats operator-(Floats b) const { return {x - b.x}; }
        Floats operator*(Floats b) const { return {x * b.x}; }
        Floats operator/(Floats b) const { return {x / b.x}; }
        static Floats fma(Floats a, Floats b, Floats c) { return {__builtin_fmaf(a.x, b.x, c.x)}; }
        static Floats sqrt(Floats a) { return {__builtin_sqrtf(a.x)}; }
        Floats canonical() const { return {x == x ? x : float_of_bits(kCanonicalNan)}; }
    };

    struct Bits {
        uint32_t x;

        static Bits all(uint32_t value) { return {value}; }
        static Bits count_from(uint32_t first) { return {first}; }

        Bits operator+(Bits b) const { return {x + b.x}; }
        Bits operator*(Bits b) const { return {x * b.x}; }
        Bits operator^(Bits b) const { return {x ^ b.x}; }
        Bits operator&(Bits b) const { return {x & b.x}; }
        Bits operator<<(int places) const { return {x << places}; }
        Bits operator>>(int places) const { return {x >> places}; }
    };

    struct Halves {
        uint16_t x;

        static Halves load(const uint16_t* from) { return {*from}; }
        void store(uint16_t* to) const { *to = x; }
    };

    static Bits bits_of(Floats a) { return {bits_of_float(a.x)}; }
    static Floats float_of(Bits a) { return {float_of_bits(a.x)}; }
    static Bits zero_extended(Halves a) { return {a.x}; }
    static Bits sign_extended(Halves a) {
        return {static_cast<uint32_t>(static_cast<int16_t>(a.x))};
    }
    static Halves low_halves(Bits a) { return {static_cast<uint16_t>(a.x & 0xFFFFU)}; }
    static Floats float_of_half(Halves a) { return {optim::float_of_half(a.x)}; }
    static Halves half_of(Floats a) { return {half_of_float(a.x)}; }
    static Floats where_equal(Halves a, Halves b, Floats equal, Floats other) {
        return a.x == b.x ? equal : other;
    }

    class Checksum {
    public:
        void add(Halves weight, size_t place) {
            const auto signed_weight = static_cast<int16_t>(weight.x);
            sum_ += static_cast<uint32_t>(signed_weight * kChecksumFactors.at[place]);
        }
        uint32_t total() const { return sum_; }

    private:
        uint32_t sum_ = 0;
    };

    class Squares {
    public:
        void add(Floats a, size_t sum) {
            sums_[sum] += static_cast<double>(a.x) * static_cast<double>(a.x);
        }
        void store(double* to) const {
            for (size_t i = 0; i < 16; ++i) {
                to[i] = sums_[i];
            }
        }

    private:
        double sums_[16] = {};
    };
};

}  // namespace trainstream::optim
