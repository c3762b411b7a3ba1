// csrc/binding/use_scope.h: tensors that our own code reads or writes through their addresses.
#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "pager/pager.h"

namespace trainstream {

/// What an operator's announcement does, for code that is no operator: the storages of the tensors
/// added are pinned where they are, in order for the current stream, from begin() to the end.
///
/// Owner: the function that uses the addresses. Lock: none; may wait in begin(), so not under one.
class UseScope {
public:
    UseScope() = default;
    ~UseScope();
    UseScope(const UseScope&) = delete;
    UseScope& operator=(const UseScope&) = delete;

    void add(const at::Tensor& tensor, bool writes, UseKind kind = UseKind::kInPlace,
             bool unseen = false);
    /// What was added is about to be changed by the host: see Pager::let_go.
    void let_go();
    void begin();
    /// They are used on `stream` too, not only on the one that was current in begin().
    void also_on(StreamId stream);

private:
    struct OfPager {
        Pager* pager;
        std::vector<Use> uses;
        Pins pins;
    };
    std::vector<OfPager> groups_;
};

}  // namespace trainstream
