// csrc/optim/avx2_lanes.h: 8 lanes in AVX2, FMA and F16C. For update_avx2.cpp alone.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "optim/checksum.h"
#include "optim/number_formats.h"

namespace trainstream::optim {

/// See ScalarLanes for what each part means. The constructors are written out, since gcc 12
/// compiles implicit ones for the wrong instruction set.
struct Avx2Lanes {
    static constexpr size_t kWidth = 8;

    struct Floats {
        __m256 x;

        static Floats all(float value) { return {_mm256_set1_ps(value)}; }
        static Floats load(const float* from) { return {_mm256_loadu_ps(from)}; }
        void store(float* to) const { _mm256_storeu_ps(to, x); }

        Floats operator+(Floats b) const { return {_mm256_add_ps(x, b.x)}; }
        Floats operator-(Floats b) const { return {_mm256_sub_ps(x, b.x)}; }
        Floats operator*(Floats b) const { return {_mm256_mul_ps(x, b.x)}; }
        Floats operator/(Floats b) const { return {_mm256_div_ps(x, b.x)}; }
        static Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
        static Floats sqrt(Floats a) { return {_mm256_sqrt_ps(a.x)}; }
        Floats canonical() const {
            const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
            const __m256i nan = _mm256_set1_epi32(static_cast<int>(kCanonicalNan));
            return {_mm256_blendv_ps(x, _mm256_castsi256_ps(nan), is_nan)};
        }
    };

    struct Bits {
        __m256i x;

        static Bits all(uint32_t value) { return {_mm256_set1_epi32(static_cast<int>(value))}; }
        static Bits count_from(uint32_t first) {
            const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            return {_mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)), places)};
        }

        Bits operator+(Bits b) const { return {_mm256_add_epi32(x, b.x)}; }
        Bits operator*(Bits b) const { return {_mm256_mullo_epi32(x, b.x)}; }
        Bits operator^(Bits b) const { return {_mm256_xor_si256(x, b.x)}; }
        Bits operator&(Bits b) const { return {_mm256_and_si256(x, b.x)}; }
        Bits operator<<(int places) const { return {_mm256_slli_epi32(x, places)}; }
        Bits operator>>(int places) const { return {_mm256_srli_epi32(x, places)}; }
    };

    struct Halves {
        __m128i x;

        static Halves load(const uint16_t* from) {
            return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))};
        }
        void store(uint16_t* to) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); }
    };

    static Bits bits_of(Floats a) { return {_mm256_castps_si256(a.x)}; }
    static Floats float_of(Bits a) { return {_mm256_castsi256_ps(a.x)}; }
    static Bits zero_extended(Halves a) { return {_mm256_cvtepu16_epi32(a.x)}; }
    static Bits sign_extended(Halves a) { return {_mm256_cvtepi16_epi32(a.x)}; }
    static Halves low_halves(Bits a) {
        // The low bytes of each number to the front of each half, then the halves together.
        const __m256i low_bytes =
            _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1,  //
                             0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
        const __m256i packed = _mm256_shuffle_epi8(a.x, low_bytes);
        return {_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000))};
    }
    static Floats float_of_half(Halves a) { return {_mm256_cvtph_ps(a.x)}; }
    static Halves half_of(Floats a) {
        return {_mm256_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    }
    static Floats where_equal(Halves a, Halves b, Floats equal, Floats other) {
        const __m256i is_equal = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(a.x, b.x));
        return {_mm256_blendv_ps(other.x, equal.x, _mm256_castsi256_ps(is_equal))};
    }

    class Checksum {
    public:
        Checksum() : sums_(_mm_setzero_si128()) {}

        void add(Halves weights, size_t place) {
            const auto* factors = reinterpret_cast<const __m128i*>(&kChecksumFactors.at[place]);
            sums_ = _mm_add_epi32(sums_, _mm_madd_epi16(weights.x, _mm_load_si128(factors)));
        }
        uint32_t total() const {
            alignas(16) uint32_t sums[4];
            _mm_store_si128(reinterpret_cast<__m128i*>(sums), sums_);
            return sums[0] + sums[1] + sums[2] + sums[3];
        }

    private:
        __m128i sums_;
    };

    /// The product of two floats is exact in double, so fused or not gives the same bits.
    class Squares {
    public:
        Squares() {
            for (__m256d& sums : sums_) {
                sums = _mm256_setzero_pd();
            }
        }

        void add(Floats a, size_t sum) {
            const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a.x));
            const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(a.x, 1));
            __m256d* sums = sums_ + sum / 4;
            sums[0] = _mm256_fmadd_pd(low, low, sums[0]);
            sums[1] = _mm256_fmadd_pd(high, high, sums[1]);
        }
        void store(double* to) const {
            for (size_t i = 0; i < 4; ++i) {
                _mm256_storeu_pd(to + 4 * i, sums_[i]);
            }
        }

    private:
        __m256d sums_[4];
    };
};

}  // namespace trainstream::optim
