// csrc/pager/pager_plan.cpp: from a recorded step to loads ahead of need.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <unordered_map>

#include "base/assert.h"
#include "base/bytes.h"
#include "pager/pager.h"
#include "pager/step_replay.h"

namespace trainstream {

namespace {

// The first step makes optimizer states; the second is the first that is like all later ones.
constexpr uint64_t kStepsBeforePlan = 2;

// Steps of a plan that are measured before its arena is judged.
constexpr size_t kStepsMeasured = 2;

// Extra frames are tried for at each so many boundaries: looking for room walks over all blocks.
constexpr int kExtraTries = 8;

// Boundaries that a load is tried at before it is left to demand.
constexpr int kLoadTries = 16;

/// This thread carries out something of a plan, of whichever pager.
thread_local bool t_has_turn = false;

}  // namespace

void Pager::note_use(Storage& storage, Pins* pins, const Use& use) {
    const bool is_item = storage.item != Storage::kNoItem;
    pins->planned = pins->planned || is_item;
    if (use.unseen) {
        storage.unseen_step = stats_.steps + 1;
        if (is_item && plan_->is_laid()) {
            plan_->schedule->fix(storage.item);
        }
    }
    if (use.kind < UseKind::kOnce) {
        return;
    }
    if (storage.last_operation == pins->operation) {
        if (use.writes) {
            trace_.add_write(storage.serial);
        }
        return;
    }
    storage.last_operation = pins->operation;
    if (storage.born_step < stats_.steps) {
        trace_.add({storage.serial, pins->operation, std::exchange(live_since_use_, live_bytes_),
                    use.writes});
    }
    if (is_item) {
        plan_->has_begun = true;
    }
    if (is_item && plan_->is_laid()) {
        plan_->schedule->begun(storage.item);
    }
}

bool Pager::can_be_planned(const Storage& storage) const {
    // Where somebody pages blocks, the rest stays: a plan that moved it too would undo what they
    // say.
    const bool wanted = paged_storages_ == 0 || storage.paged;
    return wanted && storage.owner != nullptr && !storage.pinned_for_good() &&
           !is_used_unseen(storage) && storage.born_step + 1 < stats_.steps;
}

/// Called at the end of each optimizer step, with nothing held.
void Pager::judge_step(bool moved) {
    StepTrace trace;
    uint64_t live_peak_bytes = 0;
    {
        MutexLock lock(mutex_);
        trace = StepTrace(operations_);
        live_peak_bytes = std::exchange(live_peak_bytes_, live_bytes_);
        std::swap(trace, trace_);
        trace.end(std::exchange(live_since_use_, live_bytes_));
        plan_spills(live_peak_bytes);
        const uint64_t pressed_bytes = std::exchange(pressed_out_bytes_, 0);
        if (plan_ != nullptr && plan_->is_laid() && !plan_->retiring) {
            plan_->schedule->period_ended();
            refine_plan(trace, pressed_bytes);
        }
    }
    if (give_plan_for_another()) {
        plan_step(trace, live_peak_bytes, /*moved=*/true);
    } else if (!has_plan_.load()) {
        plan_step(trace, live_peak_bytes, moved);
    }
}

/// The step that has ended says all that the next plan is to know, so none has to be recorded
/// without one. True: there is no plan now. False: it stays, or could not go at
/// once (something of it is in use), and the next step goes without.
bool Pager::give_plan_for_another() {
    {
        MutexLock lock(mutex_);
        if (plan_ == nullptr || !plan_->replaced || !may_give_way()) {
            return false;
        }
        begin_turn();
    }
    const TurnEnd end{*this};
    return retire_plan();
}

/// Makes a plan from a step, if there is to be one.
void Pager::plan_step(const StepTrace& trace, uint64_t live_peak_bytes, bool moved) {
    std::optional<StreamId> home;
    {
        MutexLock lock(mutex_);
        const bool may_plan = plan_ == nullptr && options_.plan && moved &&
                              stats_.steps >= kStepsBeforePlan && watch_.load() == Watch::kOn &&
                              !closed_.load() && trace.is_whole();
        if (!may_plan || trace.uses().empty()) {
            return;
        }
        home = home_of(trace);
        if (!home.has_value()) {
            return;
        }
    }
    const std::vector<Region> regions = memory_.regions(*home);
    {
        MutexLock lock(mutex_);
        if (plan_ != nullptr) {
            return;  // Another thread's optimizer was faster.
        }
        plan_ = make_plan(trace, live_peak_bytes, regions);
        if (plan_ == nullptr) {
            return;
        }
        ++stats_.plans;
        plan_->home = *home;
        plan_->recorded = trace.uses();
        last_step_ = trace.uses();
        // Before the lock is open: another thread may lay the arena out, or free one of them.
        for (size_t i = 0; i < plan_->items.size(); ++i) {
            plan_->items[i]->item = static_cast<uint32_t>(i);
        }
        has_plan_.store(true);
    }
    keep_host_blocks();
}

/// Whose pool the arena is to be from: that of the first storage of the step that still lives.
std::optional<StreamId> Pager::home_of(const StepTrace& trace) const {
    std::unordered_map<uint64_t, StreamId> homes;
    for (const auto& [address, storage] : table_) {
        homes.emplace(storage->serial, storage->home());
    }
    for (const StepTrace::Use& use : trace.uses()) {
        const auto found = homes.find(use.storage);
        if (found != homes.end()) {
            return found->second;
        }
    }
    return std::nullopt;
}

/// What a step needs on the device beside the items of a plan: all that lives at its peak, less
/// what lived through all of it and can move.
uint64_t Pager::bytes_not_planned(uint64_t live_peak_bytes) const {
    uint64_t through_bytes = 0;
    for (const auto& [address, storage] : table_) {
        if (can_be_planned(*storage)) {
            through_bytes += storage->size_bytes();
        }
    }
    return live_peak_bytes - std::min(live_peak_bytes, through_bytes);
}

std::unique_ptr<FramePlan> Pager::make_plan(const StepTrace& trace, uint64_t live_peak_bytes,
                                            const std::vector<Region>& regions) {
    std::unordered_map<uint64_t, StoragePtr> by_serial;
    for (const auto& [address, storage] : table_) {
        if (can_be_planned(*storage)) {
            by_serial.emplace(storage->serial, storage);
        }
    }
    const uint64_t through_bytes = live_peak_bytes - bytes_not_planned(live_peak_bytes);
    Period period;
    std::vector<StoragePtr> items;
    std::vector<ItemList> written;
    std::vector<uint64_t> places;
    std::vector<uint64_t> beside_bytes;  // Most of it, from each operation to the next.
    std::unordered_map<uint64_t, uint32_t> numbers;
    uint64_t operation = 0;
    for (const StepTrace::Use& use : trace.uses()) {
        const uint64_t beside = use.live_bytes - std::min(use.live_bytes, through_bytes);
        if (!beside_bytes.empty()) {
            beside_bytes.back() = std::max(beside_bytes.back(), beside);
        }
        const auto found = by_serial.find(use.storage);
        if (found == by_serial.end()) {
            continue;
        }
        const auto [number, fresh] =
            numbers.emplace(use.storage, static_cast<uint32_t>(items.size()));
        if (fresh) {
            items.push_back(found->second);
            period.item_bytes.push_back(found->second->size_bytes());
        }
        if (period.operations.empty() || use.operation != operation) {
            period.operations.emplace_back();
            written.emplace_back();
            places.push_back(trace.place_of(use.operation));
            beside_bytes.push_back(beside);
            operation = use.operation;
        }
        period.operations.back().push_back(number->second);
        if (use.writes) {
            written.back().push_back(number->second);
        }
    }
    if (items.empty()) {
        return nullptr;
    }
    beside_bytes.back() = std::max(
        beside_bytes.back(), trace.tail_bytes() - std::min(trace.tail_bytes(), through_bytes));
    uint64_t usable_bytes = 0;
    for (const Region& region : regions) {
        usable_bytes = std::max<uint64_t>(usable_bytes, region.end - region.begin);
    }
    auto plan = std::make_unique<FramePlan>(std::move(period), std::move(items));
    plan->written = std::move(written);
    plan->places = std::move(places);
    stats_.beside_bytes = *std::max_element(beside_bytes.begin(), beside_bytes.end());
    uint64_t limit_bytes = arena_limit_.bytes();
    if (paged_storages_ > 0) {  // All that is above that counts as taken, for extra frames as well.
        limit_bytes = std::min(limit_bytes, paged_room_bytes_);
        for (uint64_t& beside : beside_bytes) {
            beside = std::max(beside, usable_bytes - std::min(usable_bytes, paged_room_bytes_));
        }
    }
    plan->sizes = FrameSizes::choose(plan->period, usable_bytes, beside_bytes, limit_bytes);
    plan->beside_bytes = std::move(beside_bytes);
    return plan->sizes.arena_bytes == 0 ? nullptr : std::move(plan);
}

/// What leaves and comes back each step keeps one host block for it: nothing grows later, and
/// nothing is cut differently each time. Which that is, two periods without a device tell.
void Pager::keep_host_blocks() {
    std::optional<PlannedStep> step;
    std::vector<StoragePtr> items;
    {
        MutexLock lock(mutex_);
        if (plan_ == nullptr) {
            return;
        }
        step = plan_->as_recorded();
        items = plan_->items;
    }
    const std::vector<bool> leaves = StepReplay(std::move(*step)).who_leaves();
    std::vector<StoragePtr> leavers;
    std::vector<StoragePtr> stayers;
    for (size_t i = 0; i < items.size(); ++i) {
        if (items[i] != nullptr) {
            (leaves[i] ? leavers : stayers).push_back(items[i]);
        }
    }
    for (const StoragePtr& storage : leavers) {
        if (!keep_host_block(storage)) {
            return;  // It will be asked for again when it is needed.
        }
    }
    // The others leave once, for the arena to be laid out: room for that is locked now as well.
    std::vector<HostBlock> brief;
    for (const StoragePtr& storage : stayers) {
        bool has_block = false;
        {
            MutexLock lock(mutex_);
            has_block = storage->host().address != nullptr;
        }
        const std::optional<HostBlock> block =
            has_block ? std::nullopt : host_.allocate(storage->size_bytes());
        if (block.has_value()) {
            brief.push_back(*block);
        }
    }
    for (const HostBlock& block : brief) {
        host_.free(block, {});
    }
}

/// False: there is no host memory for it.
bool Pager::keep_host_block(const StoragePtr& storage) {
    {
        MutexLock lock(mutex_);
        if (storage->host().address != nullptr) {
            storage->keep_host_block({});
            return true;
        }
    }
    const std::optional<HostBlock> block = host_.allocate(storage->size_bytes());
    if (!block.has_value()) {
        return false;
    }
    MutexLock lock(mutex_);
    if (!storage->freed && storage->residency() == Residency::kResident &&
        storage->host().address == nullptr) {
        storage->keep_host_block(*block);
    } else {
        dropped_.emplace_back(*block, nullptr);
        swept_.store(false);
    }
    return true;
}

/// A step that no plan was made for twice in a row is a new habit. Else the measured steps of this
/// plan say whether its arena has the right size.
void Pager::refine_plan(const StepTrace& trace, uint64_t pressed_bytes) {
    const auto same = [](const StepTrace::Use& a, const StepTrace::Use& b) {
        return a.storage == b.storage;
    };
    const std::vector<StepTrace::Use>& uses = trace.uses();
    const bool strays =
        !std::equal(uses.begin(), uses.end(), plan_->recorded.begin(), plan_->recorded.end(), same);
    const bool again =
        std::equal(uses.begin(), uses.end(), last_step_.begin(), last_step_.end(), same);
    last_step_ = uses;
    if (strays && again) {
        plan_->retiring = true;
        plan_->replaced = true;
        last_plan_.reset();
        arena_limit_.forget();
        return;
    }
    const std::optional<StepTimes> times =
        step_clock_.usual_step(plan_->first_step, kStepsMeasured);
    if (times.has_value()) {
        const ArenaLimit::Trial trial{plan_->arena->size_bytes(), pressed_bytes, times->step_ns};
        plan_->replaced = arena_limit_.judge(trial, memory_.budget_bytes(), plan_least_bytes());
        plan_->retiring = plan_->replaced;
    }
}

/// The plan goes; the next one has less. False: it may not be smaller.
bool Pager::shrink_arena(uint64_t less_bytes) {
    const uint64_t arena_bytes = plan_->arena->size_bytes();
    if (!arena_limit_.shrink(arena_bytes, less_bytes, plan_least_bytes())) {
        return false;
    }
    plan_->retiring = true;
    return true;
}

void Pager::run_plan() {
    {
        MutexLock lock(mutex_);
        // One that retires may have nothing left to move.
        const bool can = plan_ != nullptr && (may_move() || plan_->retiring);
        if (!can || plan_busy_ || capturing() || closed_.load()) {
            return;
        }
        begin_turn();
    }
    {
        const TurnEnd end{*this};
        work_on_plan();
    }
    sweep();
}

void Pager::begin_turn() {
    plan_busy_ = true;
    t_has_turn = true;
}

void Pager::end_turn() noexcept {
    t_has_turn = false;
    {
        MutexLock lock(mutex_);
        plan_busy_ = false;
    }
    settled_.notify_all();
}

void Pager::work_on_plan() {
    bool laid = false;
    bool retiring = false;
    bool has_begun = false;
    {
        MutexLock lock(mutex_);
        laid = plan_->is_laid();
        retiring = plan_->retiring;
        has_begun = plan_->has_begun;
        if (retiring && !laid) {
            drop_plan();
            return;
        }
    }
    if (retiring) {
        retire_plan();
    } else if (laid || (has_begun && lay_arena())) {
        manage_extra();
        leave_early();
        load_ahead();
    }
}

/// What is in use now stays until its segment goes.
void Pager::leave_early() {
    std::vector<StoragePtr> leaving;
    {
        MutexLock lock(mutex_);
        for (const uint32_t item : plan_->schedule->outlived()) {
            const StoragePtr& storage = plan_->items[item];
            if (storage != nullptr && storage->in_frame() && storage->movable()) {
                leaving.push_back(storage);
            }
        }
    }
    evict_each(leaving);
}

/// Extra frames come where the recorded step had the room, and go before it needs it.
void Pager::manage_extra() {
    std::vector<size_t> ended;
    {
        MutexLock lock(mutex_);
        for (const FramePlan::Extra& one : plan_->extra) {
            if (plan_->schedule->done() >= one.until) {
                ended.push_back(one.begin);
            }
        }
    }
    for (const size_t begin : ended) {
        close_extra(begin);  // Something of it is in use: at the next boundary.
    }
    while (open_extra()) {
    }
}

/// True: there is one segment more than there was.
bool Pager::open_extra() {
    size_t size_bytes = 0;
    StreamId home = 0;
    uint64_t until = 0;
    {
        MutexLock lock(mutex_);
        const FrameSizes& sizes = plan_->sizes;
        const uint64_t now = plan_->schedule->done();
        const size_t count = plan_->extra.size() + 1;
        if (!sizes.extra_is_worthwhile(now, count) || plan_->extra_tries++ % kExtraTries != 0) {
            return false;
        }
        size_bytes = sizes.segment_bytes;
        home = plan_->home;
        until = sizes.extra_ends(now, count);
    }
    void* block = take_high(size_bytes, home, memory_.regions(home));
    if (block == nullptr) {
        return false;
    }
    Event free_from;
    try {
        free_from = device_.record(home);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        memory_.free(block);
        return false;
    }
    auto frames = std::make_unique<FrameArena>(block, size_bytes);
    frames->give(0, size_bytes, {free_from});
    MutexLock lock(mutex_);
    map_.add_wall(frames->range());
    const size_t begin = plan_->schedule->open_extra(size_bytes, until);
    plan_->extra.push_back({std::move(frames), begin, until});
    plan_->extra_tries = 0;  // There may be room for another.
    note_peak();
    ++stats_.extra_opened;
    return true;
}

/// What is in this extra segment leaves. True: all has, and its memory was given back.
bool Pager::close_extra(size_t begin) {
    std::vector<StoragePtr> framed;
    {
        MutexLock lock(mutex_);
        for (const StoragePtr& storage : plan_->items) {
            const bool inside = storage != nullptr && storage->in_frame() &&
                                plan_->schedule->is_in_segment(storage->item, begin);
            if (inside && storage->pin_count() > 0) {
                return false;  // None leaves in vain.
            }
            if (inside) {
                framed.push_back(storage);
            }
        }
    }
    if (!evict_each(framed)) {
        return false;
    }
    std::unique_ptr<FrameArena> frames;
    StreamId home = 0;
    {
        MutexLock lock(mutex_);
        if (!plan_->schedule->extra_is_empty(begin)) {
            return false;  // Freed at this moment, on another thread.
        }
        const auto found =
            std::find_if(plan_->extra.begin(), plan_->extra.end(),
                         [&](const FramePlan::Extra& one) { return one.begin == begin; });
        frames = std::move(found->frames);
        plan_->extra.erase(found);
        plan_->schedule->close_extra(begin);
        home = plan_->home;
    }
    give_back(*frames, home);
    return true;
}

/// Of the extra segments: true if all are gone.
bool Pager::close_all_extra() {
    bool all = true;
    for (const size_t begin : extra_by_end()) {
        all = close_extra(begin) && all;
    }
    return all;
}

std::vector<size_t> Pager::extra_by_end() const {
    MutexLock lock(mutex_);
    return plan_->extra_by_end();
}

/// The device's pool gets the memory; its stream's later work waits for what still uses it.
void Pager::give_back(FrameArena& arena, StreamId home) {
    try {
        for (const Event& event : arena.take(0, arena.size_bytes())) {
            step_clock_.wait(home, event, Stall::kRoom);
        }
        {
            MutexLock lock(mutex_);
            map_.remove_wall(arena.range().begin);
        }
        memory_.free(arena.begin());
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());  // Only a broken device refuses to wait.
    }
}

