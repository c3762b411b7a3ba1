#include "optim/adamw.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "support/optim_state.h"

namespace trainstream::optim {
namespace {

using testing::all_formats;
using testing::kBf16;
using testing::kF16;
using testing::kF32;
using testing::name_of;
using testing::OptimState;

constexpr double kUnit = 0x1p-24;       // Half an ulp of fp32, relative.
constexpr double kSmallest = 0x1p-149;  // A rounding among subnormal numbers.

/// One step in double from the same scalars, and how far fp32 may be from it, with a unit u of
/// 2^-24 for each rounding (adamw.h has the operations in order).
struct Reference {
    double m, v, p;
    double m_error, v_error, p_error;

    Reference(const AdamW::Scalars& s, double g0, double p0, double m0, double v0) {
        const double g = s.grad_scale * g0 + s.l2_decay * p0;
        // The scaled gradient is rounded before the decay is added, and after.
        const double g_error = kUnit * (std::abs(s.grad_scale * g0) + std::abs(g));
        m = m0 + s.one_minus_beta1 * (g - m0);
        m_error = s.one_minus_beta1 * (g_error + kUnit * std::abs(g - m0)) + kUnit * std::abs(m);
        v = s.one_minus_beta2 * g * g + s.beta2 * v0;
        v_error = s.one_minus_beta2 * (2 * std::abs(g) * g_error + kUnit * g * g) +
                  kUnit * s.beta2 * v0 + kUnit * v;
        const double root = std::sqrt(v) / s.root_correction2;
        // A root halves its argument's relative error, and is rounded; so is the division.
        const double root_error = root * (v > 0 ? v_error / v / 2 + 2 * kUnit : 0);
        const double denominator = root + s.eps;
        const double denominator_error = root_error + kUnit * denominator;
        const double change = s.minus_step_size * m / denominator;
        const double change_error =
            std::abs(s.minus_step_size) * m_error / denominator +
            std::abs(change) * (denominator_error / denominator + 2 * kUnit);
        const double kept = p0 * s.weight_factor;
        p = kept + change;
        p_error = kUnit * std::abs(kept) + change_error + kUnit * std::abs(p);
    }
};

/// `first_order`: the bound without products of errors, for which 1 % is left.
void expect_within(double actual, double expected, double first_order, const std::string& what) {
    ASSERT_LE(std::abs(actual - expected), 1.01 * first_order + 4 * kSmallest) << what;
}

/// A rounding to a format: half a step, or a whole one where it is stochastic.
double storage_error(double value, NumberFormat format, bool stochastic) {
    if (format == kF32) {
        return 0;  // Counted with the operation.
    }
    const double half_step = format == kBf16 ? 0x1p-8 : 0x1p-11;
    return std::abs(value) * half_step * (stochastic ? 2 : 1) + (format == kF16 ? 0x1p-25 : 0);
}

// Goal: one step is within its roundings of double precision. Method: the bound is computed for
// each element beside the reference: about 3 u of |g| + |m| for exp_avg (u = 2^-24), 4 u of
// exp_avg_sq, 2 u of the weight and 8 u of the step for the master. bf16 moments add a whole step
// (2^-7, stochastic), bf16 and fp16 weights half a step (2^-8 and 2^-11) to their master.
TEST(AdamWTest, OneStepIsWithinItsRoundingsOfDoublePrecision) {
    AdamW::Hyperparameters adam;
    adam.decoupled = false;
    adam.maximize = true;
    for (const Formats formats : all_formats()) {
        for (const auto& hyper : {AdamW::Hyperparameters{}, adam}) {
            OptimState state(formats, 10007, 5);
            const OptimState before = state;
            const auto scalars = AdamW::scalars(hyper, 4, 0.37);
            update(best_instruction_set(), formats, state.slice(), scalars, rounding_key(1, 1, 1));
            for (size_t i = 0; i < state.count; ++i) {
                const Reference ref(scalars, before.grad.get(i), before.get_master(i),
                                    before.exp_avg.get(i), before.exp_avg_sq.get(i));
                const std::string what = name_of(formats) + ", element " + std::to_string(i);
                expect_within(state.exp_avg.get(i), ref.m,
                              ref.m_error + storage_error(ref.m, formats.moments, true), what);
                expect_within(state.exp_avg_sq.get(i), ref.v,
                              ref.v_error + storage_error(ref.v, formats.moments, true), what);
                expect_within(state.get_master(i), ref.p, ref.p_error, what);
                expect_within(state.weight.get(i), ref.p,
                              ref.p_error + storage_error(ref.p, formats.param, false), what);
            }
        }
    }
}

/// torch.optim.AdamW in fp32 on a CPU, as its vector code rounds: lerp_ and addcmul_ are fused.
/// Measured beside torch 2.11 (20 steps, 200,003 elements): the moments of foreach=False and the
/// weights of fused=True have these bits; the weights of foreach=False differ by 2e-9 of their
/// norm.
void torch_step(OptimState& state, const AdamW::Hyperparameters& hyper, int step) {
    const double correction1 = 1 - std::pow(hyper.beta1, step);
    const double correction2 = 1 - std::pow(hyper.beta2, step);
    const auto kept = static_cast<float>(1 - hyper.lr * hyper.weight_decay);
    const auto minus_step_size = static_cast<float>(-hyper.lr / correction1);
    const auto root_correction2 = static_cast<float>(std::sqrt(correction2));
    const auto beta2 = static_cast<float>(hyper.beta2);
    for (size_t i = 0; i < state.count; ++i) {
        const float g = state.grad.get(i);
        const float p = state.weight.get(i) * kept;  // mul_
        float m = state.exp_avg.get(i);
        m = std::fma(static_cast<float>(1 - hyper.beta1), g - m, m);  // lerp_
        float v = state.exp_avg_sq.get(i) * beta2;                    // mul_
        v = std::fma(static_cast<float>(1 - hyper.beta2) * g, g, v);  // addcmul_
        const float denominator =
            std::sqrt(v) / root_correction2 + static_cast<float>(hyper.eps);  // sqrt, div, add_
        state.weight.set(i, p + minus_step_size * m / denominator);           // addcdiv_
        state.exp_avg.set(i, m);
        state.exp_avg_sq.set(i, v);
    }
}

// Goal: 20 steps give the bits of torch's fp32 AdamW. Method: its operations replayed one by one.
TEST(AdamWTest, TwentyStepsGiveTheBitsOfTorchInFp32) {
    const AdamW::Hyperparameters hyper;
    OptimState ours({kF32, kF32, kF32}, 50000, 9);
    for (size_t i = 0; i < ours.count; ++i) {
        ours.exp_avg.set(i, 0);
        ours.exp_avg_sq.set(i, 0);
    }
    OptimState torch = ours;
    for (int step = 1; step <= 20; ++step) {
        ours.new_gradient(100 + static_cast<uint64_t>(step));
        torch.new_gradient(100 + static_cast<uint64_t>(step));
        update(best_instruction_set(), ours.formats, ours.slice(), AdamW::scalars(hyper, step, 1.0),
               {});
        torch_step(torch, hyper, step);
    }
    EXPECT_TRUE(ours.weight == torch.weight);
    EXPECT_TRUE(ours.exp_avg == torch.exp_avg);
    EXPECT_TRUE(ours.exp_avg_sq == torch.exp_avg_sq);
}

TEST(AdamWTest, ScalarsAreThoseOfTheStep) {
    const auto s = AdamW::scalars(
        {.lr = 0.1, .beta1 = 0.5, .beta2 = 0.75, .eps = 1e-6, .weight_decay = 0.25}, 2, 0.5);
    EXPECT_EQ(s.grad_scale, 0.5F);
    EXPECT_EQ(s.weight_factor, 0.975F);
    EXPECT_EQ(s.l2_decay, 0.0F);
    EXPECT_EQ(s.one_minus_beta1, 0.5F);
    EXPECT_EQ(s.beta2, 0.75F);
    EXPECT_EQ(s.one_minus_beta2, 0.25F);
    EXPECT_EQ(s.root_correction2, static_cast<float>(std::sqrt(0.4375)));
    EXPECT_EQ(s.eps, 1e-6F);
    EXPECT_EQ(s.minus_step_size, static_cast<float>(-0.1 / 0.75));

    const auto adam =
        AdamW::scalars({.weight_decay = 0.25, .decoupled = false, .maximize = true}, 1, 0.5);
    EXPECT_EQ(adam.grad_scale, -0.5F);
    EXPECT_EQ(adam.weight_factor, 1.0F);
    EXPECT_EQ(adam.l2_decay, 0.25F);
}

TEST(AdamWTest, StepZeroIsRefused) { EXPECT_THROW(AdamW::scalars({}, 0, 1.0), Error); }

}  // namespace
}  // namespace trainstream::optim
