// csrc/binding/saved_tensors.h: torch's hooks on what autograd saves for backward, as hints for the
// pager.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include "pager/pager.h"

namespace trainstream {

class SaveOrder;

/// What the graph holds in a saved tensor's place: the same bytes, and the version that they had,
/// since torch checks no version where hooks are.
///
/// Owner: the graph's node, through Python; freed when the node lets go of it.
/// Lock:  none for its own members, which never change; its place among others is SaveOrder's.
class SavedTensor {
public:
    /// `tensor` is a parameter, and stays one when it is unpacked; or any other, and then nothing
    /// of the graph may be held: its node would hold itself.
    explicit SavedTensor(const at::Tensor& tensor);
    ~SavedTensor();
    SavedTensor(const SavedTensor&) = delete;
    SavedTensor& operator=(const SavedTensor&) = delete;

    const at::Tensor& data() const { return data_; }
    bool is_parameter() const { return is_parameter_; }
    /// Of its storage; 0: not managed.
    size_t managed_bytes() const;
    /// Its storage counts as saved from here on. True: it may be told to leave.
    bool count();
    void spill(bool by_need);
    /// Says what is needed now, and what will be next. With the GIL released.
    void announce_use() const;
    /// Throws torch's error where its bytes were changed after it was saved.
    void check_version() const;

private:
    friend class SaveOrder;

    const bool is_parameter_;
    const at::Tensor data_;
    const uint32_t version_;
    Pager* pager_ = nullptr;
    StoragePtr storage_;  // Null: not managed, or not counted.
    std::shared_ptr<SaveOrder> order_;
    SavedTensor* before_ = nullptr;  // Saved by the same thread.
    SavedTensor* after_ = nullptr;
};

/// One pair of hooks, for one entry of trainstream.spill_activations().
///
/// Owner: Python; torch holds its methods. Lock: its own, a leaf: a backward pass that creates a
/// graph saves on several threads.
class SpillHooks {
public:
    /// `share`: of the bytes saved, from 0 to 1; below 0: as much as the last step had too much.
    SpillHooks(double share, size_t min_bytes) : share_(share), min_bytes_(min_bytes) {}

    std::unique_ptr<SavedTensor> pack(const at::Tensor& tensor);
    static at::Tensor unpack(const SavedTensor& saved);

private:
    bool takes(size_t size_bytes);

    const double share_;
    const size_t min_bytes_;
    std::mutex mutex_;
    uint64_t seen_bytes_ = 0;
    uint64_t spilled_bytes_ = 0;
};

void add_saved_tensor_functions(pybind11::module_& module);

}  // namespace trainstream