/// A laid plan whose turn this thread may take in the middle of an allocation.
bool Pager::may_give_way() const {
    return plan_ != nullptr && plan_->is_laid() && !plan_busy_ && moves_of_this_thread() == 0 &&
           may_move();
}

/// An allocation needs room that extra frames have. True: there is more now.
bool Pager::extra_gives_way() {
    if (!has_plan_.load()) {
        return false;
    }
    {
        MutexLock lock(mutex_);
        if (!may_give_way() || plan_->extra.empty()) {
            return false;
        }
        begin_turn();
    }
    const TurnEnd end{*this};
    for (const size_t begin : extra_by_end()) {
        if (close_extra(begin)) {
            MutexLock lock(mutex_);
            ++stats_.extra_gave_way;
            // It would only have to give way again, in each step.
            plan_->sizes.note_less_room(plan_->schedule->done(), plan_->extra.size());
            return true;
        }
    }
    return false;
}

/// One block of the device's pool becomes the arena. What is to be loaded leaves first, so that
/// nothing of it is in two places, and all else that can, and workspaces: then the arena lies at
/// the low end, and leaves the rest whole. Around a workspace of 32 MiB in the middle of 20 GiB
/// three blocks of 5 GB found no room, though 9 GB were free. False: there is no room, and no plan
/// any more.
bool Pager::lay_arena() {
    std::vector<StoragePtr> items;
    size_t arena_bytes = 0;
    uint64_t pressed_bytes = 0;
    StreamId home = 0;
    {
        MutexLock lock(mutex_);
        items = plan_->items;
        arena_bytes = plan_->sizes.arena_bytes;
        home = plan_->home;
        pressed_bytes = peak_.pressed_bytes;
    }
    for (const StoragePtr& storage : items) {
        if (storage != nullptr) {
            evict(storage);
        }
    }
    evict_each(movable());
    if (may_clear_workspaces()) {
        memory_.clear_workspaces();
    }
    Event free_from;
    void* block = take_arena(&arena_bytes, home, &free_from);
    MutexLock lock(mutex_);
    pressed_out_bytes_ = 0;
    peak_.pressed_bytes = pressed_bytes;  // What left for the arena says nothing of the step.
    if (block == nullptr) {
        drop_plan();
        return false;
    }
    plan_->lay(block, arena_bytes);
    plan_->first_step = step_clock_.steps() + 1;  // This one began without it.
    last_plan_ = {plan_->as_recorded(), plan_->first_step};
    for (const StoragePtr& storage : plan_->items) {
        if (storage != nullptr && (storage->pinned_for_good() || is_used_unseen(*storage))) {
            plan_->schedule->fix(storage->item);
        }
    }
    plan_->arena->give(0, arena_bytes, {free_from});
    map_.add_wall(plan_->arena->range());
    note_peak();
    return true;
}

