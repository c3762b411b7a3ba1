// csrc/pager/pager_unseen.cpp: kernels that nobody announces. Those of apex or DeepSpeed, of a
// Python function and of its backward pass: they write to what they were given, at any time until
// they end.
#include "base/assert.h"
#include "pager/pager.h"

namespace trainstream {

/// In this step or the last one. No stream waits for a load or for what left a frame until an
/// operator names the storage, so such a kernel might find bytes that are still on their way. What
/// is moved on demand is in order for its home stream at once.
bool Pager::is_used_unseen(const Storage& storage) const {
    return storage.unseen_step != 0 && storage.unseen_step >= stats_.steps;
}

/// Its host copy, if it has one, may be out of date already: it was made, or the storage was
/// brought in, between two such writes. A function writes to what it makes, too.
bool Pager::may_be_written_unseen(const Storage& storage) const {
    const bool made_within = unseen_functions_ > 0 && storage.serial > serial_before_functions_;
    return unseen_steps_ > 0 || storage.unseen_writers > 0 || made_within || began_unheard_;
}

void Pager::note_unseen(StreamId stream) {
    {
        MutexLock lock(mutex_);
        last_unseen_step_ = stats_.steps + 1;
    }
    order_after_returns(stream);
}

std::vector<StoragePtr> Pager::begin_unseen(const Pins& pins, StreamId stream) {
    std::vector<StoragePtr> storages;
    {
        MutexLock lock(mutex_);
        if (unseen_functions_++ == 0) {
            serial_before_functions_ = serials_;
        }
        for (const Pin& pin : pins) {
            ++pin.storage->unseen_writers;
            storages.push_back(pin.storage);
        }
    }
    try {
        order_after_returns(stream);
    } catch (const std::exception&) {
        end_unseen(storages);
        throw;
    }
    return storages;
}

void Pager::end_unseen(const std::vector<StoragePtr>& storages) noexcept {
    MutexLock lock(mutex_);
    TS_ASSERT_GT(unseen_functions_, 0u);
    --unseen_functions_;
    for (const StoragePtr& storage : storages) {
        TS_ASSERT_GT(storage->unseen_writers, 0u);
        --storage->unseen_writers;
        if (!storage->freed) {
            drop_host_copy(*storage);  // Of what is on the device; on the host the write is there.
        }
    }
}

void Pager::begin_unseen_step(StreamId stream) {
    {
        MutexLock lock(mutex_);
        ++unseen_steps_;
    }
    try {
        order_after_returns(stream);
    } catch (const std::exception&) {
        end_unseen_step();
        throw;
    }
}

void Pager::end_unseen_step() noexcept {
    MutexLock lock(mutex_);
    TS_ASSERT_GT(unseen_steps_, 0u);
    --unseen_steps_;
}

}  // namespace trainstream
