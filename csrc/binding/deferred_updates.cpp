#include "binding/deferred_updates.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "allocator/pager_registry.h"
#include "base/error.h"
#include "binding/managed_storages.h"
#include "binding/operator_guard.h"

namespace trainstream {

namespace {

c10::Stream current_stream(c10::Device device) {
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// What the device's current stream does from now on comes after what `stream` was given so far.
void order_after(const c10::Stream& stream) {
    const c10::Stream current = current_stream(stream.device());
    if (current != stream) {
        c10::Event event(stream.device_type());
        event.record(stream);
        event.block(current);
    }
}

/// The floating-point environment of this thread is `wanted` as long as it lives.
class ArithmeticGuard {
public:
    explicit ArithmeticGuard(const std::fenv_t& wanted) {
        std::fegetenv(&before_);
        std::fesetenv(&wanted);
    }
    ~ArithmeticGuard() { std::fesetenv(&before_); }
    ArithmeticGuard(const ArithmeticGuard&) = delete;
    ArithmeticGuard& operator=(const ArithmeticGuard&) = delete;

private:
    std::fenv_t before_{};
};

}  // namespace

DeferredUpdate::DeferredUpdate(c10::OperatorHandle op, std::vector<c10::IValue> arguments,
                               c10::Device device)
    : op_(std::move(op)),
      arguments_(std::move(arguments)),
      keys_(c10::impl::tls_local_dispatch_key_set()),
      stream_(current_stream(device)) {
    std::fegetenv(&arithmetic_);
    const auto& schema = op_.schema().arguments();
    for (size_t i = 0; i < arguments_.size(); ++i) {
        const c10::AliasInfo* alias = schema.at(i).alias_info();
        if (alias != nullptr && alias->isWrite()) {
            for_any_value(arguments_[i],
                          [&](const c10::StorageImpl* storage) { storages_.push_back(storage); });
        }
    }
}

/// Whoever needs it may be in any mode: of autograd, of autocast, of a compiler. The update is in
/// the optimizer's.
void DeferredUpdate::make() {
    const c10::impl::ForceDispatchKeyGuard keys(keys_);
    const ArithmeticGuard arithmetic(arithmetic_);
    const at::NoGradGuard no_grad;
    const c10::StreamGuard stream(stream_);
    const operator_guard::Aside aside;
    torch::jit::Stack stack(arguments_.begin(), arguments_.end());
    op_.callBoxed(&stack);
}

DeferredUpdates& DeferredUpdates::instance() {
    static auto* updates = new DeferredUpdates();
    return *updates;
}

void DeferredUpdates::add(std::unique_ptr<DeferredUpdate> update) {
    for (const c10::StorageImpl* storage : update->storages()) {
        make_for(storage);
    }
    const auto waiting = std::make_shared<Waiting>();
    waiting->update = std::move(update);
    MutexLock lock(mutex_);
    for (const c10::StorageImpl* storage : waiting->update->storages()) {
        by_storage_[storage] = waiting;
    }
    in_order_.push_back(waiting);
    waiting_.store(in_order_.size(), std::memory_order_release);
    count_.fetch_add(1);
}

void DeferredUpdates::make_for(const c10::StorageImpl* storage) {
    WaitingPtr waiting;
    {
        MutexLock lock(mutex_);
        const auto found = by_storage_.find(storage);
        if (found == by_storage_.end()) {
            return;
        }
        waiting = found->second;
    }
    make(waiting);
}

void DeferredUpdates::make_all() {
    if (PagerRegistry::instance().forked()) {
        return;  // The lock is as other threads of the parent left it.
    }
    for (;;) {
        WaitingPtr waiting;
        {
            MutexLock lock(mutex_);
            if (in_order_.empty() || in_order_.front()->maker == std::this_thread::get_id()) {
                return;
            }
            waiting = in_order_.front();
        }
        make(waiting);
    }
}

void DeferredUpdates::make(const WaitingPtr& waiting) {
    if (begin(waiting)) {
        std::exception_ptr fault;
        try {
            waiting->update->make();
        } catch (const std::exception& error) {
            fault = std::make_exception_ptr(errors::late_update_failed(error.what()));
        }
        end(waiting, fault);
    }
    if (waiting->made) {
        order_after(waiting->update->stream());
    }
}

/// False: it is made already, by another thread if need be; or it is this thread that is at it, and
/// its own operator that asks.
bool DeferredUpdates::begin(const WaitingPtr& waiting) {
    MutexLock lock(mutex_);
    if (waiting->maker == std::thread::id()) {
        waiting->maker = std::this_thread::get_id();
        return true;
    }
    while (waiting->maker != std::this_thread::get_id() && !waiting->made) {
        made_.wait(mutex_);
    }
    return false;
}

void DeferredUpdates::end(const WaitingPtr& waiting, std::exception_ptr fault) {
    {
        MutexLock lock(mutex_);
        for (const c10::StorageImpl* storage : waiting->update->storages()) {
            by_storage_.erase(storage);
        }
        in_order_.erase(std::find(in_order_.begin(), in_order_.end(), waiting));
        waiting_.store(in_order_.size(), std::memory_order_release);
        waiting->made = true;
        if (fault != nullptr && fault_ == nullptr) {
            fault_ = fault;
            has_fault_.store(true);
        }
    }
    made_.notify_all();
    if (fault != nullptr) {
        PagerRegistry::instance().for_each([&](Pager& pager) { pager.stop_with(fault); });
    }
}

void DeferredUpdates::check() const {
    if (!has_fault_.load()) {
        return;
    }
    std::exception_ptr fault;
    {
        MutexLock lock(mutex_);
        fault = fault_;
    }
    std::rethrow_exception(fault);
}

}  // namespace trainstream