/// Null: there is no room, or nobody could say when it is free. What a device refuses beside the
/// plan must not end here: this is no operator's work.
void* Pager::take_arena(size_t* size_bytes, StreamId home, Event* free_from) noexcept {
    void* block = nullptr;
    try {
        block = take_low(*size_bytes, home, memory_.regions(home));
        while (block == nullptr && *size_bytes > plan_least_bytes()) {
            *size_bytes -= align_up(*size_bytes / 8, kBlockAlignment);
            block = take_low(*size_bytes, home, memory_.regions(home));
        }
        if (block == nullptr) {
            return nullptr;
        }
        if (!capturing()) {
            *free_from = device_.record(home);
            return block;
        }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
    }
    if (block != nullptr) {
        memory_.free(block);
    }
    return nullptr;
}

size_t Pager::plan_least_bytes() const { return FrameSizes::least_bytes(memory_.budget_bytes()); }

void Pager::drop_plan() {
    for (const StoragePtr& storage : plan_->items) {
        if (storage != nullptr) {
            storage->item = Storage::kNoItem;
        }
    }
    plan_.reset();
    has_plan_.store(false);
}

/// Everything that can leave its frame does. True: all has, and the arena was given back.
bool Pager::retire_plan() {
    std::vector<StoragePtr> framed;
    {
        MutexLock lock(mutex_);
        for (const StoragePtr& storage : plan_->items) {
            if (storage == nullptr || !storage->in_frame()) {
                continue;
            }
            if (storage->pinned_for_good() && !storage->freed) {
                plan_->retiring = false;  // The arena cannot go, so it had better be used.
                arena_limit_.settle();
                return false;
            }
            framed.push_back(storage);
        }
    }
    if (!evict_each(framed) || !close_all_extra()) {
        return false;
    }
    std::unique_ptr<FrameArena> arena;
    StreamId home = 0;
    {
        MutexLock lock(mutex_);
        if (!plan_->schedule->is_empty()) {
            return false;  // Freed at this moment, on another thread.
        }
        arena = std::move(plan_->arena);
        home = plan_->home;
        stats_.strays += plan_->schedule->strays();
        drop_plan();
    }
    give_back(*arena, home);
    return true;
}

