// csrc/pager/pager.h: decides where each managed storage's bytes are, and moves them.
//
// On demand and in coldness order, until a step has been recorded; then ahead of need, by a plan
// (pager_plan.cpp). Knows no torch and no CUDA.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"
#include "device/device.h"
#include "device/device_memory.h"
#include "pager/arena_limit.h"
#include "pager/device_map.h"
#include "pager/frame_plan.h"
#include "pager/frame_schedule.h"
#include "pager/host_pool.h"
#include "pager/owner_port.h"
#include "pager/step_clock.h"
#include "pager/step_replay.h"
#include "pager/step_trace.h"
#include "pager/storage.h"

namespace trainstream {

struct PagerOptions {
    /// Compares the bytes of every storage that leaves without a copy, and says when they differ.
    bool verify = false;
    /// Whether a recorded step leads to a plan.
    bool plan = true;
    /// No operator keeps its host thread for longer. A thread that runs none any more announces
    /// none, and is not waited for longer than this once watching starts again.
    std::chrono::milliseconds longest_operator{5000};
};

/// Running totals since the pager was made, and what is where now. Bytes unless named otherwise.
struct PagerStats {
    uint64_t budget_bytes = 0;
    uint64_t peak_bytes = 0;       // Most taken from the device.
    uint64_t resident_bytes = 0;   // Managed, in device memory, now.
    uint64_t cold_bytes = 0;       // Managed, in host memory, now.
    uint64_t evicted_bytes = 0;    // Copied to the host.
    uint64_t restored_bytes = 0;   // Copied to the device.
    uint64_t dropped_bytes = 0;    // Left without a copy: the host copy was still right.
    uint64_t spilled_bytes = 0;    // Of evicted_bytes: saved for backward, before room was needed.
    uint64_t returned_bytes = 0;   // Of restored_bytes: for backward, before anybody waited.
    uint64_t in_place_bytes = 0;   // Used by an operator where they were, cold.
    uint64_t born_cold_bytes = 0;  // Allocated in host memory for lack of room.
    uint64_t evictions = 0;
    uint64_t restores = 0;
    uint64_t failures = 0;         // Moves that did not happen: a refused copy or allocation.
    uint64_t verify_faults = 0;    // Clean drops whose bytes differed.
    uint64_t pinned_storages = 0;  // Pinned for good, now.
    uint64_t rebuilds = 0;         // Times the device's regions were laid out anew.
    uint64_t steps = 0;
    uint64_t arena_bytes = 0;          // Of device memory, for what the plan loads ahead; now.
    uint64_t extra_bytes = 0;          // Likewise, for parts of a step; wanted there.
    uint64_t extra_opened = 0;         // Times that there were such frames.
    uint64_t resident_peak_bytes = 0;  // Most that managed storages had on the device at once.
    uint64_t beside_bytes = 0;         // Most that the recorded step needed beside what is planned.
    uint64_t planned_bytes = 0;        // Of the storages that the plan moves.
    uint64_t plans = 0;                // Made so far.
    uint64_t loaded_ahead_bytes = 0;   // Copied to the device before anybody waited.
    uint64_t demanded_bytes = 0;       // Planned, but needed earlier than they came.
    uint64_t extra_gave_way = 0;       // Times that extra frames left earlier than planned.
    uint64_t strays = 0;               // Uses that the plan's step does not have.
    uint64_t refusals = 0;             // Allocations that the map had room for, and the memory not.
    uint64_t stall_ns = 0;             // Compute waited for copies; in steps that were measured.
};

/// What was needed of the device since somebody asked last. Bytes.
struct PeakInfo {
    uint64_t device_bytes = 0;   // Most in managed storages and frames at once.
    uint64_t pressed_bytes = 0;  // Left, or were born cold, for want of room.
};

/// One managed storage as a report sees it.
struct StorageInfo {
    const void* owner = nullptr;  // What OwnerPort knows; null until an operator names it.
    uint64_t size_bytes = 0;
    Residency residency = Residency::kResident;
    bool pinned_for_good = false;
    bool has_host_block = false;
    bool host_is_locked = false;  // False where page locks were refused.
};

/// A storage that an operator, or a thread, has pinned.
struct Pin {
    StoragePtr storage;
    bool holds_address = false;  // It has a bare pointer: neither out nor in meanwhile.
};

/// What one outermost operator has pinned.
struct Pins : std::vector<Pin> {
    uint64_t operation = 0;  // Its number in the trace; 0: none yet.
    bool planned = false;    // Something of it is in the plan.
};

/// One storage that an operator names.
struct Use {
    void* owner = nullptr;
    bool writes = false;
    UseKind kind = UseKind::kMetadata;
    /// Kernels that nobody announces may follow, until the step ends: an optimizer's that is none
    /// of torch's, those of a Python function and of its backward pass.
    bool unseen = false;
};

/// A storage that one more saved tensor holds.
struct Save {
    StoragePtr storage;      // Null: not managed.
    bool is_first = false;   // The first tensor of it that is saved; nor is it planned, or pinned.
    bool may_spill = false;  // Likewise, and this step made it.
};

/// Owner: the allocator, one for each device; lives as long as the process.
/// Lock:  `mutex_` of rank kPager guards the table and every Storage. It is open during copies,
///        allocations, waits and calls of OwnerPort that may free or block; a storage in transition
///        (kEvicting, kRestoring) belongs to the thread that moves it.
///
/// Invariants, checked in debug builds after each move:
///   1. `table_` has each living storage under its address(); no two share one.
///   2. `map_` has just the storages with a device block that is no frame.
///   3. A thread marks at most one storage as in transition, and waits for none while it does; an
///      eviction inside a restore is the one nesting, and evictions wait for nobody.
class Pager {
public:
    Pager(Device& device, DeviceMemory& memory, HostPool& host, OwnerPort& port,
          const PagerOptions& options);
    Pager(const Pager&) = delete;
    Pager& operator=(const Pager&) = delete;

