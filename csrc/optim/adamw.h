// csrc/optim/adamw.h: the update rule of AdamW and Adam, once for every kind of core.
//
// Another rule is another struct of this shape: scalars made in double on the host, and `apply`.
// Apart from formats and loops, so that the rule reads as the paper does.
//
// The kernel files include this header with their instruction set switched on (see
// update_avx2.cpp), so it holds no inline function but the template.
#pragma once

#include <cstdint>

#include "optim/host_device.h"

namespace trainstream::optim {

/// AdamW (Loshchilov and Hutter, ICLR 2019), or Adam with L2 decay, as torch computes them in fp32.
struct AdamW {
    struct Hyperparameters {
        double lr = 1e-3;
        double beta1 = 0.9;
        double beta2 = 0.999;
        double eps = 1e-8;
        double weight_decay = 1e-2;
        bool decoupled = true;  // AdamW. False: Adam, whose decay is added to the gradient.
        bool maximize = false;
    };

    /// What one step needs: each a double rounded to float once.
    struct Scalars {
        float grad_scale;  // Clipping and loss scale; negative when maximizing, which is exact.
        float weight_factor;
        float l2_decay;
        float one_minus_beta1;
        float beta2;
        float one_minus_beta2;
        float root_correction2;
        float eps;
        float minus_step_size;
    };

    /// `step` counts from 1. Throws kInvalidArgument when it does not.
    static Scalars scalars(const Hyperparameters& hyper, int64_t step, double grad_scale);

    /// One step of the lanes F. Every operation rounds once and to nearest, and none may be fused
    /// with another by a compiler (-ffp-contract=off), so all lane types give the same bits.
    ///
    /// The order of the last two lines is torch's, two divisions included: over 20 steps the
    /// weights then differ from torch's by 2e-9 of their norm. A reciprocal of the correction, or a
    /// fused last step, spares a third of the divider's work, but host memory is what limits, and
    /// the difference becomes 2e-8: every last bit that moves stays moved.
    template <typename F>
    TS_HOST_DEVICE static void apply(const Scalars& s, F g, F& p, F& m, F& v) {
        g = g * F::all(s.grad_scale);
        if (s.l2_decay != 0.0F) {  // Not 0 * p, which is NaN for an infinite weight.
            g = F::fma(F::all(s.l2_decay), p, g);
        }
        p = p * F::all(s.weight_factor);
        m = F::fma(F::all(s.one_minus_beta1), g - m, m);
        v = F::fma(F::all(s.one_minus_beta2) * g, g, F::all(s.beta2) * v);
        const F denominator = F::sqrt(v) / F::all(s.root_correction2) + F::all(s.eps);
        p = p + F::all(s.minus_step_size) * m / denominator;
    }
};

}  // namespace trainstream::optim