/// There is no room for an allocation beside the arena. A step that grew needs it more: the next
/// one makes a plan with less. True: there may be room now.
bool Pager::give_way(size_t size_bytes) {
    if (!has_plan_.load()) {
        return false;
    }
    {
        MutexLock lock(mutex_);
        if (!may_give_way()) {
            return false;
        }
        const size_t arena_bytes = plan_->arena->size_bytes();
        pressed_out_bytes_ += size_bytes;
        if (pressed_out_bytes_ < arena_bytes / 8) {
            return false;
        }
        if (!shrink_arena(pressed_out_bytes_)) {
            return false;
        }
        begin_turn();
    }
    const TurnEnd end{*this};
    return retire_plan();
}

/// There is no room anywhere else. True: the arena's is free now.
bool Pager::give_plan_up() {
    if (!has_plan_.load()) {
        return false;
    }
    {
        MutexLock lock(mutex_);
        if (!may_give_way()) {
            return false;
        }
        plan_->retiring = true;
        begin_turn();
    }
    const TurnEnd end{*this};
    return retire_plan();
}

void Pager::load_ahead() {
    for (;;) {
        std::optional<FrameSchedule::Load> load;
        uint64_t bytes = 0;
        {
            MutexLock lock(mutex_);
            load = plan_->schedule->due([this](uint32_t item) TS_REQUIRES(mutex_) {
                const StoragePtr& storage = plan_->items[item];
                return storage != nullptr && (storage->pin_count() > 0 || storage->in_transition());
            });
            if (!load.has_value() || is_to_be_written(load->item)) {
                return;
            }
            bytes = plan_->schedule->item_bytes(load->item);
        }
        const bool done = carry_out(*load);
        MutexLock lock(mutex_);
        if (done) {
            plan_->failures = 0;
            stats_.loaded_ahead_bytes += bytes;
            continue;
        }
        if (++plan_->failures >= kLoadTries) {
            plan_->failures = 0;
            plan_->schedule->skip();
        }
        return;  // Something of it is in use: at the next boundary.
    }
}

