// csrc/binding/waiting_gradient.h: a gradient whose update is not its turn yet.
#pragma once

#include <ATen/core/Tensor.h>

#include "pager/pager.h"

namespace trainstream {

/// The gradient leaves the device, with no stream waiting, unless its update comes first. Holds one
/// reference to it, which is the only one.
///
/// Owner: the update. Lock: none.
class WaitingGradient {
public:
    explicit WaitingGradient(const at::Tensor& gradient);
    ~WaitingGradient();
    WaitingGradient(const WaitingGradient&) = delete;
    WaitingGradient& operator=(const WaitingGradient&) = delete;

private:
    Pager* pager_ = nullptr;
    StoragePtr storage_;
};

}  // namespace trainstream
