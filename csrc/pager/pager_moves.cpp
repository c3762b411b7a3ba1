// csrc/pager/pager_moves.cpp: finding room, moving out, moving in.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>

#include "base/assert.h"
#include "base/bytes.h"
#include "pager/pager.h"

namespace trainstream {

namespace {

// Other threads may take the room that an eviction made. After this many tries there is too little
// for all, and the storage is born cold.
constexpr int kMakeRoomTries = 8;

// Steps in which the host pool grows freely: the first allocates optimizer states, the second is
// the first that is like all later ones.
constexpr uint64_t kGrowingSteps = 2;

// What goes to the high end, as a part of its region. Logits and their gradients, mostly.
constexpr size_t kLargePart = 8;

/// What is paged, or spilled, is no sign of a want of room.
bool leaves_anyway(const Storage& storage) { return storage.paged || storage.spill != Spill::kNo; }

/// A device that refuses even that copies nothing any more.
void wait_on_host(const Event& event) noexcept {
    try {
        if (event != nullptr) {
            event->wait();
        }
    } catch (const std::exception&) {
    }
}

}  // namespace

void* Pager::take_block(size_t size_bytes, StreamId stream, Effort effort) {
    const std::vector<Region> regions = memory_.regions(stream);
    void* block = is_large(size_bytes, regions) ? take_high(size_bytes, stream, regions)
                                                : take_low(size_bytes, stream, regions);
    if (block != nullptr || effort == Effort::kFreeRoomOnly) {
        return block;
    }
    while (block == nullptr && extra_gives_way()) {
        block = take_block(size_bytes, stream, Effort::kFreeRoomOnly);
    }
    return block != nullptr ? block : take_block_by_evicting(size_bytes, stream);
}

/// What is half as large as the largest or less (16-bit logits beside their 32-bit copies) is not:
/// in the row of those it would leave a hole for none of them.
bool Pager::is_large(size_t size_bytes, const std::vector<Region>& regions) const {
    size_t region_bytes = 0;
    for (const Region& region : regions) {
        region_bytes = std::max<size_t>(region_bytes, region.end - region.begin);
    }
    if (region_bytes == 0 || size_bytes < region_bytes / kLargePart) {
        return false;
    }
    MutexLock lock(mutex_);
    return size_bytes > largest_bytes_ / 2;
}

/// Where it fits best, from the low end. Null: no room, as far as the map knows.
void* Pager::take_low(size_t size_bytes, StreamId stream, const std::vector<Region>& regions) {
    // Without regions only the memory itself knows.
    const bool may_fit = regions.empty() || highest_gap(regions, size_bytes).has_value();
    return may_fit ? memory_.allocate(size_bytes, stream) : nullptr;
}

/// What is large, and goes as a whole, lies at the high end, and all else at the low one: between
/// small blocks that stay, two large ones leave no room for a third, though there are bytes enough.
void* Pager::take_high(size_t size_bytes, StreamId stream, const std::vector<Region>& regions) {
    const std::optional<Region> gap = highest_gap(regions, size_bytes);
    return gap.has_value() ? memory_.allocate_high(size_bytes, stream, *gap) : nullptr;
}

std::optional<Region> Pager::highest_gap(const std::vector<Region>& regions, size_t need) const {
    MutexLock lock(mutex_);
    return map_.highest_gap(regions, need);
}

void* Pager::take_block_by_evicting(size_t size_bytes, StreamId stream) {
    if (watch_.load() == Watch::kOff) {
        start_watching();
    }
    for (int i = 0; i < kMakeRoomTries && may_move(); ++i) {
        const std::vector<StoragePtr> victims = choose(size_bytes, i, memory_.regions(stream));
        if (victims.empty()) {
            break;
        }
        bool moved = false;
        for (const StoragePtr& victim : victims) {
            if (evict(victim)) {
                moved = true;
                MutexLock lock(mutex_);
                peak_.pressed_bytes += leaves_anyway(*victim) ? 0 : victim->size_bytes();
                note_left(victim);
            }
        }
        void* block = moved ? memory_.allocate(size_bytes, stream) : nullptr;
        if (block != nullptr) {
            return block;
        }
    }
    if (!may_move() || !memory_.wants_rebuild(stream)) {
        return nullptr;
    }
    evict_each(movable());
    if (memory_.rebuild(stream)) {
        MutexLock lock(mutex_);
        ++stats_.rebuilds;
    }
    return memory_.allocate(size_bytes, stream);
}

std::vector<StoragePtr> Pager::choose(size_t size_bytes, int tries,
                                      const std::vector<Region>& regions) {
    // What was enough by the map's reckoning and not in truth: ask for a little more.
    const size_t more_bytes = static_cast<size_t>(tries) * memory_.slack_bytes();
    MutexLock lock(mutex_);
    std::vector<StoragePtr> victims = map_.coldest_window(regions, size_bytes + more_bytes, clock_);
    if (victims.empty()) {
        victims = map_.coldest_window(regions, size_bytes, clock_);
    }
    return victims;
}

std::vector<StoragePtr> Pager::movable() const {
    MutexLock lock(mutex_);
    return map_.movable();
}

uint64_t Pager::evict_all() {
    std::vector<StoragePtr> storages;
    {
        MutexLock lock(mutex_);
        for (const auto& [address, storage] : table_) {
            if (storage->movable()) {
                storages.push_back(storage);
            }
        }
    }
    uint64_t bytes = 0;
    for (const StoragePtr& storage : storages) {
        bytes += evict(storage) ? storage->size_bytes() : 0;
    }
    return bytes;
}

/// True: every one of them has left.
bool Pager::evict_each(const std::vector<StoragePtr>& storages) {
    bool all = true;
    for (const StoragePtr& storage : storages) {
        all = evict(storage) && all;
    }
    return all;
}

bool Pager::evict(const StoragePtr& storage) {
    void* owner = nullptr;
    {
        MutexLock lock(mutex_);
        if (storage->freed || !storage->movable() || !may_move()) {
            return false;
        }
        if (may_be_written_unseen(*storage)) {
            drop_host_copy(*storage);
        }
        storage->begin_evict();
        begin_move();
        owner = storage->owner;
    }
    if (!port_.hold(owner)) {
        // Its bytes are being freed at this moment, on another thread, or were handed on before.
        abandon_evict(storage, /*owner_is_stale=*/true);
        return false;
    }
    bool left = false;
    try {
        left = leave(storage, owner);
    } catch (const std::exception&) {
        abandon_evict(storage, /*owner_is_stale=*/false);
        MutexLock lock(mutex_);
        ++stats_.failures;
    }
    port_.release(owner);
    return left;
}

bool Pager::leave(const StoragePtr& storage, void* owner) {
    std::vector<StreamId> streams;
    Event ready;
    HostBlock own;
    bool clean = false;
    bool framed = false;
    bool unseen = false;
    {
        MutexLock lock(mutex_);
        unseen = is_used_unseen(*storage);
        streams = storage->streams();
        ready = storage->last_copy();
        own = storage->host();
        clean = storage->has_host_copy();
        framed = storage->in_frame();
    }
    if (clean) {
        if (options_.verify) {
            check_host_copy(storage);
        }
        if (framed) {
            return finish_evict(storage, owner, own, ready, events_of(streams, ready));
        }
        order_home_after(streams, storage->home());
        order_home_after_copies(*storage);
        return finish_evict(storage, owner, own, ready, {});
    }
    const std::optional<HostBlock> host = own ? own : host_block_for(storage->size_bytes());
    if (!host.has_value()) {
        abandon_evict(storage, /*owner_is_stale=*/false);
        return false;
    }
    Event done;
    try {
        // All that its streams have, announced or not: a kernel of an extension, a collective.
        const std::vector<Event> after = events_of(streams, ready);
        done = device_.copy(CopyDirection::kToHost, host->address, storage->device_address(),
                            storage->size_bytes(), after);
        if (!framed || unseen) {
            // The block may be taken again by work on its own stream as soon as this returns.
            step_clock_.wait(storage->home(), done, Stall::kRoom);
        }
    } catch (const std::exception&) {
        wait_on_host(done);  // No stream waits for a copy that may still read the block.
        if (!own) {
            host_.free(*host, {});
        }
        throw;
    }
    return finish_evict(storage, owner, *host, done, {done});
}

/// Making page-locked memory takes a millisecond for each 16 MiB, so it belongs to the first steps.
/// What is too little later is so because sizes vary: one larger range serves more of them.
std::optional<HostBlock> Pager::host_block_for(size_t size_bytes) {
    const bool grows_freely = may_grow_host();
    const HostPool::Growth growth =
        grows_freely ? HostPool::Growth::kAllowed : HostPool::Growth::kAhead;
    std::optional<HostBlock> host;
    if (!grows_freely) {
        host = host_block_of_old(size_bytes);
    }
    if (!host.has_value()) {
        host = host_.allocate(size_bytes, growth);
    }
    if (!host.has_value()) {
        {
            MutexLock lock(mutex_);
            drop_host_copies();
        }
        sweep();
        host = host_.allocate(size_bytes, growth);
    }
    return host;
}

bool Pager::may_grow_host() const {
    MutexLock lock(mutex_);
    return stats_.steps < kGrowingSteps;
}

/// From memory that the pool has: copies that only spare another copy are given up first. Then what
/// other sizes have left behind is joined, though that waits for the device.
std::optional<HostBlock> Pager::host_block_of_old(size_t size_bytes) {
    for (const HostPool::Growth growth : {HostPool::Growth::kForbidden, HostPool::Growth::kJoin}) {
        do {
            if (const std::optional<HostBlock> host = host_.allocate(size_bytes, growth)) {
                return host;
            }
        } while (give_up_host_copies(size_bytes, growth));
    }
    return std::nullopt;
}

/// Which storages are neighbours, and so leave together, goes on changing for some steps; one may
/// leave late for the first time. A free block as large as the largest of them, made at the end of
/// the growing steps, keeps that from locking memory in the middle of a step.
void Pager::reserve_spares() {
    size_t spare_bytes = 0;
    {
        MutexLock lock(mutex_);
        if (spare_reserved_ || stats_.steps < kGrowingSteps || stats_.evictions == 0) {
            return;
        }
        spare_reserved_ = true;
        spare_bytes = largest_bytes_;
    }
    if (const std::optional<HostBlock> spare = host_.allocate(spare_bytes)) {
        host_.free(*spare, {});
    }
    memory_.reserve_small_spare();
}

/// Clean storages lose the host copies that lie where `size_bytes` are to be: the hottest ones, as
/// they will leave last. False: there are none that would do.
bool Pager::give_up_host_copies(size_t size_bytes, HostPool::Growth growth) {
    std::vector<Event> copies;
    {
        MutexLock lock(mutex_);
        std::vector<StoragePtr> clean;
        std::vector<HostOffer> offers;
        for (const auto& [address, block] : map_.blocks()) {
            if (block.storage->is_clean()) {
                clean.push_back(block.storage);
                offers.push_back({block.storage->host(), block.storage->heat(clock_)});
            }
        }
        const std::optional<HostRun> run = host_.run_with(size_bytes, offers, growth);
        for (const StoragePtr& storage : clean) {
            const auto address = reinterpret_cast<uintptr_t>(storage->host().address);
            if (run.has_value() && run->has(address)) {
                copies.push_back(storage->last_copy());
                dropped_.emplace_back(storage->give_up_host_block(), copies.back());
            }
        }
        if (copies.empty()) {
            return false;
        }
        swept_.store(false);
    }
    sweep();
    if (growth == HostPool::Growth::kJoin) {
        for (const Event& copy : copies) {
            wait_on_host(copy);  // To join waits for the device too, and needs all of the run.
        }
    }
    return true;
}

/// Resident storages give up the copies that would have spared them one.
void Pager::drop_host_copies() {
    for (const auto& [address, storage] : table_) {
        if (storage->residency() != Residency::kResident) {
            continue;
        }
        if (const HostBlock block = storage->give_up_host_block()) {
            dropped_.emplace_back(block, storage->last_copy());
            swept_.store(false);
        }
    }
}

void Pager::order_home_after(const std::vector<StreamId>& streams, StreamId home) {
    for (const StreamId stream : streams) {
        if (stream != home) {
            device_.wait(home, device_.record(stream));
        }
    }
}

/// The device block is about to be given back, and a copy that nobody waited for may still read it
/// or write to it. The caller is the only one who moves the storage.
void Pager::order_home_after_copies(const Storage& storage) {
    order_after_copies(storage, storage.home());
}

void Pager::order_after_copies(const Storage& storage, StreamId stream) {
    Event event;
    {
        MutexLock lock(mutex_);
        event = storage.copied() != nullptr ? storage.copied() : storage.unsynced(stream);
    }
    if (event == nullptr || event->is_done()) {
        return;
    }
    if (capturing()) {
        event->wait();  // No outside event may be waited for inside a capture.
    } else {
        device_.wait(stream, event);
    }
}

void Pager::check_host_copy(const StoragePtr& storage) {
    // No copy is given up for it: copies are what is checked.
    std::optional<HostBlock> twin = host_.allocate(storage->size_bytes(), HostPool::Growth::kJoin);
    if (!twin.has_value()) {
        twin = host_.allocate(storage->size_bytes(), HostPool::Growth::kAhead);
    }
    if (!twin.has_value()) {
        return;
    }
    std::vector<StreamId> streams;
    Event ready;
    {
        MutexLock lock(mutex_);
        streams = storage->streams();
        ready = storage->last_copy();
    }
    try {
        const Event done =
            device_.copy(CopyDirection::kToHost, twin->address, storage->device_address(),
                         storage->size_bytes(), events_of(streams, ready));
        if (done != nullptr) {
            done->wait();
        }
    } catch (const std::exception&) {
        host_.free(*twin, {});
        throw;
    }
    const bool equal =
        std::memcmp(twin->address, storage->host().address, storage->size_bytes()) == 0;
    if (!equal) {
        // Right all the same: the bytes that the device has are what counts.
        std::memcpy(storage->host().address, twin->address, storage->size_bytes());
        std::fprintf(stderr,
                     "trainstream: verify: a storage of %s was written without being announced; "
                     "its bytes were kept. Please report the operator that writes it.\n",
                     format_bytes(storage->size_bytes()).c_str());
        MutexLock lock(mutex_);
        ++stats_.verify_faults;
    }
    host_.free(*twin, {});
}

/// `done`: what the host block waits for; `last`: what a frame waits for.
bool Pager::finish_evict(const StoragePtr& storage, void* owner, const HostBlock& host, Event done,
                         std::vector<Event> last) {
    void* block = nullptr;
    bool framed = false;
    {
        MutexLock lock(mutex_);
        const bool clean = storage->has_host_copy();
        void* from = storage->device_address();
        framed = storage->in_frame();
        if (!storage->freed && port_.repoint(owner, from, host.address)) {
            table_.erase(from);
            if (framed) {
                give_frame(*storage, std::move(last));
            } else {
                map_.erase(from);
                pressed_out_bytes_ += leaves_anyway(*storage) ? 0 : storage->size_bytes();
            }
            block = storage->finish_evict(host);
            end_move();
            storage->set_ready(std::move(done), framed ? std::vector<StreamId>{}
                                                       : std::vector<StreamId>{storage->home()});
            table_.emplace(host.address, storage);
            stats_.cold_bytes += storage->size_bytes();
            (clean ? stats_.dropped_bytes : stats_.evicted_bytes) += storage->size_bytes();
            ++stats_.evictions;
        } else if (!clean) {
            storage->set_ready(done, {});  // It still reads the device block.
            const HostBlock own = storage->give_up_host_block();
            dropped_.emplace_back(own ? own : host, done);
            swept_.store(false);
        }
        check_invariants();
    }
    if (block == nullptr) {
        // Its owner gave the bytes to another, or let go of them.
        abandon_evict(storage, /*owner_is_stale=*/true);
        return false;
    }
    settled_.notify_all();
    if (!framed) {
        memory_.free(block);
    }
    return true;
}

/// A storage whose owner is stale stays until an operator names the new one.
void Pager::abandon_evict(const StoragePtr& storage, bool owner_is_stale) {
    bool freed = false;
    {
        MutexLock lock(mutex_);
        storage->cancel_evict();
        end_move();
        freed = storage->freed;
        if (freed && !storage->in_frame()) {
            map_.erase(storage->device_address());
        }
        if (freed || owner_is_stale) {
            forget_later(*storage);
        }
        check_invariants();
    }
    settled_.notify_all();
    if (freed) {
        free_blocks(storage);
    }
    sweep();
}

void Pager::restore(const Entry& entry, StreamId stream, Effort effort) {
    const StoragePtr& storage = entry.storage;
    if (effort == Effort::kEvict && load_on_demand(storage)) {
        return;
    }
    std::vector<StreamId> streams;
    Event ready;
    {
        MutexLock lock(mutex_);
        while (storage->in_transition()) {
            wait_for_transition(storage);  // Another thread brings it in for its own operator.
        }
        if (!storage->may_come_in() || storage->freed || !may_move()) {
            return;
        }
        storage->begin_restore();
        begin_move();
        streams = storage->streams();
        ready = storage->ready();
    }
    Event done;
    void* block = nullptr;
    try {
        block = take_block(storage->size_bytes(), storage->home(), effort);
        if (block == nullptr && !storage->host().device_visible) {
            block = memory_.allocate_beyond_budget(storage->size_bytes(), storage->home());
        }
        if (block == nullptr) {
            cancel_restore(storage, /*failed=*/false);
            return;
        }
        done = device_.copy(CopyDirection::kToDevice, block, storage->host().address,
                            storage->size_bytes(), events_of(streams, ready));
        step_clock_.wait(storage->home(), done, Stall::kDemand);
        if (stream != storage->home()) {
            step_clock_.wait(stream, done, Stall::kDemand);
        }
    } catch (const std::exception&) {
        wait_on_host(done);
        if (block != nullptr) {
            memory_.free(block);
        }
        cancel_restore(storage, /*failed=*/true);
        return;
    }
    finish_restore(entry, stream, block, done);
}

void Pager::finish_restore(const Entry& entry, StreamId stream, void* block, const Event& done) {
    const StoragePtr& storage = entry.storage;
    bool moved = false;
    {
        MutexLock lock(mutex_);
        moved = finish_move_in(storage, entry.owner, block, done, {storage->home(), stream},
                               /*in_frame=*/false);
        if (moved) {
            note_resident(storage);
            if (storage->paged) {
                note_paged(storage);
            }
            spill_moves_ += storage->spill != Spill::kNo ? 1 : 0;  // It had left without need.
        }
        check_invariants();
    }
    if (!moved) {
        memory_.free(block);
        cancel_restore(storage, /*failed=*/false);
        return;
    }
    settled_.notify_all();
}

bool Pager::finish_move_in(const StoragePtr& storage, void* owner, void* block, const Event& done,
                           std::vector<StreamId> synced, bool in_frame) {
    void* from = storage->host().address;
    if (storage->freed || !port_.repoint(owner, from, block)) {
        return false;
    }
    table_.erase(from);
    storage->finish_restore(block, in_frame);
    end_move();
    storage->set_ready(done, std::move(synced));
    if (may_be_written_unseen(*storage)) {
        drop_host_copy(*storage);  // It may be written before anybody looks for a copy.
    }
    table_.emplace(block, storage);
    stats_.cold_bytes -= storage->size_bytes();
    stats_.restored_bytes += storage->size_bytes();
    ++stats_.restores;
    return true;
}

void Pager::cancel_restore(const StoragePtr& storage, bool failed) {
    bool freed = false;
    {
        MutexLock lock(mutex_);
        storage->cancel_restore();
        end_move();
        stats_.failures += failed ? 1 : 0;
        freed = storage->freed;
        if (freed) {
            stats_.cold_bytes -= storage->size_bytes();
            forget_later(*storage);
        }
        check_invariants();
    }
    settled_.notify_all();
    if (freed) {
        free_blocks(storage);
        sweep();
    }
}

}  // namespace trainstream