/// Loaded before, it would have to go back for the write, and whoever needs it waits for that.
bool Pager::is_to_be_written(uint32_t item) const {
    const StoragePtr& storage = plan_->items[item];
    return storage != nullptr && storage->pending_writes > 0;
}

bool Pager::load_on_demand(const StoragePtr& storage) {
    std::optional<FrameSchedule::Load> load;
    {
        MutexLock lock(mutex_);
        if (storage->item == Storage::kNoItem || t_has_turn) {
            return false;  // With the turn: what this thread let go of ran operators of its own.
        }
        while (plan_busy_ || storage->in_transition()) {
            wait_for_plan(storage);
        }
        if (storage->residency() == Residency::kResident) {
            return true;  // It came meanwhile.
        }
        const bool can = plan_ != nullptr && plan_->is_laid() && !plan_->retiring && may_move() &&
                         storage->item != Storage::kNoItem && storage->may_come_in() &&
                         !is_used_unseen(*storage);
        if (!can || storage->freed) {
            return false;
        }
        load = plan_->schedule->demand(storage->item, [this](uint32_t item) TS_REQUIRES(mutex_) {
            const StoragePtr& other = plan_->items[item];
            return other == nullptr || !other->movable();
        });
        if (!load.has_value()) {
            return false;
        }
        begin_turn();
    }
    const TurnEnd end{*this};
    const bool done = carry_out(*load);
    MutexLock lock(mutex_);
    stats_.demanded_bytes += done ? storage->size_bytes() : 0;
    return done;
}

