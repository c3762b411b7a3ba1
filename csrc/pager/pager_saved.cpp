// csrc/pager/pager_saved.cpp: what is saved for backward leaves early and comes back early.
//
// Saved tensors are storages like others, and eviction on demand would do. But who saves one knows
// more: nothing needs it before backward, and backward asks in reverse. So it is copied out while
// the forward pass goes on, given up once the copy has ended, and brought in before it is asked
// for; no stream waits for either copy, but for room.
//
// Cold is what nothing but saved tensors holds. That is exact: no operator, announced or not, can
// read or write it before one of them is unpacked, and parameters, buffers and their views are
// held by their modules.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <iterator>
#include <utility>

#include "base/assert.h"
#include "pager/pager.h"

namespace trainstream {

namespace {

// Storages looked at for each boundary. A layer saves some 20 that its own frame still holds.
constexpr size_t kLooks = 8;

// Looks after which whoever holds a storage counts as keeping it: a model its frozen weight, a
// script its list of hidden states. A layer's own variables live for some 60 operators.
constexpr int kLooksMax = 256;

// Of the budget, what may be on its way out. The host is often a whole forward pass ahead of the
// device, and would find no copy ended before all is allocated; so beyond this the home stream
// waits for the oldest copy, which has ended by then unless the link is slower than the kernels.
constexpr uint64_t kOnItsWayPart = 32;

// A step whose peak leaves this part of the budget free fits, whatever lies between its blocks.
constexpr uint64_t kSparePart = 16;

// Of the budget of one that does not, what is for weights and states that stream through and for
// what comes back. The rest is for what the step makes.
constexpr uint64_t kStreamPart = 4;

/// Backward is about to ask for it, so it no longer leaves. True: it has left.
bool returns_to_backward(const StoragePtr& storage) {
    if (storage->spill == Spill::kNo) {
        return false;
    }
    storage->spill = Spill::kReturned;
    return storage->residency() == Residency::kCold;
}

void wait_on_host(const Event& event) noexcept {
    try {
        if (event != nullptr) {
            event->wait();
        }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());  // Such a device copies nothing any more.
    }
}

}  // namespace

Save Pager::save(const void* owner) {
    MutexLock lock(mutex_);
    const auto found = table_.find(port_.address_of(owner));
    if (found == table_.end()) {
        return {};
    }
    const StoragePtr& storage = found->second;
    ++storage->saved_count;
    const bool is_new = storage->saved_count == 1 && storage->spill == Spill::kNo;
    const bool is_of_this_step = storage->born_step == stats_.steps;
    const bool stays = storage->pinned_for_good() || storage->item != Storage::kNoItem;
    return {storage, is_new && !stays, is_new && is_of_this_step && !stays};
}

void Pager::unsave(const StoragePtr& storage) noexcept {
    MutexLock lock(mutex_);
    TS_ASSERT_GT(storage->saved_count, size_t{0});
    if (--storage->saved_count == 0) {
        storage->spill = Spill::kNo;
    }
}

void Pager::spill(const StoragePtr& storage, bool by_need) {
    {
        MutexLock lock(mutex_);
        if (by_need) {
            if (spill_wish_bytes_ >= spill_need_bytes_) {
                return;
            }
            spill_wish_bytes_ += storage->size_bytes();
        }
        if (storage->freed || storage->spill != Spill::kNo || closed_.load()) {
            return;
        }
        storage->spill = Spill::kWaiting;
        storage->spill_looks = 0;
        spill_waiting_.push_back(storage);
        spilling_.store(true);
        has_spilled_.store(true);
    }
    if (watch_.load() == Watch::kOff) {
        start_watching();
    }
}

/// By how much the step that has ended was too large, beside what a plan streams. Its first saved
/// tensors are to leave: backward needs them last, so there is most time to hide their copies.
void Pager::plan_spills(uint64_t live_peak_bytes) {
    const uint64_t budget = memory_.budget_bytes();
    spill_wish_bytes_ = 0;
    spill_need_bytes_ = 0;
    if (live_peak_bytes > budget - budget / kSparePart) {
        const uint64_t beside_bytes = bytes_not_planned(live_peak_bytes);
        spill_need_bytes_ = beside_bytes - std::min(beside_bytes, budget - budget / kStreamPart);
    }
}

