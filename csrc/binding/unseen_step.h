// csrc/binding/unseen_step.h: a step of an optimizer whose kernels nobody announces.
#pragma once

#include <vector>

#include "pager/pager.h"

namespace trainstream {

/// From the constructor to end() no storage leaves without a copy: see Pager::begin_unseen_step.
///
/// Owner: the optimizer's hooks. Lock: none.
class UnseenStep {
public:
    UnseenStep();
    ~UnseenStep() { end(); }
    UnseenStep(const UnseenStep&) = delete;
    UnseenStep& operator=(const UnseenStep&) = delete;

    void end() noexcept;

private:
    std::vector<Pager*> pagers_;
};

}  // namespace trainstream
