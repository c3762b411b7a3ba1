// csrc/binding/deferred_updates.h: optimizers' updates that are made when they are next missed.
#pragma once

#include <atomic>
#include <cfenv>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "base/mutex.h"

namespace trainstream {

/// One call of a fused optimizer operator, with all that it depends on: tensors that it writes are
/// aliases of the caller's, those that it only reads are copies.
///
/// Owner: DeferredUpdates. Lock: none; one thread calls make(), once.
class DeferredUpdate {
public:
    /// Stream, dispatch keys and floating-point environment are those of the caller.
    DeferredUpdate(c10::OperatorHandle op, std::vector<c10::IValue> arguments, c10::Device device);

    void make();
    const std::vector<const c10::StorageImpl*>& storages() const { return storages_; }
    const c10::Stream& stream() const { return stream_; }

private:
    const c10::OperatorHandle op_;
    const std::vector<c10::IValue> arguments_;
    const c10::impl::LocalDispatchKeySet keys_;
    const c10::Stream stream_;
    std::fenv_t arithmetic_{};                       // Whether denormal numbers are zero, that is.
    std::vector<const c10::StorageImpl*> storages_;  // Of what it writes; its aliases keep them.
};

/// Updates that wait. Between an optimizer's step and the next use of a weight, its gradient or its
/// states nobody can tell whether the update was made; so it is made just before that use, in the
/// order of its stream, and its bytes pass while the model computes instead of all at once.
///
/// Owner: the process; never destroyed. Lock: its own, under which nothing is called.
/// Invariants: a storage belongs to at most one update that waits; one thread makes an update, and
/// whoever else needs it waits for that thread's part.
class DeferredUpdates {
public:
    static DeferredUpdates& instance();

    bool any() const { return waiting_.load(std::memory_order_acquire) > 0; }
    /// Makes first whatever waits for the same storages.
    void add(std::unique_ptr<DeferredUpdate> update);
    /// Makes what waits for `storage`, if anything. The device's current stream comes after it.
    void make_for(const c10::StorageImpl* storage);
    void make_all();
    size_t waiting() const { return waiting_.load(); }
    /// That ever waited.
    uint64_t count() const { return count_.load(); }
    /// Throws what kept an update from being made, if anything ever did.
    void check() const;

private:
    struct Waiting {
        std::unique_ptr<DeferredUpdate> update;
        std::thread::id maker;  // None as long as nobody has begun.
        bool made = false;
    };
    using WaitingPtr = std::shared_ptr<Waiting>;

    DeferredUpdates() = default;
    void make(const WaitingPtr& waiting);
    bool begin(const WaitingPtr& waiting) TS_EXCLUDES(mutex_);
    void end(const WaitingPtr& waiting, std::exception_ptr fault) TS_EXCLUDES(mutex_);

    mutable Mutex mutex_{LockRank::kUpdates};
    CondVar made_;
    std::unordered_map<const c10::StorageImpl*, WaitingPtr> by_storage_ TS_GUARDED_BY(mutex_);
    std::deque<WaitingPtr> in_order_ TS_GUARDED_BY(mutex_);
    std::exception_ptr fault_ TS_GUARDED_BY(mutex_);
    std::atomic<size_t> waiting_{0};
    std::atomic<uint64_t> count_{0};
    std::atomic<bool> has_fault_{false};
};

}  // namespace trainstream
