// csrc/pager/pager_paging.cpp: storages that somebody says belong out, and what a step needed.
#include <algorithm>

#include "base/assert.h"
#include "pager/pager.h"

namespace trainstream {

void Pager::page(const std::vector<void*>& owners) {
    std::vector<StoragePtr> leaving;
    {
        MutexLock lock(mutex_);
        for (void* owner : owners) {
            const StoragePtr storage = settled(owner);
            if (storage == nullptr || storage->paged) {
                continue;
            }
            note_owner(storage, owner);
            storage->paged = true;
            ++paged_storages_;
            note_paged(storage);
            leaving.push_back(storage);
            // A plan is for what lives through steps. What was made in this one, a gradient, is
            // none of it, and is paged anew each step.
            if (plan_ != nullptr && can_be_planned(*storage)) {
                plan_->retiring = true;
            }
        }
    }
    if (leaving.empty()) {
        return;
    }
    if (watch_.load() == Watch::kOff) {
        start_watching();  // They leave once uses are announced again.
    }
    evict_each(leaving);
    sweep();
}

void Pager::unpage(const std::vector<void*>& owners, StreamId stream) {
    std::vector<Use> uses;
    for (void* owner : owners) {
        if (has_plan_.load()) {
            take_out_of_plan(owner);
        }
        MutexLock lock(mutex_);
        if (const StoragePtr storage = settled(owner)) {
            paged_storages_ -= storage->paged ? 1 : 0;
            storage->paged = false;
            uses.push_back({owner, /*writes=*/false, UseKind::kBringIn});
        }
    }
    for (const Use& use : uses) {  // One at a time: what is pinned at once could not make room.
        Pins pins;
        begin_use({use}, stream, &pins);
        {
            MutexLock lock(mutex_);
            for (const Pin& pin : pins) {
                const HostBlock copy = pin.storage->give_up_host_block();
                if (copy) {
                    dropped_.emplace_back(copy, pin.storage->ready());
                    swept_.store(false);
                }
            }
        }
        end_use(&pins);
    }
    {
        MutexLock lock(mutex_);
        if (paged_storages_ == 0) {
            moves_at_last_step_ = moves();  // None of that was for want of room.
        }
    }
    sweep();
}

void Pager::set_paged_room(uint64_t room_bytes) {
    MutexLock lock(mutex_);
    paged_room_bytes_ = room_bytes;
}

PeakInfo Pager::take_peak() {
    MutexLock lock(mutex_);
    const PeakInfo peak = peak_;
    peak_ = {.device_bytes = device_bytes(), .pressed_bytes = 0};
    return peak;
}

uint64_t Pager::device_bytes() const {
    uint64_t bytes = map_.bytes();
    if (plan_ != nullptr && plan_->is_laid()) {
        bytes += plan_->arena->size_bytes() + plan_->extra.size() * plan_->sizes.segment_bytes;
    }
    return bytes;
}

void Pager::note_peak() { peak_.device_bytes = std::max(peak_.device_bytes, device_bytes()); }

/// It has a block of the device's pool from now on.
void Pager::note_resident(const StoragePtr& storage) {
    map_.insert(storage);
    resident_peak_bytes_ = std::max(resident_peak_bytes_, map_.bytes());
    note_peak();
}

/// It is on the device, or will be found not to be.
void Pager::note_paged(const StoragePtr& storage) {
    paged_in_.push_back(storage);
    has_paged_in_.store(true);
}

/// What is in use now, or was last, may stay as far as the room goes: a layer's next operator, or
/// its backward pass, would ask for it again.
void Pager::trim_paged() {
    std::vector<StoragePtr> leaving;
    {
        MutexLock lock(mutex_);
        if (!may_move()) {
            return;
        }
        leaving = paged_past_room();
    }
    evict_each(leaving);
    if (!leaving.empty()) {
        sweep();
    }
}

std::vector<StoragePtr> Pager::paged_past_room() {
    const auto gone = [](const StoragePtr& storage) {
        const bool out = !storage->in_transition() && storage->device_address() == nullptr;
        return !storage->paged || storage->freed || out || storage->in_frame() ||
               storage->pinned_for_good();
    };
    paged_in_.erase(std::remove_if(paged_in_.begin(), paged_in_.end(), gone), paged_in_.end());
    has_paged_in_.store(!paged_in_.empty());
    // With frames for what is used again, the rest is what waits for the end of the step.
    const bool framed = plan_ != nullptr && plan_->is_laid();
    const uint64_t room_bytes = framed ? 0 : paged_room_bytes_;
    uint64_t bytes = 0;
    for (const StoragePtr& storage : paged_in_) {
        bytes += storage->size_bytes();
    }
    std::vector<StoragePtr> past;
    if (bytes <= room_bytes) {
        return past;
    }
    std::sort(paged_in_.begin(), paged_in_.end(), [](const StoragePtr& a, const StoragePtr& b) {
        return a->last_use() > b->last_use();
    });
    bytes = 0;
    for (const StoragePtr& storage : paged_in_) {
        bytes += storage->size_bytes();
        if (bytes > room_bytes && storage->movable()) {
            past.push_back(storage);
        }
    }
    return past;
}

}  // namespace trainstream