    /// A new managed storage: on the device, after evicting colder ones if need be, or born cold.
    /// Throws Error(kOutOfMemory).
    void* allocate(size_t size_bytes, StreamId stream);
    /// Frees the storage at `address`. False: not one of this pager's.
    bool free(void* address) noexcept;

    /// Pins what `uses` names, brings in or orders what needs it, notes writes, and adds the pins.
    void begin_use(const std::vector<Use>& uses, StreamId stream, Pins* pins);
    void end_use(Pins* pins) noexcept;
    /// What is pinned is used on `stream` too.
    void used_on(Pins* pins, StreamId stream);
    /// Storages an operator made: their owners become known. Pins them when `pins` is given.
    /// Those made since the storage of serial `for_good_after` stay for as long as they live.
    void note_outputs(const std::vector<void*>& owners, StreamId stream, Pins* pins,
                      uint64_t for_good_after = UINT64_MAX);
    /// A use outside any operator: brings in if possible and pins for as long as it lives, where it
    /// is then.
    void pin_for_good(void* owner, StreamId stream);
    /// The same until end_use(pins): kernels that nobody announces use it, perhaps on other
    /// streams.
    void hold(const std::vector<Use>& uses, StreamId stream, Pins* pins);
    /// Of the storage that was made last.
    uint64_t newest_serial() const;
    /// What is held already is so for good.
    void keep_for_good(const Pins& pins);
    /// Optimizer steps that have ended.
    uint64_t steps() const;
    /// A stream that torch was told about (record_stream). False: not managed.
    bool record_stream(const void* address, StreamId stream);
    /// Where the storage at `address` is; false when it is not managed.
    bool residency(const void* address, Residency* residency) const;

    // Blocks that somebody pages: pager_paging.cpp.
    /// These storages belong out: they leave now and after each use, and a plan moves nothing else.
    void page(const std::vector<void*>& owners);
    /// They are like others again: brought in, where there is room, and without a host copy.
    void unpage(const std::vector<void*>& owners, StreamId stream);
    /// Device memory for paged storages that are in use, were last, or are on their way.
    void set_paged_room(uint64_t room_bytes);
    /// Begins anew with what is on the device now.
    PeakInfo take_peak();

