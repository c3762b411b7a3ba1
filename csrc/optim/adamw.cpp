#include "optim/adamw.h"

#include <cmath>
#include <string>

#include "base/error.h"

namespace trainstream::optim {

AdamW::Scalars AdamW::scalars(const Hyperparameters& hyper, int64_t step, double grad_scale) {
    if (step < 1) {
        throw errors::invalid_argument("AdamW step " + std::to_string(step) +
                                       " is out of range: steps count from 1.");
    }
    const auto steps = static_cast<double>(step);
    const double correction1 = 1.0 - std::pow(hyper.beta1, steps);
    const double correction2 = 1.0 - std::pow(hyper.beta2, steps);
    const double decay = hyper.decoupled ? hyper.lr * hyper.weight_decay : 0.0;
    const double l2_decay = hyper.decoupled ? 0.0 : hyper.weight_decay;
    return {
        .grad_scale = static_cast<float>(hyper.maximize ? -grad_scale : grad_scale),
        .weight_factor = static_cast<float>(1.0 - decay),
        .l2_decay = static_cast<float>(l2_decay),
        .one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1),
        .beta2 = static_cast<float>(hyper.beta2),
        .one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2),
        .root_correction2 = static_cast<float>(std::sqrt(correction2)),
        .eps = static_cast<float>(hyper.eps),
        .minus_step_size = static_cast<float>(-hyper.lr / correction1),
    };
}

}  // namespace trainstream::optim
