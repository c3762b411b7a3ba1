// csrc/pager/pager_returns.cpp: what left in the step that made it comes back before it is asked
// for.
//
// What a forward pass keeps for backward leaves for want of room like all else, at the latest for
// the logits, and no plan knows it: it is new in each step. Backward asks for it in the reverse
// order of its making, so the first of it that is used again says what comes next. Brought in on
// demand, each would have the device wait for a copy; read where it is, for one copy and more at
// each use (1.26 B parameters under 4.1 GiB: 18 checkpoints of 34 MB, each read twice over the
// link, 30 ms of a step).
#include <iterator>
#include <utility>

#include "pager/pager.h"

namespace trainstream {

namespace {

// Of the budget, what may be on the device ahead of its use, and one storage more.
constexpr uint64_t kAheadPart = 64;

// Boundaries at which room is looked for until the next return, and how far they are apart.
constexpr int kTries = 64;
constexpr int kTryEach = 8;

}  // namespace

/// It left for want of room; by now it may have come back already, or be gone.
void Pager::note_left(const StoragePtr& storage) {
    const bool is_of_this_step = storage->born_step == stats_.steps;
    const bool leaves_anyway = storage->paged || storage->spill != Spill::kNo;
    if (storage->freed || !is_of_this_step || leaves_anyway || storage->item != Storage::kNoItem ||
        storage->brought_back) {
        return;
    }
    storage->left_early = true;
    left_early_.emplace(storage->serial, storage);
}

void Pager::note_return(Storage& storage) {
    left_early_.erase(storage.serial);
    returned_serial_ = storage.serial;
    return_tries_.store(left_early_.empty() ? 0 : kTries);
}

/// Called at a boundary, with nothing held.
void Pager::bring_back() {
    const int left = return_tries_.fetch_sub(1) - 1;
    if ((left + 1) % kTryEach != 0) {
        return;
    }
    const bool known = port_.all_kernels_known();
    std::vector<StoragePtr> next;
    {
        MutexLock lock(mutex_);
        if (known && !all_uses_announced()) {
            return;  // At a later boundary, as without room.
        }
        if (known) {
            next = next_to_return();
        }
    }
    for (const StoragePtr& storage : next) {
        if (!bring_in_ahead(storage, Holders::kAny)) {
            return;  // There is no room: at a later boundary.
        }
        MutexLock lock(mutex_);
        storage->brought_back = true;
        last_brought_back_[storage->home()] = storage;
    }
    return_tries_.store(0);
    sweep();
}

/// No stream waits for what is brought back until an operator names it, or its address is asked
/// for. A Python function may hand it to a kernel that nobody announces.
bool Pager::all_uses_announced() const {
    const bool of_late = last_unseen_step_ != 0 && last_unseen_step_ >= stats_.steps;
    return !of_late && unseen_steps_ == 0 && unseen_functions_ == 0 && !began_unheard_;
}

/// A kernel that nobody announces may follow, on a home stream or on `stream`. Copies end in the
/// order in which they began, so the last stands for all.
void Pager::order_after_returns(StreamId stream) {
    std::map<StreamId, StoragePtr> last;
    {
        MutexLock lock(mutex_);
        last = last_brought_back_;
    }
    for (const auto& [home, storage] : last) {
        order_after_copies(*storage, home);
        if (stream != home) {
            order_after_copies(*storage, stream);
        }
    }
}

/// What was made last before the one that was used last, as far as it may be there ahead.
std::vector<StoragePtr> Pager::next_to_return() {
    std::vector<StoragePtr> next;
    const uint64_t ahead_max = memory_.budget_bytes() / kAheadPart;
    uint64_t ahead_bytes = 0;
    auto made = left_early_.lower_bound(returned_serial_);
    for (; made != left_early_.begin() && ahead_bytes < ahead_max; --made) {
        const StoragePtr& storage = std::prev(made)->second;
        const bool comes = storage->may_come_in() && !storage->brought_back;
        if (comes) {
            next.push_back(storage);
        }
        if (comes || storage->residency() != Residency::kCold) {
            ahead_bytes += storage->size_bytes();
        }
    }
    return next;
}

}  // namespace trainstream