bool Pager::carry_out(const FrameSchedule::Load& load) {
    std::vector<StoragePtr> leaving;
    StoragePtr entering;
    {
        MutexLock lock(mutex_);
        for (const uint32_t item : load.leave) {
            leaving.push_back(plan_->items[item]);
        }
        entering = plan_->items[load.item];
    }
    for (const StoragePtr& storage : leaving) {
        if (storage == nullptr || !evict(storage)) {
            return false;
        }
    }
    if (entering == nullptr) {
        return false;
    }
    bool beside = false;  // It was brought in for want of a frame.
    {
        MutexLock lock(mutex_);
        beside = entering->residency() == Residency::kResident && !entering->in_frame();
    }
    if (beside && !evict(entering)) {
        return false;
    }
    return load_into_frame(entering, load.offset);
}

bool Pager::load_into_frame(const StoragePtr& storage, size_t offset) {
    void* owner = nullptr;
    void* frame = nullptr;
    const void* host = nullptr;
    std::vector<Event> after;
    {
        MutexLock lock(mutex_);
        const bool can = storage->may_come_in() && !storage->freed && storage->owner != nullptr;
        if (!can || storage->item == Storage::kNoItem || !may_move()) {
            return false;
        }
        storage->begin_restore();
        begin_move();
        owner = storage->owner;
        frame = plan_->frame_at(offset);
        host = storage->host().address;
        after = plan_->take(offset, storage->size_bytes());
    }
    bool moved = false;
    bool failed = false;
    const bool held = port_.hold(owner);
    std::vector<Event> last = after;  // What the frame must wait for if it is none after all.
    if (held) {
        Event done;
        try {
            add_events_before_load(*storage, &after);
            done =
                device_.copy(CopyDirection::kToDevice, frame, host, storage->size_bytes(), after);
            last = {done};
            MutexLock lock(mutex_);
            moved = finish_move_in(storage, owner, frame, done, {}, /*in_frame=*/true);
            if (moved) {
                plan_->schedule->entered(storage->item, offset);
            } else {
                storage->set_ready(done, {});  // It still reads the host block.
            }
            check_invariants();
        } catch (const std::exception&) {
            failed = true;
        }
    }
    if (!moved) {
        {
            MutexLock lock(mutex_);
            plan_->give(offset, storage->size_bytes(), std::move(last));
            if (!held) {
                forget_later(*storage);
            }
        }
        cancel_restore(storage, failed);
    } else {
        settled_.notify_all();
    }
    if (held) {
        port_.release(owner);
    }
    return moved;
}