    /// A tensor is saved for backward that holds one reference to `owner`'s bytes, until unsave().
    Save save(const void* owner);
    void unsave(const StoragePtr& storage) noexcept;
    /// The storage leaves once nothing but saved tensors holds it, ahead of any want of room.
    /// `by_need`: only as far as the last step would not have fitted.
    void spill(const StoragePtr& storage, bool by_need);
    /// A saved tensor of `storage` is about to be used by `stream`, then those of `next`. Brings in
    /// what of these there is free room for, with no stream waiting.
    void unpack(const StoragePtr& storage, StreamId stream, const std::vector<StoragePtr>& next);
    /// False: nothing was ever to leave by spill().
    bool has_spilled() const { return has_spilled_.load(std::memory_order_relaxed); }

    /// The host is about to change all bytes of these: what has a frame and was not written since
    /// it came leaves it, which costs no copy. Else they would be copied out, back and out again.
    void let_go(const std::vector<void*>& owners);
    // Writes that another thread makes later: pager_pending.cpp.
    /// Whoever uses the storage's bytes waits until end_write(), but for threads that
    /// make_pending_writes(). It may move meanwhile. Null: it is not managed.
    StoragePtr announce_write(void* owner);
    /// The host has done its part, and `stream` has what is left of it: other streams wait for it.
    void end_write(const StoragePtr& storage, std::optional<StreamId> stream);
    /// Waits until none is pending: a capture is about to begin, in which no other thread may ask
    /// the device for anything.
    void wait_for_all_writes();
    /// The calling thread waits for no announced write from now on: it is the one that makes them.
    static void make_pending_writes();
    /// Whether a write may be left pending past an optimizer's step: all uses are announced, and a
    /// plan is in force, so that nothing is laid out anew between steps.
    bool may_leave_pending() const;
    /// Whether an update of `owners` may wait until their bytes are next used: all uses are
    /// announced, storages move, and nobody has an address of these.
    bool may_defer(const std::vector<void*>& owners) const;
    /// An update that was deferred failed, in the middle of something else that went on: allocate()
    /// throws this from now on.
    void stop_with(std::exception_ptr fault);

    // Kernels that nobody announces: pager_unseen.cpp.
    /// From here to end_unseen() such a kernel may write to what is pinned, and to what is made
    /// meanwhile: it leaves with a copy only, whatever was announced, and what is pinned counts as
    /// written once more at the end. `stream` is where it may run, besides on home streams: what
    /// was brought back ahead is there for it.
    std::vector<StoragePtr> begin_unseen(const Pins& pins, StreamId stream);
    void end_unseen(const std::vector<StoragePtr>& storages) noexcept;
    /// The same for all storages, those included that are yet to be made: such an optimizer's step.
    void begin_unseen_step(StreamId stream);
    void end_unseen_step() noexcept;
    /// Such kernels run from here on, in this step and perhaps in the next, and use what there is.
    void note_unseen(StreamId stream);

    /// Moves every storage that may move to the host. Returns the bytes that left.
    uint64_t evict_all();
    /// An optimizer's step has ended.
    void step_done();
    /// The script waits for an optimizer's updates in host memory between these.
    void update_began(StreamId stream) { step_clock_.update_began(stream); }
    void update_ended(StreamId stream) { step_clock_.update_ended(stream); }
    /// An outermost operator has ended on some thread: what the plan has for now is done.
    void boundary();
    /// While a graph is being captured nothing moves, and what is touched stays for good.
    void set_capturing(bool capturing) {
        capturing_.store(capturing);
        was_capturing_.store(was_capturing_.load() || capturing);
    }
    bool capturing() const { return capturing_.load(); }
    /// Nothing moves any more: the interpreter is going away.
    void close();