/// Called at a boundary, with nothing held.
void Pager::work_on_spills() {
    {
        MutexLock lock(mutex_);
        if (spill_busy_ || !may_move()) {
            return;
        }
        spill_busy_ = true;
    }
    copy_what_is_cold();
    drop_what_is_copied();
    {
        MutexLock lock(mutex_);
        spill_busy_ = false;
        spilling_.store(!spill_waiting_.empty() || !spill_copying_.empty());
    }
    sweep();
}

/// Copies end in the order in which they began, so only the first is asked about.
void Pager::drop_what_is_copied() {
    const uint64_t on_its_way_max = memory_.budget_bytes() / kOnItsWayPart;
    for (;;) {
        StoragePtr storage;
        Event copied;
        bool leaves = false;
        {
            MutexLock lock(mutex_);
            if (spill_copying_.empty()) {
                return;
            }
            storage = spill_copying_.front();
            leaves = storage->spill == Spill::kLeaving && storage->is_clean();
            const uint64_t later_bytes = spill_copying_bytes_ - storage->size_bytes();
            copied = later_bytes < on_its_way_max ? storage->copied() : nullptr;
        }
        if (leaves && copied != nullptr && !copied->is_done()) {
            return;
        }
        const bool left = leaves && evict(storage);
        MutexLock lock(mutex_);
        spill_moves_ += left ? 1 : 0;
        spill_copying_.pop_front();
        spill_copying_bytes_ -= storage->size_bytes();
    }
}

void Pager::copy_what_is_cold() {
    size_t looks = 0;
    {
        MutexLock lock(mutex_);
        looks = std::min(kLooks, spill_waiting_.size());  // At each once.
    }
    for (; looks > 0; --looks) {
        StoragePtr storage;
        {
            MutexLock lock(mutex_);
            storage = next_cold();
        }
        if (storage != nullptr && copy_out_ahead(storage)) {
            MutexLock lock(mutex_);
            spill_copying_.push_back(storage);
            spill_copying_bytes_ += storage->size_bytes();
        }
    }
}

/// The first that waits, if it is cold now; else it goes to the end, or is given up.
StoragePtr Pager::next_cold() {
    StoragePtr storage = std::move(spill_waiting_.front());
    spill_waiting_.pop_front();
    if (storage->freed || storage->spill != Spill::kWaiting || storage->pinned_for_good()) {
        return nullptr;
    }
    if (storage->movable() && only_saved(*storage)) {
        storage->spill = Spill::kLeaving;
        return storage;
    }
    const bool has_left = storage->residency() == Residency::kCold;
    if (has_left || ++storage->spill_looks >= kLooksMax) {
        storage->spill = has_left ? Spill::kLeaving : Spill::kNo;
        return nullptr;
    }
    spill_waiting_.push_back(std::move(storage));
    return nullptr;
}

bool Pager::only_saved(const Storage& storage) const {
    return storage.owner != nullptr && port_.holders(storage.owner) <= storage.saved_count;
}

/// Gives a resident storage a host copy, and stays with what it has if that fails. No stream waits.
/// While it counts as leaving, nobody uses it, writes to it or frees its blocks.
bool Pager::copy_out_ahead(const StoragePtr& storage) {
    void* owner = nullptr;
    {
        MutexLock lock(mutex_);
        if (storage->freed || !storage->movable() || !may_move()) {
            return false;
        }
        if (storage->host().address != nullptr) {
            return storage->has_host_copy();
        }
        storage->begin_evict();
        begin_move();
        owner = storage->owner;
    }
    if (!port_.hold(owner)) {
        abandon_evict(storage, /*owner_is_stale=*/true);
        return false;
    }
    bool copied = true;
    try {
        copied = copy_to_new_host_block(storage);
    } catch (const std::exception&) {
        copied = false;
        MutexLock lock(mutex_);
        ++stats_.failures;
    }
    abandon_evict(storage, /*owner_is_stale=*/false);
    port_.release(owner);
    return copied;
}

