#include "optim/number_formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace trainstream::optim {
namespace {

float weight_as_float(uint16_t weight) {
    return float_of_bits(static_cast<uint32_t>(weight) << 16);
}

/// The master comes back, and the weight is the nearest bf16 number, away from zero half way.
void check_split(uint32_t pattern) {
    if (is_nan_pattern(pattern)) {
        return;
    }
    const uint16_t weight = weight_of_pattern(pattern);
    ASSERT_EQ(pattern_of(weight, remainder_of_pattern(pattern)), pattern);
    const double master = float_of_bits(pattern);
    const double chosen = weight_as_float(weight);
    if (!std::isfinite(master) || !std::isfinite(chosen)) {
        ASSERT_GE(std::abs(master), 0x1.FFp127) << std::hex << pattern;  // Half a step below 2^128.
        return;
    }
    for (const int step : {-1, 1}) {
        const double other = weight_as_float(static_cast<uint16_t>(weight + step));
        if (std::isfinite(other) && std::signbit(other) == std::signbit(chosen)) {
            const double advantage = std::abs(master - other) - std::abs(master - chosen);
            ASSERT_GE(advantage, 0) << std::hex << pattern;
            ASSERT_FALSE(advantage == 0 && std::abs(other) > std::abs(chosen)) << pattern;
        }
    }
}

// Goal: weight and remainder make the master again, exactly. Method: each of the 2^16 upper halves
// with each kind of lower half, and a million patterns at random.
TEST(NumberFormatsTest, WeightAndRemainderGiveEveryMasterBack) {
    for (uint32_t upper = 0; upper < 0x10000U; ++upper) {
        for (const uint32_t lower :
             {0x0000U, 0x0001U, 0x1234U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
            check_split(upper << 16 | lower);
        }
    }
    std::mt19937 random(41);
    for (int i = 0; i < 1000000; ++i) {
        check_split(static_cast<uint32_t>(random()));
    }
}

// Goal: fp16 survives the way to fp32 and back. Method: all 65536 patterns.
TEST(NumberFormatsTest, EveryHalfComesBack) {
    for (uint32_t bits = 0; bits < 0x10000U; ++bits) {
        const auto half = static_cast<uint16_t>(bits);
        const bool is_nan = (half & 0x7FFFU) > 0x7C00U;
        const float value = float_of_half(half);
        ASSERT_EQ(std::isnan(value), is_nan);
        ASSERT_EQ(half_of_float(value), is_nan ? kCanonicalHalfNan : half);
    }
    EXPECT_EQ(float_of_half(0x3C00U), 1.0F);
    EXPECT_EQ(float_of_half(0x7BFFU), 65504.0F);
    EXPECT_EQ(float_of_half(0x0001U), 0x1p-24F);
    EXPECT_EQ(float_of_half(0xFC00U), -INFINITY);
}

// Goal: fp32 becomes the nearest fp16, and the even one half way. Method: between every two
// neighbours the middle (exact in fp32) and the numbers beside it; 65536 stands for infinity.
TEST(NumberFormatsTest, HalvesAreNearestEven) {
    for (uint16_t half = 0; half < 0x7C00U; ++half) {
        const float low = float_of_half(half);
        const auto next = static_cast<uint16_t>(half + 1);
        const float high = next == 0x7C00U ? 65536.0F : float_of_half(next);
        const float middle = low + (high - low) / 2;
        const uint16_t even = (half & 1U) == 0 ? half : next;
        for (const float sign : {1.0F, -1.0F}) {
            const uint16_t sign_bit = sign > 0 ? 0 : 0x8000U;
            ASSERT_EQ(half_of_float(sign * middle), sign_bit | even);
            ASSERT_EQ(half_of_float(sign * std::nextafter(middle, 0.0F)), sign_bit | half);
            ASSERT_EQ(half_of_float(sign * std::nextafter(middle, 1e9F)), sign_bit | next);
        }
    }
    EXPECT_EQ(half_of_float(1e30F), 0x7C00U);
    EXPECT_EQ(half_of_float(-INFINITY), 0xFC00U);
    EXPECT_EQ(half_of_float(1e-30F), 0x0000U);
    EXPECT_EQ(half_of_float(-NAN), kCanonicalHalfNan);
}

}  // namespace
}  // namespace trainstream::optim