    Device& device() { return device_; }
    DeviceMemory& memory() { return memory_; }
    const HostPool& host() const { return host_; }
    HostPool& host() { return host_; }
    PagerStats stats();
    /// Where the time of a usual step of late went. Nothing: none was watched from end to end.
    std::optional<StepTimes> usual_step() { return step_clock_.usual_step(); }
    /// How long a step of the last plan is to take, also once the model that it was for is gone.
    struct Forecast {
        uint64_t planned_bytes = 0;
        FrameSizes sizes;
        std::optional<StepReplay::Result> result;  // Nothing: the rates are not known.
    };
    /// Nothing: there was no plan, or no step of it was measured.
    std::optional<Forecast> forecast(const LinkRates& rates);
    /// What the last plan was made from, and a step of it as it was measured.
    std::optional<std::pair<PlannedStep, StepTimes>> recorded_step();
    /// Every managed storage, as it is at one moment.
    std::vector<StorageInfo> storages() const;

private:
    enum class Effort : uint8_t { kFreeRoomOnly, kEvict };
    // Whether uses are announced. A run that fits goes off and pays nothing; growth towards the
    // budget goes on again, and a while of announced uses passes before anything may move, since an
    // operator in flight at that moment was not announced.
    enum class Watch : uint8_t { kOn, kOff, kWarmingUp };

    /// One storage of a use, and all that the operator does with it.
    struct Entry {
        StoragePtr storage;
        void* owner;
        UseKind kind;
        bool writes;
        size_t pin;  // Its place among the pins.

        bool touches_bytes() const { return kind != UseKind::kMetadata || writes; }
    };

    struct LastPlan {
        PlannedStep step;
        uint64_t first_step = 0;  // As FramePlan has it.
    };

    /// What a stream has to wait for before an operator.
    struct Wait {
        StoragePtr storage;
        Event event;
        Stall cause;
    };

    void* take_block(size_t size_bytes, StreamId stream, Effort effort);
    bool is_large(size_t size_bytes, const std::vector<Region>& regions) const;
    void* take_low(size_t size_bytes, StreamId stream, const std::vector<Region>& regions);
    void* take_high(size_t size_bytes, StreamId stream, const std::vector<Region>& regions);
    std::optional<Region> highest_gap(const std::vector<Region>& regions, size_t need) const;
    void* take_block_by_evicting(size_t size_bytes, StreamId stream);
    std::vector<StoragePtr> choose(size_t size_bytes, int tries,
                                   const std::vector<Region>& regions);
    void* born_cold(size_t size_bytes, StreamId stream);
    void add(const StoragePtr& storage);
    bool may_move() const;
    void check_invariants() const TS_REQUIRES(mutex_);
    void begin_move() TS_REQUIRES(mutex_);
    void end_move() TS_REQUIRES(mutex_);

    std::vector<StoragePtr> movable() const;
    bool evict(const StoragePtr& storage);
    bool evict_each(const std::vector<StoragePtr>& storages);
    bool leave(const StoragePtr& storage, void* owner);
    std::optional<HostBlock> host_block_for(size_t size_bytes);
    std::optional<HostBlock> host_block_of_old(size_t size_bytes);
    bool may_grow_host() const;
    bool give_up_host_copies(size_t size_bytes, HostPool::Growth growth);
    void reserve_spares();
    void drop_host_copies() TS_REQUIRES(mutex_);
    void check_host_copy(const StoragePtr& storage);
    void order_home_after(const std::vector<StreamId>& streams, StreamId home);
    void order_home_after_copies(const Storage& storage);
    void order_after_copies(const Storage& storage, StreamId stream);
    bool finish_evict(const StoragePtr& storage, void* owner, const HostBlock& host, Event done,
                      std::vector<Event> last);
    void abandon_evict(const StoragePtr& storage, bool owner_is_stale);
    bool finish_move_in(const StoragePtr& storage, void* owner, void* block, const Event& done,
                        std::vector<StreamId> synced, bool in_frame) TS_REQUIRES(mutex_);
    void restore(const Entry& entry, StreamId stream, Effort effort);
    void finish_restore(const Entry& entry, StreamId stream, void* block, const Event& done);
    void cancel_restore(const StoragePtr& storage, bool failed);

