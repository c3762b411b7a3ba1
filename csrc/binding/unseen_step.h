// csrc/binding/unseen_step.h: a step of an optimizer whose kernels nobody announces.
#pragma once

#include <vector>

#include "pager/pager.h"

namespace trainstream {

/// As long as it lives no storage leaves without a copy: see Pager::begin_unseen_step.
///
/// Owner: the optimizer's hooks. Lock: none.
class UnseenStep {
public:
    UnseenStep();
    ~UnseenStep();
    UnseenStep(const UnseenStep&) = delete;
    UnseenStep& operator=(const UnseenStep&) = delete;

private:
    std::vector<Pager*> pagers_;
};

}  // namespace trainstream