/// What its bytes in host memory wait for: the copy that brought them, and uses since.
void Pager::add_events_before_load(const Storage& storage, std::vector<Event>* after) {
    std::vector<StreamId> streams;
    Event ready;
    {
        MutexLock lock(mutex_);
        streams = storage.streams();
        ready = storage.ready();
    }
    add_events_of(streams, ready, after);
}

void Pager::fix(Storage& storage) {
    storage.pin_for_good();
    if (storage.item != Storage::kNoItem && plan_ != nullptr && plan_->is_laid()) {
        plan_->schedule->fix(storage.item);
    }
}

/// An address that is about to be given away for good had better not be a frame's: the arena could
/// never be given back. It stays one if an operator uses it now.
void Pager::take_out_of_plan(void* owner) {
    StoragePtr storage;
    bool framed = false;
    {
        MutexLock lock(mutex_);
        storage = settled(owner);
        if (storage == nullptr || storage->item == Storage::kNoItem) {
            return;
        }
        framed = storage->in_frame();
    }
    if (framed) {
        evict(storage);
    }
    MutexLock lock(mutex_);
    if (storage->item != Storage::kNoItem && !storage->in_frame() && !storage->in_transition()) {
        plan_->item_bytes -= align_up(storage->size_bytes(), kBlockAlignment);
        forget_item(*storage);
    }
}