    void pin_entries(const std::vector<Use>& uses, StreamId stream, std::vector<Entry>* entries,
                     Pins* pins) TS_REQUIRES(mutex_);
    bool needs_restore(const Entry& entry) const TS_REQUIRES(mutex_);
    void settle(const Entry& entry, StreamId stream, bool asked, Pin* pin, std::vector<Wait>* waits)
        TS_REQUIRES(mutex_);
    StoragePtr settled(void* owner) TS_REQUIRES(mutex_);
    void wait_for_transition(const StoragePtr& storage) TS_REQUIRES(mutex_);
    void wait_while(const std::function<bool()>& is_pending) TS_REQUIRES(mutex_);
    StoragePtr settled_for(const Use& use, StreamId stream) TS_REQUIRES(mutex_);
    void wait_for_writes(const StoragePtr& storage, StreamId stream) TS_REQUIRES(mutex_);
    void note_owner(const StoragePtr& storage, void* owner) TS_REQUIRES(mutex_);
    void drop_host_copy(Storage& storage) TS_REQUIRES(mutex_);
    void forget_later(Storage& storage) TS_REQUIRES(mutex_);
    void free_blocks(const StoragePtr& storage) noexcept;
    void free_used_blocks(const StoragePtr& storage) noexcept;
    std::vector<Event> events_of(const std::vector<StreamId>& streams, const Event& ready);
    void add_events_of(const std::vector<StreamId>& streams, const Event& ready,
                       std::vector<Event>* events);
    /// Lets go of what was put aside under the lock. Called with it open.
    void sweep() noexcept;
    // What is saved for backward: pager_saved.cpp.
    void work_on_spills();
    void drop_what_is_copied();
    void copy_what_is_cold();
    StoragePtr next_cold() TS_REQUIRES(mutex_);
    bool only_saved(const Storage& storage) const TS_REQUIRES(mutex_);
    bool copy_out_ahead(const StoragePtr& storage);
    bool copy_to_new_host_block(const StoragePtr& storage);
    enum class Holders : uint8_t { kSavedTensors, kAny };
    bool bring_in_ahead(const StoragePtr& storage, Holders holders);
    bool load_ahead_into_pool(const StoragePtr& storage, void* owner);
    void plan_spills(uint64_t live_peak_bytes) TS_REQUIRES(mutex_);

    // What left in the step that made it: pager_returns.cpp.
    void note_left(const StoragePtr& storage) TS_REQUIRES(mutex_);
    void note_return(Storage& storage) TS_REQUIRES(mutex_);
    void bring_back();
    std::vector<StoragePtr> next_to_return() TS_REQUIRES(mutex_);
    bool all_uses_announced() const TS_REQUIRES(mutex_);
    void order_after_returns(StreamId stream);

    [[noreturn]] void throw_out_of_memory(size_t size_bytes);
    void start_watching();
    void time_step();
    void lay_regions_anew();
    bool may_clear_workspaces() const;
    uint64_t moves() const TS_REQUIRES(mutex_);

    void trim_paged();
    std::vector<StoragePtr> paged_past_room() TS_REQUIRES(mutex_);
    void note_paged(const StoragePtr& storage) TS_REQUIRES(mutex_);
    void note_peak() TS_REQUIRES(mutex_);
    void note_resident(const StoragePtr& storage) TS_REQUIRES(mutex_);
    uint64_t device_bytes() const TS_REQUIRES(mutex_);

