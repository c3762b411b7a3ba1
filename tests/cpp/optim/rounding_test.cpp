#include "optim/rounding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "support/optim_state.h"

namespace trainstream::optim {
namespace {

using testing::kBf16;
using testing::kF32;
using testing::OptimState;

// Deviations are counted in standard deviations. A right generator stays within 5 of them but once
// in 1.7 million trials; the seeds are fixed, so a test that passes once passes always.
constexpr double kDeviationsMax = 5.0;

constexpr size_t kCount = 1 << 16;
constexpr int kSteps = 16;  // kCount * kSteps = 2^20 draws.

struct Draws {
    std::vector<int> m;  // 1: exp_avg was rounded up.
    std::vector<int> v;
};

/// Whether each moment was rounded up, when `fraction` of a bf16 step is cut off. With betas of 0
/// and moments of 0 the first moment is the gradient and the second its square; the gradient is
/// chosen for the one or the other.
Draws draw_updates(double fraction) {
    AdamW::Hyperparameters hyper;
    hyper.beta1 = 0;
    hyper.beta2 = 0;
    Draws draws;
    const double target = 1.0 + fraction / 128.0;
    size_t outside = 0;  // Neither of the two neighbours. Counted: 8 million checks take seconds.
    for (const bool for_m : {true, false}) {
        OptimState before({kF32, kF32, kBf16}, kCount, 1);
        for (size_t i = 0; i < kCount; ++i) {
            before.grad.set(i, static_cast<float>(for_m ? target : std::sqrt(target)));
            before.exp_avg.set(i, 0);
            before.exp_avg_sq.set(i, 0);
        }
        for (int step = 1; step <= kSteps; ++step) {
            OptimState state = before;
            update(best_instruction_set(), state.formats, state.slice(),
                   AdamW::scalars(hyper, step, 1.0),
                   rounding_key(3, 5, static_cast<uint64_t>(step)));
            const auto& moment = for_m ? state.exp_avg : state.exp_avg_sq;
            for (size_t i = 0; i < kCount; ++i) {
                const uint32_t up = moment.bits(i) - 0x3F80U;  // From 1.
                outside += up > 1U ? 1 : 0;
                (for_m ? draws.m : draws.v).push_back(static_cast<int>(up));
            }
        }
    }
    EXPECT_EQ(outside, 0u);
    return draws;
}

/// How far the share of ones is from `expected`, in standard deviations.
double deviations(const std::vector<int>& draws, double expected) {
    double ones = 0;
    for (const int draw : draws) {
        ones += draw;
    }
    const auto count = static_cast<double>(draws.size());
    return (ones - count * expected) / std::sqrt(count * expected * (1 - expected));
}

/// The same for the product of two centred sequences, the second `lag` places later.
double covariance_deviations(const std::vector<int>& a, const std::vector<int>& b, size_t lag,
                             double expected) {
    double sum = 0;
    const size_t count = a.size() - lag;
    for (size_t i = 0; i < count; ++i) {
        sum += (a[i] - expected) * (b[i + lag] - expected);
    }
    return sum / (std::sqrt(static_cast<double>(count)) * expected * (1 - expected));
}

// Goal: stochastic rounding has no bias, for either moment. Method: 2^20 draws at each of several
// fractions of a step; the share rounded up is the fraction, within 5 standard deviations.
TEST(RoundingTest, RoundingIsUnbiased) {
    for (const double fraction : {0.01, 0.3, 0.5, 0.875}) {
        const Draws draws = draw_updates(fraction);
        ASSERT_EQ(draws.m.size(), size_t{1} << 20);
        EXPECT_LT(std::abs(deviations(draws.m, fraction)), kDeviationsMax) << fraction;
        EXPECT_LT(std::abs(deviations(draws.v, fraction)), kDeviationsMax) << fraction;
    }
}

// Goal: draws are independent: of the other moment's, of the neighbours', of the step's before.
TEST(RoundingTest, DrawsAreUncorrelated) {
    const Draws draws = draw_updates(0.5);
    EXPECT_LT(std::abs(covariance_deviations(draws.m, draws.v, 0, 0.5)), kDeviationsMax);
    for (const size_t lag : {size_t{1}, size_t{2}, size_t{16}, kTile, kCount}) {
        EXPECT_LT(std::abs(covariance_deviations(draws.m, draws.m, lag, 0.5)), kDeviationsMax)
            << lag;
        EXPECT_LT(std::abs(covariance_deviations(draws.v, draws.v, lag, 0.5)), kDeviationsMax)
            << lag;
    }
}

// Goal: a moment under 1/256 of itself a step still moves, on the average. Method: beta2 = 0.999
// and no gradient: after 1000 steps 0.999^1000 = 0.3677 of it is left. One element deviates by at
// most about 5 %, so the mean of 65536 by 0.02 %.
TEST(RoundingTest, SlowDecayIsNotLost) {
    OptimState state({kF32, kF32, kBf16}, kCount, 1);
    for (size_t i = 0; i < kCount; ++i) {
        state.grad.set(i, 0);
        state.exp_avg_sq.set(i, 1);
    }
    for (int step = 1; step <= 1000; ++step) {
        update(best_instruction_set(), state.formats, state.slice(), AdamW::scalars({}, step, 1.0),
               rounding_key(3, 5, static_cast<uint64_t>(step)));
    }
    double mean = 0;
    for (size_t i = 0; i < kCount; ++i) {
        mean += state.exp_avg_sq.get(i) / static_cast<double>(kCount);
    }
    const double expected = std::pow(static_cast<double>(0.999F), 1000);
    EXPECT_NEAR(mean / expected, 1.0, 0.001);
}

// Goal: seed, parameter, step and block of 2^32 elements each give other keys.
TEST(RoundingTest, KeysDiffer) {
    std::set<uint64_t> keys;
    std::set<uint32_t> draw_keys;
    for (uint64_t seed = 0; seed < 10; ++seed) {
        for (uint64_t parameter = 0; parameter < 10; ++parameter) {
            for (uint64_t step = 0; step < 10; ++step) {
                const RoundingKey key = rounding_key(seed, parameter, step);
                keys.insert(key.bits);
                draw_keys.insert(draw_key(key, step << 32));
            }
        }
    }
    EXPECT_EQ(keys.size(), 1000U);
    EXPECT_EQ(draw_keys.size(), 1000U);
    EXPECT_EQ(draw_key({7}, 5), draw_key({7}, 0xFFFFFFFFU));
}

}  // namespace
}  // namespace trainstream::optim