bool Pager::copy_to_new_host_block(const StoragePtr& storage) {
    const std::optional<HostBlock> host = host_block_for(storage->size_bytes());
    if (!host.has_value()) {
        return false;
    }
    if (!host->page_locked) {
        host_.free(*host, {});  // The driver would have the host wait for such a copy.
        return false;
    }
    std::vector<StreamId> streams;
    Event last;
    {
        MutexLock lock(mutex_);
        streams = storage->streams();
        last = storage->last_copy();
    }
    Event copied;
    try {
        copied = device_.copy(CopyDirection::kToHost, host->address, storage->device_address(),
                              storage->size_bytes(), events_of(streams, last));
    } catch (const std::exception&) {
        host_.free(*host, {});
        throw;
    }
    MutexLock lock(mutex_);
    storage->set_host_copy(*host, std::move(copied));
    stats_.evicted_bytes += storage->size_bytes();
    stats_.spilled_bytes += storage->size_bytes();
    return true;
}

void Pager::unpack(const StoragePtr& storage, StreamId stream,
                   const std::vector<StoragePtr>& next) {
    Event ready;
    std::vector<StoragePtr> away;
    {
        MutexLock lock(mutex_);
        std::copy_if(next.begin(), next.end(), std::back_inserter(away), returns_to_backward);
        if (storage->spill != Spill::kNo) {
            storage->spill = Spill::kReturned;
            storage->touch(clock_);
            // A kernel that nobody announces may write to it from here on, and most likely this was
            // its last use.
            drop_host_copy(*storage);
        }
        if (storage->residency() == Residency::kResident && !storage->freed) {
            storage->used_by(stream);
            ready = storage->unsynced(stream);
        }
    }
    if (ready != nullptr) {
        if (capturing()) {
            ready->wait();
        } else {
            step_clock_.wait(stream, ready, Stall::kLate);
        }
        MutexLock lock(mutex_);
        storage->note_waited(stream, ready);
    }
    for (const StoragePtr& other : away) {
        if (!bring_in_ahead(other, Holders::kSavedTensors)) {
            break;
        }
    }
    sweep();
}

/// False: there is no room for it, so none for what comes after it.
bool Pager::bring_in_ahead(const StoragePtr& storage, Holders holders) {
    void* owner = nullptr;
    {
        MutexLock lock(mutex_);
        const bool can =
            storage->may_come_in() && storage->host().page_locked && !storage->freed && may_move();
        const bool may_be_missed = holders == Holders::kSavedTensors && !only_saved(*storage);
        if (!can || may_be_missed) {
            return true;  // Whoever else holds it might find it half come.
        }
        storage->begin_restore();
        begin_move();
        owner = storage->owner;
    }
    if (!port_.hold(owner)) {
        cancel_restore(storage, /*failed=*/false);
        return true;
    }
    const bool has_room = load_ahead_into_pool(storage, owner);
    port_.release(owner);
    return has_room;
}

/// True: it came in, or something else than room is missing.
bool Pager::load_ahead_into_pool(const StoragePtr& storage, void* owner) {
    Event done;
    void* block = nullptr;
    try {
        block = take_block(storage->size_bytes(), storage->home(), Effort::kFreeRoomOnly);
        if (block == nullptr) {
            cancel_restore(storage, /*failed=*/false);
            return false;
        }
        std::vector<Event> after;
        add_events_before_load(*storage, &after);
        done = device_.copy(CopyDirection::kToDevice, block, storage->host().address,
                            storage->size_bytes(), after);
    } catch (const std::exception&) {
        if (block != nullptr) {
            memory_.free(block);
        }
        cancel_restore(storage, /*failed=*/true);
        return true;
    }
    bool moved = false;
    {
        MutexLock lock(mutex_);
        moved = finish_move_in(storage, owner, block, done, {}, /*in_frame=*/false);
        if (moved) {
            note_resident(storage);
            storage->touch(clock_);
            stats_.returned_bytes += storage->size_bytes();
            spill_moves_ += storage->spill != Spill::kNo ? 1 : 0;
        }
        check_invariants();
    }
    if (moved) {
        settled_.notify_all();
    } else {
        wait_on_host(done);
        memory_.free(block);
        cancel_restore(storage, /*failed=*/false);
    }
    return true;
}

}  // namespace trainstream
