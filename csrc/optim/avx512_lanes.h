// csrc/optim/avx512_lanes.h: 16 lanes in AVX-512 (F, BW, DQ, VL). For update_avx512.cpp alone.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "optim/checksum.h"
#include "optim/number_formats.h"

namespace trainstream::optim {

/// See ScalarLanes for what each part means. The constructors are written out, since gcc 12
/// compiles implicit ones for the wrong instruction set.
struct Avx512Lanes {
    static constexpr size_t kWidth = 16;

    struct Floats {
        __m512 x;

        static Floats all(float value) { return {_mm512_set1_ps(value)}; }
        static Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
        void store(float* to) const { _mm512_storeu_ps(to, x); }

        Floats operator+(Floats b) const { return {_mm512_add_ps(x, b.x)}; }
        Floats operator-(Floats b) const { return {_mm512_sub_ps(x, b.x)}; }
        Floats operator*(Floats b) const { return {_mm512_mul_ps(x, b.x)}; }
        Floats operator/(Floats b) const { return {_mm512_div_ps(x, b.x)}; }
        static Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
        static Floats sqrt(Floats a) { return {_mm512_sqrt_ps(a.x)}; }
        Floats canonical() const {
            const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
            const __m512i nan = _mm512_set1_epi32(static_cast<int>(kCanonicalNan));
            return {_mm512_mask_mov_ps(x, is_nan, _mm512_castsi512_ps(nan))};
        }
    };

    struct Bits {
        __m512i x;

        static Bits all(uint32_t value) { return {_mm512_set1_epi32(static_cast<int>(value))}; }
        static Bits count_from(uint32_t first) {
            const __m512i places =
                _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            return {_mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)), places)};
        }

        Bits operator+(Bits b) const { return {_mm512_add_epi32(x, b.x)}; }
        Bits operator*(Bits b) const { return {_mm512_mullo_epi32(x, b.x)}; }
        Bits operator^(Bits b) const { return {_mm512_xor_si512(x, b.x)}; }
        Bits operator&(Bits b) const { return {_mm512_and_si512(x, b.x)}; }
        Bits operator<<(unsigned places) const { return {_mm512_slli_epi32(x, places)}; }
        Bits operator>>(unsigned places) const { return {_mm512_srli_epi32(x, places)}; }
    };

    struct Halves {
        __m256i x;

        static Halves load(const uint16_t* from) {
            return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))};
        }
        void store(uint16_t* to) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
    };

    static Bits bits_of(Floats a) { return {_mm512_castps_si512(a.x)}; }
    static Floats float_of(Bits a) { return {_mm512_castsi512_ps(a.x)}; }
    static Bits zero_extended(Halves a) { return {_mm512_cvtepu16_epi32(a.x)}; }
    static Bits sign_extended(Halves a) { return {_mm512_cvtepi16_epi32(a.x)}; }
    static Halves low_halves(Bits a) {
        // One permutation of 16-bit numbers; vpmovdw is two instructions on the busiest port.
        const __m512i even =
            _mm512_setr_epi32(0x00020000, 0x00060004, 0x000A0008, 0x000E000C, 0x00120010,
                              0x00160014, 0x001A0018, 0x001E001C, 0, 0, 0, 0, 0, 0, 0, 0);
        return {_mm512_castsi512_si256(_mm512_permutexvar_epi16(even, a.x))};
    }
    static Floats float_of_half(Halves a) { return {_mm512_cvtph_ps(a.x)}; }
    static Halves half_of(Floats a) {
        return {_mm512_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    }
    static Floats where_equal(Halves a, Halves b, Floats equal, Floats other) {
        const __mmask16 is_equal = _mm256_cmpeq_epi16_mask(a.x, b.x);
        return {_mm512_mask_mov_ps(other.x, is_equal, equal.x)};
    }

    class Checksum {
    public:
        Checksum() : sums_(_mm256_setzero_si256()) {}

        void add(Halves weights, size_t place) {
            const auto* factors = reinterpret_cast<const __m256i*>(&kChecksumFactors.at[place]);
            const __m256i products = _mm256_madd_epi16(weights.x, _mm256_load_si256(factors));
            sums_ = _mm256_add_epi32(sums_, products);
        }
        uint32_t total() const {
            alignas(32) uint32_t sums[8];
            _mm256_store_si256(reinterpret_cast<__m256i*>(sums), sums_);
            uint32_t total = 0;
            for (const uint32_t sum : sums) {
                total += sum;
            }
            return total;
        }

    private:
        __m256i sums_;
    };

    /// The product of two floats is exact in double, so fused or not gives the same bits.
    class Squares {
    public:
        Squares() : low_(_mm512_setzero_pd()), high_(_mm512_setzero_pd()) {}

        void add(Floats a, size_t /*sum*/) {
            const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a.x));
            const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.x, 1));
            low_ = _mm512_fmadd_pd(low, low, low_);
            high_ = _mm512_fmadd_pd(high, high, high_);
        }
        void store(double* to) const {
            _mm512_storeu_pd(to, low_);
            _mm512_storeu_pd(to + 8, high_);
        }

    private:
        __m512d low_;
        __m512d high_;
    };
};

}  // namespace trainstream::optim