    // The plan: pager_plan.cpp.
    void note_use(Storage& storage, Pins* pins, const Use& use) TS_REQUIRES(mutex_);
    bool can_be_planned(const Storage& storage) const TS_REQUIRES(mutex_);
    bool is_used_unseen(const Storage& storage) const TS_REQUIRES(mutex_);
    bool may_be_written_unseen(const Storage& storage) const TS_REQUIRES(mutex_);
    void judge_step(bool moved);
    bool give_plan_for_another();
    void plan_step(const StepTrace& trace, uint64_t live_peak_bytes, bool moved);
    void refine_plan(const StepTrace& trace, uint64_t pressed_bytes) TS_REQUIRES(mutex_);
    std::unique_ptr<FramePlan> make_plan(const StepTrace& trace, uint64_t live_peak_bytes,
                                         const std::vector<Region>& regions) TS_REQUIRES(mutex_);
    uint64_t bytes_not_planned(uint64_t live_peak_bytes) const TS_REQUIRES(mutex_);
    std::optional<StreamId> home_of(const StepTrace& trace) const TS_REQUIRES(mutex_);
    bool shrink_arena(uint64_t less_bytes) TS_REQUIRES(mutex_);
    size_t plan_least_bytes() const;
    void keep_host_blocks();
    bool keep_host_block(const StoragePtr& storage);
    void run_plan();
    void work_on_plan();
    bool lay_arena();
    void manage_extra();
    void leave_early();
    bool open_extra();
    bool close_extra(size_t begin);
    bool close_all_extra();
    std::vector<size_t> extra_by_end() const;
    void give_back(FrameArena& arena, StreamId home);
    bool may_give_way() const TS_REQUIRES(mutex_);
    bool extra_gives_way();
    void* take_arena(size_t* size_bytes, StreamId home, Event* free_from) noexcept;
    bool retire_plan();
    void drop_plan() TS_REQUIRES(mutex_);
    bool give_way(size_t size_bytes);
    bool give_plan_up();
    void load_ahead();
    bool is_to_be_written(uint32_t item) const TS_REQUIRES(mutex_);
    bool load_on_demand(const StoragePtr& storage);
    bool carry_out(const FrameSchedule::Load& load);
    bool load_into_frame(const StoragePtr& storage, size_t offset);
    void add_events_before_load(const Storage& storage, std::vector<Event>* after);
    void give_frame(Storage& storage, std::vector<Event> events) TS_REQUIRES(mutex_);
    void free_item(const StoragePtr& storage) noexcept;
    void wait_for_plan(const StoragePtr& storage) TS_REQUIRES(mutex_);
    void fix(Storage& storage) TS_REQUIRES(mutex_);
    void forget_item(Storage& storage) TS_REQUIRES(mutex_);
    void take_out_of_plan(void* owner);
    static int moves_of_this_thread();

    // One thread at a time carries out something of the plan.
    void begin_turn() TS_REQUIRES(mutex_);
    void end_turn() noexcept;
    struct TurnEnd {
        Pager& pager;
        ~TurnEnd() { pager.end_turn(); }
    };

    Device& device_;
    DeviceMemory& memory_;
    HostPool& host_;
    OwnerPort& port_;
    const PagerOptions options_;

    StepClock step_clock_;
    mutable Mutex mutex_{LockRank::kPager};
    CondVar settled_;  // A transition has ended.
    std::unordered_map<const void*, StoragePtr> table_ TS_GUARDED_BY(mutex_);
    DeviceMap map_ TS_GUARDED_BY(mutex_);
    uint64_t clock_ TS_GUARDED_BY(mutex_) = 0;
    PagerStats stats_ TS_GUARDED_BY(mutex_);
    // Owners and blocks to let go of once the lock is open.
    std::vector<void*> forgotten_ TS_GUARDED_BY(mutex_);
    std::vector<std::pair<HostBlock, Event>> dropped_ TS_GUARDED_BY(mutex_);
    // Freed during a capture, when no event can be recorded: what they have waits for its end.
    std::vector<StoragePtr> deferred_ TS_GUARDED_BY(mutex_);
    std::atomic<bool> swept_{true};  // False: there is something for sweep().

    std::atomic<bool> capturing_{false};
    std::atomic<bool> was_capturing_{false};  // Ever.
    std::atomic<bool> has_fault_{false};
    std::exception_ptr fault_ TS_GUARDED_BY(mutex_);  // See stop_with().
    std::atomic<bool> closed_{false};
    std::atomic<Watch> watch_{Watch::kOn};
    std::atomic<int> warm_up_boundaries_{0};
    std::atomic<std::chrono::steady_clock::time_point> warm_up_ends_{};
    uint64_t moving_ TS_GUARDED_BY(mutex_) = 0;  // Storages in transition.
    uint64_t pending_writes_ TS_GUARDED_BY(mutex_) = 0;
    uint64_t unseen_steps_ TS_GUARDED_BY(mutex_) = 0;             // That are under way.
    uint64_t unseen_functions_ TS_GUARDED_BY(mutex_) = 0;         // Likewise,
    uint64_t serial_before_functions_ TS_GUARDED_BY(mutex_) = 0;  // and since when: `serials_`.
    uint64_t last_unseen_step_ TS_GUARDED_BY(mutex_) = 0;         // One more, when one began last.
    // Uses have been announced since a moment in this step; what began before may still write.
    bool began_unheard_ TS_GUARDED_BY(mutex_) = false;
    uint64_t watch_again_bytes_ TS_GUARDED_BY(mutex_) = 0;
    uint64_t resident_peak_bytes_ TS_GUARDED_BY(mutex_) = 0;
    uint64_t quiet_steps_ TS_GUARDED_BY(mutex_) = 0;
    uint64_t moves_at_last_step_ TS_GUARDED_BY(mutex_) = 0;
    size_t largest_bytes_ TS_GUARDED_BY(mutex_) = 0;  // Of all storages so far.
    bool spare_reserved_ TS_GUARDED_BY(mutex_) = false;