void Pager::let_go(const std::vector<void*>& owners) {
    if (!has_plan_.load()) {
        return;
    }
    std::vector<StoragePtr> leaving;
    {
        MutexLock lock(mutex_);
        for (void* owner : owners) {
            const StoragePtr storage = settled(owner);
            if (storage != nullptr && storage->in_frame() && storage->has_host_copy()) {
                leaving.push_back(storage);
            }
        }
    }
    evict_each(leaving);
    sweep();
}

void Pager::give_frame(Storage& storage, std::vector<Event> events) {
    const size_t offset = plan_->schedule->offset(storage.item);
    plan_->schedule->left(storage.item);
    plan_->give(offset, storage.size_bytes(), std::move(events));
}

/// It is no part of the plan any more, and in none of its frames.
void Pager::forget_item(Storage& storage) {
    if (plan_->is_laid()) {
        plan_->schedule->remove(storage.item);
    }
    plan_->items[storage.item] = nullptr;
    storage.item = Storage::kNoItem;
    if (plan_->freed_bytes > plan_->item_bytes / 2 || plan_->item_bytes == 0) {
        plan_->retiring = true;  // The model that it was made for is going away.
    }
}

/// A planned storage was freed: with it goes its frame, once all that uses it is done.
void Pager::free_item(const StoragePtr& storage) noexcept {
    std::vector<Event> events;
    try {
        if (storage->in_frame()) {
            events = events_of(storage->streams(), storage->ready());
        }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return;  // Nobody could say when its frame is free.
    }
    MutexLock lock(mutex_);
    if (storage->item == Storage::kNoItem) {
        return;
    }
    if (storage->in_frame()) {
        give_frame(*storage, std::move(events));
    }
    plan_->freed_bytes += align_up(storage->size_bytes(), kBlockAlignment);
    forget_item(*storage);
}

void Pager::wait_for_plan(const StoragePtr& storage) {
    wait_while([&]() TS_REQUIRES(mutex_) { return plan_busy_ || storage->in_transition(); });
}

}  // namespace trainstream
