// csrc/binding/pending_write.h: a write to a tensor that another thread makes later.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "pager/pager.h"

namespace trainstream {

/// From the constructor to end() whoever uses the tensor's bytes waits, but for the thread that
/// makes the write. Keeps the memory alive.
///
/// Owner: who announced the write, then the thread that makes it. Lock: none.
class PendingWrite {
public:
    explicit PendingWrite(const at::Tensor& tensor);
    ~PendingWrite();
    PendingWrite(const PendingWrite&) = delete;
    PendingWrite& operator=(const PendingWrite&) = delete;

    /// False: the tensor is not managed, and nobody waits for it.
    bool is_announced() const { return storage_ != nullptr; }
    /// `stream`: where what the host has not done is in order.
    void end(std::optional<StreamId> stream);

private:
    const at::Tensor tensor_;
    Pager* pager_ = nullptr;
    StoragePtr storage_;
};

}  // namespace trainstream