    uint64_t paged_storages_ TS_GUARDED_BY(mutex_) = 0;
    uint64_t paged_room_bytes_ TS_GUARDED_BY(mutex_) = 0;
    std::vector<StoragePtr> paged_in_ TS_GUARDED_BY(mutex_);  // On the device, in no frame.
    std::atomic<bool> has_paged_in_{false};
    PeakInfo peak_ TS_GUARDED_BY(mutex_);
    // Those to leave, in the order of saving; and those whose copies have begun, in that order.
    std::deque<StoragePtr> spill_waiting_ TS_GUARDED_BY(mutex_);
    std::deque<StoragePtr> spill_copying_ TS_GUARDED_BY(mutex_);
    uint64_t spill_copying_bytes_ TS_GUARDED_BY(mutex_) = 0;
    bool spill_busy_ TS_GUARDED_BY(mutex_) = false;  // A thread works on them.
    std::atomic<bool> spilling_{false};              // There may be some.
    std::atomic<bool> has_spilled_{false};
    uint64_t spill_need_bytes_ TS_GUARDED_BY(mutex_) = 0;  // What the last step had too much.
    uint64_t spill_wish_bytes_ TS_GUARDED_BY(mutex_) = 0;  // By need, in this step.
    uint64_t spill_moves_ TS_GUARDED_BY(mutex_) = 0;       // Moves that no want of room made.
    uint64_t spill_moves_at_last_step_ TS_GUARDED_BY(mutex_) = 0;

    // What left in the step that made it and has not been used since, by serial: in the order in
    // which it was made.
    std::map<uint64_t, StoragePtr> left_early_ TS_GUARDED_BY(mutex_);
    std::map<StreamId, StoragePtr> last_brought_back_ TS_GUARDED_BY(mutex_);  // Of each home.
    uint64_t returned_serial_ TS_GUARDED_BY(mutex_) = 0;  // Of the last that was used again.
    std::atomic<int> return_tries_{0};  // Boundaries at which what was made before it may come.

    StepTrace trace_ TS_GUARDED_BY(mutex_);
    uint64_t operations_ TS_GUARDED_BY(mutex_) = 0;
    uint64_t serials_ TS_GUARDED_BY(mutex_) = 0;
    uint64_t live_bytes_ TS_GUARDED_BY(mutex_) = 0;       // Managed, wherever they are.
    uint64_t live_peak_bytes_ TS_GUARDED_BY(mutex_) = 0;  // In this step.
    uint64_t live_since_use_ TS_GUARDED_BY(mutex_) = 0;   // Most, since the last traced use.
    std::unique_ptr<FramePlan> plan_ TS_GUARDED_BY(mutex_);
    bool plan_busy_ TS_GUARDED_BY(mutex_) = false;  // A thread carries something of it out.
    std::atomic<bool> has_plan_{false};
    ArenaLimit arena_limit_ TS_GUARDED_BY(mutex_);
    uint64_t pressed_out_bytes_ TS_GUARDED_BY(mutex_) = 0;  // Beside the arena, in this step.
    std::vector<StepTrace::Use> last_step_ TS_GUARDED_BY(mutex_);  // As it was recorded.
    std::optional<LastPlan> last_plan_ TS_GUARDED_BY(mutex_);      // That had an arena.
};

}  // namespace trainstream
