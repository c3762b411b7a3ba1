// csrc/pager/pager_pending.cpp: writes that another thread makes later. An optimizer's updates of
// weights in host memory go on while the next step begins, and each weight waits for its own only.
#include <algorithm>
#include <exception>
#include <utility>

#include "base/assert.h"
#include "pager/pager.h"

namespace trainstream {

namespace {

/// Pending writes are this thread's work.
thread_local bool t_makes_pending_writes = false;

}  // namespace

StoragePtr Pager::announce_write(void* owner) {
    MutexLock lock(mutex_);
    StoragePtr storage = settled(owner);
    if (storage == nullptr) {
        return nullptr;
    }
    note_owner(storage, owner);
    ++storage->pending_writes;
    ++pending_writes_;
    return storage;
}

void Pager::end_write(const StoragePtr& storage, std::optional<StreamId> stream) {
    Event written;
    std::exception_ptr fault;
    try {
        written = stream.has_value() ? device_.record(*stream) : nullptr;
    } catch (const std::exception&) {
        fault = std::current_exception();  // Once nobody waits any more.
    }
    {
        MutexLock lock(mutex_);
        TS_ASSERT_GT(storage->pending_writes, 0u);
        --storage->pending_writes;
        --pending_writes_;
        if (written != nullptr) {
            storage->used_by(*stream);
            storage->set_written(std::move(written), *stream);
        }
    }
    settled_.notify_all();
    if (fault != nullptr) {
        std::rethrow_exception(fault);
    }
}

void Pager::wait_for_all_writes() {
    if (t_makes_pending_writes) {
        return;
    }
    port_.make_updates();
    MutexLock lock(mutex_);
    wait_while([this]() TS_REQUIRES(mutex_) { return pending_writes_ > 0; });
}

void Pager::make_pending_writes() { t_makes_pending_writes = true; }

/// Not where somebody pages blocks by the peaks of steps: what is left of one would count as the
/// next one's.
bool Pager::may_leave_pending() const {
    MutexLock lock(mutex_);
    return paged_storages_ == 0 && plan_ != nullptr && plan_->is_laid() && !plan_->retiring &&
           may_move();
}

/// With several threads one could launch what it has an address for; with paged blocks peaks of
/// steps count. A graph has addresses for good, and reads what it likes whenever it is replayed.
bool Pager::may_defer(const std::vector<void*>& owners) const {
    if (was_capturing_.load() || port_.user_threads() > 1 || !port_.all_announced()) {
        return false;
    }
    MutexLock lock(mutex_);
    const bool moves = stats_.evictions > 0 && may_move() && paged_storages_ == 0;
    if (!moves || unseen_steps_ > 0 || unseen_functions_ > 0 || began_unheard_) {
        return false;
    }
    return std::all_of(owners.begin(), owners.end(), [&](const void* owner) TS_REQUIRES(mutex_) {
        const auto found = table_.find(port_.address_of(owner));
        if (found == table_.end()) {
            return false;  // Nobody knows who has an address of it.
        }
        const Storage& storage = *found->second;
        const bool reachable = storage.host().address == nullptr || storage.host().device_visible;
        return !storage.pinned_for_good() && reachable;
    });
}

void Pager::stop_with(std::exception_ptr fault) {
    MutexLock lock(mutex_);
    if (fault_ == nullptr) {
        fault_ = std::move(fault);
        has_fault_.store(true);
    }
}

/// Where nobody else moves it, nor is about to write what the use touches.
StoragePtr Pager::settled_for(const Use& use, StreamId stream) {
    const bool touches_bytes = use.kind != UseKind::kMetadata || use.writes;
    StoragePtr storage = settled(use.owner);
    while (touches_bytes && !t_makes_pending_writes && storage != nullptr &&
           storage->pending_writes > 0) {
        wait_for_writes(storage, stream);
        storage = settled(use.owner);  // It may have another address now.
    }
    return storage;
}

void Pager::wait_for_writes(const StoragePtr& storage, StreamId stream) {
    mutex_.unlock();
    if (!capturing()) {
        step_clock_.update_began(stream);
    }
    mutex_.lock();
    wait_while([&] { return storage->pending_writes > 0; });
    mutex_.unlock();
    if (!capturing()) {
        step_clock_.update_ended(stream);
    }
    mutex_.lock();
}

}  // namespace trainstream
