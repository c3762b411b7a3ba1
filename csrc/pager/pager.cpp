// csrc/pager/pager.cpp: allocation, uses and bookkeeping. The moves are in pager_moves.cpp.
#include "pager/pager.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>

#include "base/assert.h"
#include "base/bytes.h"

namespace trainstream {

namespace {

// Announced uses that must pass after watching starts again before anything may move: operators in
// flight at that moment were not announced, and the few operators each of them calls look
// outermost. Of all threads together; the roster wants half as many of each.
constexpr int kWarmUpBoundaries = 128;

// Steps without a move after which a run counts as one that fits.
constexpr uint64_t kQuietSteps = 2;

// Device memory outside the regions, as a part of the budget, that is worth moving everything for.
constexpr uint64_t kScatteredPart = 64;

/// Storages that this thread has in transition, of all pagers.
thread_local int t_moves = 0;

/// Only a broken device refuses an event; the block that waits for it is lost.
void say_lost(const std::exception& error) { std::fprintf(stderr, "%s\n", error.what()); }

}  // namespace

Pager::Pager(Device& device, DeviceMemory& memory, HostPool& host, OwnerPort& port,
             const PagerOptions& options)
    : device_(device),
      memory_(memory),
      host_(host),
      port_(port),
      options_(options),
      step_clock_(device),
      map_(memory.slack_bytes()) {}

void* Pager::allocate(size_t size_bytes, StreamId stream) {
    if (has_fault_.load(std::memory_order_relaxed)) {
        MutexLock lock(mutex_);
        std::rethrow_exception(fault_);
    }
    sweep();
    void* block = take_block(size_bytes, stream, Effort::kEvict);
    if (block == nullptr && give_way(size_bytes)) {
        block = take_block(size_bytes, stream, Effort::kEvict);
    }
    if (block == nullptr) {
        return born_cold(size_bytes, stream);
    }
    add(std::make_shared<Storage>(size_bytes, stream, block));
    return block;
}

void* Pager::born_cold(size_t size_bytes, StreamId stream) {
    const std::optional<HostBlock> host = host_block_for(size_bytes);
    if (!host.has_value() && give_plan_up()) {
        return allocate(size_bytes, stream);  // Once: there is no plan any more.
    }
    if (!host.has_value()) {
        throw_out_of_memory(size_bytes);
    }
    if (!host->device_visible) {
        // A kernel could not write there. The budget is ours, the device is the user's: rather past
        // the budget than no run.
        host_.free(*host, {});
        void* block = memory_.allocate_beyond_budget(size_bytes, stream);
        if (block == nullptr) {
            throw_out_of_memory(size_bytes);
        }
        add(std::make_shared<Storage>(size_bytes, stream, block));
        return block;
    }
    add(std::make_shared<Storage>(size_bytes, stream, *host));
    MutexLock lock(mutex_);
    stats_.born_cold_bytes += size_bytes;
    peak_.pressed_bytes += size_bytes;
    return host->address;
}

void Pager::add(const StoragePtr& storage) {
    bool growing = false;
    {
        MutexLock lock(mutex_);
        storage->touch(clock_);
        storage->serial = ++serials_;
        storage->born_step = stats_.steps;
        live_bytes_ += storage->size_bytes();
        live_peak_bytes_ = std::max(live_peak_bytes_, live_bytes_);
        live_since_use_ = std::max(live_since_use_, live_bytes_);
        largest_bytes_ = std::max(largest_bytes_, storage->size_bytes());
        const bool inserted = table_.emplace(storage->address(), storage).second;
        TS_ASSERT(inserted);
        static_cast<void>(inserted);
        if (storage->device_address() != nullptr) {
            note_resident(storage);
            growing = watch_.load() == Watch::kOff && map_.bytes() > watch_again_bytes_;
        } else {
            stats_.cold_bytes += storage->size_bytes();
        }
        check_invariants();
    }
    if (growing) {
        start_watching();
    }
}

bool Pager::free(void* address) noexcept {
    StoragePtr storage;
    {
        MutexLock lock(mutex_);
        const auto found = table_.find(address);
        if (found == table_.end()) {
            return false;
        }
        storage = found->second;
        table_.erase(found);
        left_early_.erase(storage->serial);
        storage->freed = true;
        paged_storages_ -= storage->paged ? 1 : 0;
        live_bytes_ -= storage->size_bytes();
        if (storage->in_transition()) {
            return true;  // Whoever moves it cleans up: see abandon_evict and cancel_restore.
        }
        if (storage->device_address() != nullptr) {
            if (!storage->in_frame()) {
                map_.erase(storage->device_address());
            }
        } else {
            stats_.cold_bytes -= storage->size_bytes();
        }
        forget_later(*storage);
        check_invariants();
    }
    free_blocks(storage);
    sweep();
    return true;
}

void Pager::free_blocks(const StoragePtr& storage) noexcept {
    if (storage->device_address() != nullptr && !storage->in_frame()) {
        try {
            for (const StreamId stream : storage->recorded()) {
                memory_.defer_reuse(storage->device_address(), stream);
            }
            order_home_after_copies(*storage);
            memory_.free(storage->device_address());
        } catch (const std::exception& error) {
            say_lost(error);
        }
    }
    const bool is_cold = storage->residency() != Residency::kResident;
    if ((is_cold || storage->in_frame()) && capturing()) {
        MutexLock lock(mutex_);
        deferred_.push_back(storage);
        swept_.store(false);
        return;
    }
    free_used_blocks(storage);
}

/// The frame and the host block: what may still be used is known only from events.
void Pager::free_used_blocks(const StoragePtr& storage) noexcept {
    if (has_plan_.load()) {
        free_item(storage);
    }
    if (storage->host().address == nullptr) {
        return;
    }
    if (storage->residency() == Residency::kResident) {
        host_.free(storage->host(), {storage->last_copy()});  // Nothing else uses it.
        return;
    }
    try {
        host_.free(storage->host(), events_of(storage->streams(), storage->ready()));
    } catch (const std::exception& error) {
        say_lost(error);
    }
}

std::vector<Event> Pager::events_of(const std::vector<StreamId>& streams, const Event& ready) {
    std::vector<Event> events;
    add_events_of(streams, ready, &events);
    return events;
}

void Pager::add_events_of(const std::vector<StreamId>& streams, const Event& ready,
                          std::vector<Event>* events) {
    events->reserve(events->size() + streams.size() + 1);
    for (const StreamId stream : streams) {
        events->push_back(device_.record(stream));
    }
    if (ready != nullptr) {
        events->push_back(ready);
    }
}

void Pager::begin_use(const std::vector<Use>& uses, StreamId stream, Pins* pins) {
    std::vector<Entry> entries;
    std::vector<Wait> waits;
    if (pins->operation == 0 && !capturing()) {
        step_clock_.operator_began(stream);
    }
    {
        MutexLock lock(mutex_);
        pin_entries(uses, stream, &entries, pins);
        for (const Entry& entry : entries) {
            const bool asks = needs_restore(entry);
            if (asks) {
                lock.unlock();
                restore(entry, stream,
                        entry.kind == UseKind::kBringIn ? Effort::kEvict : Effort::kFreeRoomOnly);
                lock.lock();
            }
            while (entry.touches_bytes() && entry.storage->in_transition()) {
                wait_for_transition(entry.storage);  // Another thread brings it in.
            }
            settle(entry, stream, asks, &(*pins)[entry.pin], &waits);
        }
    }
    for (const Wait& wait : waits) {
        if (capturing()) {
            wait.event->wait();
        } else {
            step_clock_.wait(stream, wait.event, wait.cause);
        }
    }
    if (!waits.empty()) {
        MutexLock lock(mutex_);
        for (const Wait& wait : waits) {
            wait.storage->note_waited(stream, wait.event);
        }
    }
    sweep();
}

void Pager::pin_entries(const std::vector<Use>& uses, StreamId stream, std::vector<Entry>* entries,
                        Pins* pins) {
    const uint64_t ticket = ++clock_;
    if (pins->operation == 0) {
        pins->operation = ++operations_;
    }
    for (const Use& use : uses) {
        const StoragePtr storage = settled_for(use, stream);
        if (storage == nullptr) {
            continue;
        }
        note_owner(storage, use.owner);
        note_use(*storage, pins, use);
        if (storage->ticket == ticket) {
            Entry& entry = (*entries)[storage->ticket_slot];
            entry.kind = std::max(entry.kind, use.kind);
            entry.writes = entry.writes || use.writes;
            continue;
        }
        storage->ticket = ticket;
        storage->ticket_slot = entries->size();
        storage->pin();
        storage->used_by(stream);
        if (use.kind != UseKind::kMetadata) {
            storage->touch(ticket);
        }
        entries->push_back({storage, use.owner, use.kind, use.writes, pins->size()});
        pins->push_back({storage});
    }
}

StoragePtr Pager::settled(void* owner) {
    for (;;) {
        const auto found = table_.find(port_.address_of(owner));
        if (found == table_.end()) {
            return nullptr;
        }
        StoragePtr storage = found->second;
        if (!storage->in_transition()) {
            return storage;
        }
        wait_for_transition(storage);  // It may have another address afterwards.
    }
}

void Pager::wait_for_transition(const StoragePtr& storage) {
    wait_while([&] { return storage->in_transition(); });
}

/// Until another thread has done its work.
void Pager::wait_while(const std::function<bool()>& is_pending) {
    TS_ASSERT_EQ(t_moves, 0);
    // That thread may need the GIL, and taking the GIL back needs our lock open.
    mutex_.unlock();
    void* token = port_.begin_blocking();
    mutex_.lock();
    while (is_pending()) {
        settled_.wait(mutex_);
    }
    mutex_.unlock();
    port_.end_blocking(token);
    mutex_.lock();
}

bool Pager::needs_restore(const Entry& entry) const {
    const Storage& storage = *entry.storage;
    const bool can = storage.may_come_in() || storage.in_transition();
    if (!can || storage.freed || !may_move()) {
        return false;
    }
    const bool must = !storage.host().device_visible && entry.kind != UseKind::kMetadata;
    return must || entry.kind == UseKind::kBringIn || entry.kind == UseKind::kBringInIfRoom;
}

void Pager::settle(const Entry& entry, StreamId stream, bool asked, Pin* pin,
                   std::vector<Wait>* waits) {
    Storage& storage = *entry.storage;
    const bool cold = storage.residency() == Residency::kCold;
    const Stall cause = cold ? Stall::kRoom : asked ? Stall::kDemand : Stall::kLate;
    if (storage.freed) {
        return;
    }
    if (!entry.touches_bytes()) {
        // What it is made of waits as well, unless a part of it is no operator.
        if (Event event = capturing() ? nullptr : storage.unsynced(stream)) {
            waits->push_back({entry.storage, std::move(event), cause});
        }
        return;
    }
    if (storage.left_early && entry.kind >= UseKind::kOnce) {
        note_return(storage);
    }
    if (entry.kind != UseKind::kMetadata) {
        storage.pin_address();
        pin->holds_address = true;
        stats_.in_place_bytes += cold ? storage.size_bytes() : 0;
    }
    if (capturing()) {
        fix(storage);  // A replay will use this address, and may write.
        drop_host_copy(storage);
        // No outside event may be waited for inside a capture. torch synchronizes before one, but a
        // load may have started since: the host waits, which a capture allows.
        if (storage.ready() != nullptr) {
            waits->push_back({entry.storage, storage.ready(), cause});
        }
        if (Event event = storage.unsynced_write(stream)) {
            waits->push_back({entry.storage, std::move(event), cause});
        }
        return;
    }
    if (entry.writes) {
        drop_host_copy(storage);
    }
    if (Event event = storage.unsynced(stream)) {
        waits->push_back({entry.storage, std::move(event), cause});
    }
    if (Event event = storage.unsynced_write(stream)) {
        waits->push_back({entry.storage, std::move(event), Stall::kLate});
    }
}

void Pager::note_owner(const StoragePtr& storage, void* owner) {
    if (storage->owner == owner) {
        return;
    }
    forget_later(*storage);
    port_.remember(owner);
    storage->owner = owner;
}

void Pager::forget_later(Storage& storage) {
    if (storage.owner != nullptr) {
        forgotten_.push_back(std::exchange(storage.owner, nullptr));
        swept_.store(false);
    }
}

void Pager::drop_host_copy(Storage& storage) {
    const HostBlock block = storage.drop_host_copy();
    if (block) {
        dropped_.emplace_back(block, storage.last_copy());
        swept_.store(false);
    }
}

void Pager::end_use(Pins* pins) noexcept {
    pins->operation = 0;
    if (pins->empty()) {
        return;
    }
    {
        MutexLock lock(mutex_);
        if (std::exchange(pins->planned, false) && plan_ != nullptr && plan_->is_laid()) {
            plan_->schedule->ended();
        }
        for (const Pin& pin : *pins) {
            if (pin.holds_address) {
                pin.storage->unpin_address();
            }
            pin.storage->unpin();
        }
    }
    pins->clear();
}

void Pager::used_on(Pins* pins, StreamId stream) {
    MutexLock lock(mutex_);
    for (const Pin& pin : *pins) {
        pin.storage->used_by(stream);
    }
}

void Pager::note_outputs(const std::vector<void*>& owners, StreamId stream, Pins* pins,
                         uint64_t for_good_after) {
    MutexLock lock(mutex_);
    for (void* owner : owners) {
        const auto found = table_.find(port_.address_of(owner));
        if (found == table_.end() || found->second->in_transition()) {
            continue;
        }
        const StoragePtr& storage = found->second;
        note_owner(storage, owner);
        storage->used_by(stream);
        storage->touch(clock_);
        if (capturing() || storage->serial > for_good_after) {
            fix(*storage);
        }
        if (pins != nullptr) {
            storage->pin();
            storage->pin_address();
            pins->push_back({storage, /*holds_address=*/true});
        }
    }
}

void Pager::pin_for_good(void* owner, StreamId stream) {
    if (has_plan_.load()) {
        take_out_of_plan(owner);
    }
    Pins pins;
    begin_use({{owner, /*writes=*/true, UseKind::kBringIn}}, stream, &pins);
    {
        MutexLock lock(mutex_);
        for (const Pin& pin : pins) {
            fix(*pin.storage);
        }
    }
    end_use(&pins);
}

/// Brings in what is named, out of any frame, and pins it until end_use(pins).
void Pager::hold(const std::vector<Use>& uses, StreamId stream, Pins* pins) {
    std::vector<Use> held = uses;
    for (Use& use : held) {
        if (has_plan_.load()) {
            take_out_of_plan(use.owner);
        }
        use.kind = UseKind::kBringIn;
        use.writes = use.unseen = true;
    }
    begin_use(held, stream, pins);
}

void Pager::keep_for_good(const Pins& pins) {
    MutexLock lock(mutex_);
    for (const Pin& pin : pins) {
        fix(*pin.storage);
    }
}

uint64_t Pager::newest_serial() const {
    MutexLock lock(mutex_);
    return serials_;
}

uint64_t Pager::steps() const {
    MutexLock lock(mutex_);
    return stats_.steps;
}

bool Pager::record_stream(const void* address, StreamId stream) {
    MutexLock lock(mutex_);
    const auto found = table_.find(address);
    if (found == table_.end()) {
        return false;
    }
    found->second->record_stream(stream);
    return true;
}

bool Pager::residency(const void* address, Residency* residency) const {
    MutexLock lock(mutex_);
    const auto found = table_.find(address);
    if (found == table_.end()) {
        return false;
    }
    *residency = found->second->residency();
    return true;
}

bool Pager::may_move() const {
    return watch_.load() == Watch::kOn && !capturing() && !closed_.load();
}

void Pager::begin_move() {
    ++moving_;
    ++t_moves;
    TS_ASSERT_LE(t_moves, 2);  // An eviction inside a restore.
}

int Pager::moves_of_this_thread() { return t_moves; }

void Pager::end_move() {
    TS_ASSERT_GT(moving_, 0u);
    TS_ASSERT_GT(t_moves, 0);
    --moving_;
    --t_moves;
}

void Pager::check_invariants() const {
#ifdef TS_DEBUG_CHECKS
    size_t on_device = 0;
    uint64_t cold_bytes = 0;
    for (const auto& [address, storage] : table_) {
        TS_ASSERT_EQ(storage->address(), address);
        TS_ASSERT(!storage->freed);
        const bool cold = storage->device_address() == nullptr;
        on_device += cold || storage->in_frame() ? 0 : 1;
        cold_bytes += cold ? storage->size_bytes() : 0;
    }
    for (const auto& [address, block] : map_.blocks()) {
        TS_ASSERT_EQ(reinterpret_cast<uintptr_t>(block.storage->device_address()), address);
        on_device += block.storage->freed ? 1 : 0;  // In the middle of its eviction.
    }
    TS_ASSERT_EQ(map_.blocks().size(), on_device);
    // What was freed in the middle of being brought in counts as cold until that has ended.
    TS_ASSERT(moving_ == 0 ? cold_bytes == stats_.cold_bytes : cold_bytes <= stats_.cold_bytes);
#endif
}

void Pager::boundary() {
    if (has_plan_.load(std::memory_order_relaxed)) {
        run_plan();
    }
    if (has_paged_in_.load(std::memory_order_relaxed)) {
        trim_paged();
    }
    if (spilling_.load(std::memory_order_relaxed)) {
        work_on_spills();
    }
    if (return_tries_.load(std::memory_order_relaxed) > 0) {
        bring_back();
    }
    if (watch_.load() != Watch::kWarmingUp) {
        return;
    }
    const int left = warm_up_boundaries_.fetch_sub(1) - 1;
    // Past the first ones not at each: all_announced() takes a lock.
    if (left > 0 || left % kWarmUpBoundaries != 0) {
        return;
    }
    if (port_.all_announced() || std::chrono::steady_clock::now() >= warm_up_ends_.load()) {
        Watch expected = Watch::kWarmingUp;
        watch_.compare_exchange_strong(expected, Watch::kOn);
    }
}

void Pager::start_watching() {
    {
        MutexLock lock(mutex_);
        if (closed_.load() || watch_.load() != Watch::kOff) {
            return;
        }
        warm_up_boundaries_.store(kWarmUpBoundaries);
        warm_up_ends_.store(std::chrono::steady_clock::now() + options_.longest_operator);
        watch_.store(Watch::kWarmingUp);
        began_unheard_ = true;
    }
    port_.watch(true);
}

/// For want of room.
uint64_t Pager::moves() const {
    return stats_.evictions + stats_.restores + stats_.born_cold_bytes - spill_moves_;
}

void Pager::step_done() {
    time_step();
    bool stop = false;
    bool moved = false;  // For want of room.
    {
        MutexLock lock(mutex_);
        ++stats_.steps;
        began_unheard_ = false;
        left_early_.clear();  // What outlives its step may be an item of a plan.
        last_brought_back_.clear();
        const bool spilled = spill_moves_ != spill_moves_at_last_step_;
        spill_moves_at_last_step_ = spill_moves_;
        const uint64_t budget = memory_.budget_bytes();
        moved = moves() != moves_at_last_step_;
        const bool quiet = !moved && !spilled && moving_ == 0 && stats_.cold_bytes == 0 &&
                           plan_ == nullptr && paged_storages_ == 0 && pending_writes_ == 0 &&
                           resident_peak_bytes_ <= budget - budget / 10;
        moves_at_last_step_ = moves();
        quiet_steps_ = quiet ? quiet_steps_ + 1 : 0;
        if (quiet_steps_ >= kQuietSteps && watch_.load() == Watch::kOn && !capturing()) {
            watch_again_bytes_ = (resident_peak_bytes_ + budget) / 2;
            watch_.store(Watch::kOff);
            drop_host_copies();  // Writes are not announced from here on.
            stop = true;
        }
    }
    if (stop) {
        port_.watch(false);
        sweep();
    }
    lay_regions_anew();
    judge_step(moved);
    reserve_spares();
}

/// The regions were laid in the middle of the first step's operator that found no room, around what
/// it used. Once, between steps, nothing is in use, and they become one.
void Pager::lay_regions_anew() {
    if (memory_.scattered_bytes() < memory_.budget_bytes() / kScatteredPart || !may_move()) {
        return;
    }
    {
        MutexLock lock(mutex_);
        if (stats_.steps != 1 || plan_ != nullptr) {
            return;
        }
    }
    if (!may_clear_workspaces()) {
        return;
    }
    evict_each(movable());
    if (memory_.lay_anew()) {
        MutexLock lock(mutex_);
        ++stats_.rebuilds;
    }
}

/// Whether no operator is under way that has a workspace's address, and no graph has one for good.
bool Pager::may_clear_workspaces() const {
    if (port_.user_threads() > 1 || was_capturing_.load()) {
        return false;  // Another thread may be about to launch what it has an address for.
    }
    MutexLock lock(mutex_);
    return std::all_of(table_.begin(), table_.end(), [](const auto& entry) {
        return entry.second->pin_count() == 0 && !entry.second->pinned_for_good();
    });
}

void Pager::time_step() {
    if (watch_.load() != Watch::kOn || capturing() || closed_.load()) {
        step_clock_.interrupt();
        return;
    }
    const CopyStats copies = device_.copy_stats();
    StepBytes total{copies.to_device_bytes, copies.to_host_bytes, 0};
    {
        MutexLock lock(mutex_);
        total.in_place = stats_.in_place_bytes;
    }
    step_clock_.step_ended(total);
}

std::optional<Pager::Forecast> Pager::forecast(const LinkRates& rates) {
    auto recorded = recorded_step();
    if (!recorded.has_value()) {
        return std::nullopt;
    }
    auto& [step, times] = *recorded;
    Forecast forecast;
    forecast.sizes = step.sizes;
    for (const size_t bytes : step.period.item_bytes) {
        forecast.planned_bytes += bytes;
    }
    if (rates.to_device > 0 && rates.to_host > 0) {
        forecast.result = StepReplay(std::move(step)).play(times, rates);
    }
    return forecast;
}

std::optional<std::pair<PlannedStep, StepTimes>> Pager::recorded_step() {
    std::optional<LastPlan> plan;
    {
        MutexLock lock(mutex_);
        plan = last_plan_;
    }
    if (!plan.has_value()) {
        return std::nullopt;
    }
    std::optional<StepTimes> times = step_clock_.usual_step(plan->first_step);
    if (!times.has_value()) {
        return std::nullopt;
    }
    return std::pair{std::move(plan->step), *std::move(times)};
}

void Pager::close() {
    Watch before = Watch::kOff;
    {
        MutexLock lock(mutex_);
        closed_.store(true);
        before = watch_.exchange(Watch::kOff);
    }
    if (before != Watch::kOff) {
        port_.watch(false);
    }
}

void Pager::sweep() noexcept {
    if (swept_.load()) {
        return;
    }
    std::vector<void*> forgotten;
    std::vector<std::pair<HostBlock, Event>> dropped;
    std::vector<StoragePtr> deferred;
    {
        MutexLock lock(mutex_);
        forgotten.swap(forgotten_);
        dropped.swap(dropped_);
        if (!capturing()) {
            deferred.swap(deferred_);
        }
        swept_.store(deferred_.empty());
    }
    for (void* owner : forgotten) {
        port_.forget(owner);
    }
    for (const auto& [block, event] : dropped) {
        host_.free(block, {event});
    }
    for (const StoragePtr& storage : deferred) {
        free_used_blocks(storage);
    }
}

void Pager::throw_out_of_memory(size_t size_bytes) {
    MemoryNumbers numbers;
    numbers.asked_bytes = size_bytes;
    numbers.budget_bytes = memory_.budget_bytes();
    const HostPoolStats host = host_.stats();
    numbers.host_limit_bytes = host.limit_bytes;
    numbers.host_in_use_bytes = host.in_use_bytes;
    {
        MutexLock lock(mutex_);
        numbers.in_use_bytes = map_.bytes();
        numbers.pinned_bytes = map_.bytes();
        for (const StoragePtr& storage : map_.movable()) {
            numbers.pinned_bytes -= storage->size_bytes();
        }
    }
    throw errors::out_of_memory(numbers);
}

PagerStats Pager::stats() {
    const uint64_t budget = memory_.budget_bytes();
    const uint64_t peak = memory_.peak_bytes();
    const uint64_t stall_ns = step_clock_.all_stall_ns();
    const uint64_t refusals = memory_.refusals();
    MutexLock lock(mutex_);
    PagerStats stats = stats_;
    stats.budget_bytes = budget;
    stats.peak_bytes = peak;
    stats.stall_ns = stall_ns;
    stats.refusals = refusals;
    stats.resident_bytes = map_.bytes();
    stats.resident_peak_bytes = resident_peak_bytes_;
    if (plan_ != nullptr && plan_->is_laid()) {
        stats.arena_bytes = plan_->arena->size_bytes();
        stats.extra_bytes = plan_->sizes.extra_bytes;
        stats.planned_bytes = plan_->item_bytes;
        stats.strays += plan_->schedule->strays();
    }
    stats.pinned_storages = 0;
    for (const auto& [address, storage] : table_) {
        stats.pinned_storages += storage->pinned_for_good() ? 1 : 0;
        stats.resident_bytes += storage->in_frame() ? storage->size_bytes() : 0;
    }
    return stats;
}

std::vector<StorageInfo> Pager::storages() const {
    std::vector<StorageInfo> result;
    MutexLock lock(mutex_);
    result.reserve(table_.size());
    for (const auto& [address, storage] : table_) {
        const HostBlock& host = storage->host();
        result.push_back({storage->owner, storage->size_bytes(), storage->residency(),
                          storage->pinned_for_good(), static_cast<bool>(host), host.page_locked});
    }
    return result;
}

}  // namespace trainstream
