#include "pager/host_pool.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <list>
#include <string>
#include <thread>
#include <utility>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/fork_guard.h"
#include "base/mutex.h"
#include "pager/host_chunks.h"
#include "pager/host_range.h"

namespace trainstream {
namespace {

constexpr size_t kGrowthUnit = 2 * kMiB;
constexpr size_t kGrowthShare = 64;  // A step ahead is 1/64 of what is committed.
constexpr size_t kHeadroomMax = 256 * kMiB;
/// How far locked memory may exceed what is held before free neighbours are joined, although that
/// waits for the device: 3 %, and what small pools may waste without harm.
constexpr uint64_t kExcessShare = 32;
constexpr uint64_t kExcessMin = 64 * kMiB;
/// How many blocks still in use by a copy an allocation looks past before it takes what is free:
/// each may cost a call into the device's runtime.
constexpr size_t kPollsMax = 8;

size_t page_bytes() {
    static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

HostPoolOptions with_defaults(HostPoolOptions options) {
    if (options.limit_bytes == 0) {
        options.limit_bytes = available_host_bytes();
    }
    options.limit_bytes -= options.limit_bytes % page_bytes();
    if (options.chunk_bytes_max == 0) {
        options.chunk_bytes_max = kGiB;
    }
    return options;
}

size_t extent_bytes(size_t size_bytes) {
    return align_up(std::max(size_bytes, size_t{1}), kBlockAlignment);
}

bool all_done(std::vector<Event>& events) {
    std::erase_if(events, [](const Event& event) { return !event || event->is_done(); });
    return events.empty();
}

}  // namespace

/// The state of a pool and its background thread.
///
/// Owner: HostPool. In a forked child it is never destroyed: a thread that does not exist there
/// would be waited for.
/// Lock:  `mutex_`, of rank kHostPool; open while memory is touched, locked and unlocked.
///
/// Invariants:
///   1. From the low end of the range: chunks, memory touched ahead, memory not committed.
///      range_.begin() <= chunks_end_ <= committed_end_ <= range_.begin() + limit_bytes.
///   2. Every byte of a chunk is in one place: handed out, pending, or free in `chunks_`.
///   3. One thread changes the ends or the chunks at a time: the one that set `changing_`.
class HostPool::Impl {
public:
    Impl(Device& device, const HostPoolOptions& options)
        : options_(with_defaults(options)),
          reads_pageable_memory_(device.reads_pageable_memory()),
          range_(device, options_.limit_bytes, options_.touch_threads),
          chunks_end_(range_.begin()),
          committed_end_(range_.begin()),
          fork_guard_(mutex_, [this] { enter_child(); }) {}

    ~Impl();
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;

    std::optional<HostBlock> allocate(size_t size_bytes, Growth growth);
    void free(const HostBlock& block, std::vector<Event> after) noexcept;
    std::optional<HostRun> run_with(size_t size_bytes, const std::vector<HostOffer>& offers,
                                    Growth growth) const;
    HostPoolStats stats() const;
    bool forked() const;

private:
    /// A block that was freed while a copy may still use it.
    struct Pending {
        uintptr_t begin;
        size_t extent_bytes;
        std::vector<Event> after;
    };

    std::optional<HostBlock> take(size_t size_bytes) TS_REQUIRES(mutex_);
    size_t take_back(size_t undone_max) TS_REQUIRES(mutex_);
    bool wait_for_oldest_pending() TS_REQUIRES(mutex_);

    uint64_t committed_bytes() const TS_REQUIRES(mutex_) { return committed_end_ - range_.begin(); }
    uint64_t ahead_bytes() const TS_REQUIRES(mutex_) { return committed_end_ - chunks_end_; }
    bool is_in_excess(size_t more_bytes) const TS_REQUIRES(mutex_);

    bool make_room(size_t extent_bytes, Growth growth) TS_REQUIRES(mutex_);
    bool lengthen_tail(size_t extent_bytes) TS_REQUIRES(mutex_);
    bool make_chunk(size_t size_bytes, Growth growth) TS_REQUIRES(mutex_);
    bool join_free_chunks(size_t size_bytes) TS_REQUIRES(mutex_);
    std::optional<size_t> growth_for(size_t missing_bytes) const TS_REQUIRES(mutex_);
    size_t growth_for_headroom() const TS_REQUIRES(mutex_);
    bool grow(size_t size_bytes) TS_REQUIRES(mutex_);
    void add_chunk(uintptr_t begin, size_t size_bytes) TS_REQUIRES(mutex_);

    void ask_for_headroom() TS_REQUIRES(mutex_);
    void run_background() TS_EXCLUDES(mutex_);
    void enter_child() TS_NO_THREAD_SAFETY_ANALYSIS;

    const HostPoolOptions options_;
    const bool reads_pageable_memory_;
    HostRange range_;

    mutable Mutex mutex_{LockRank::kHostPool};
    CondVar changed_;  // A change ended, headroom is wanted, or the pool is being destroyed.
    uintptr_t chunks_end_ TS_GUARDED_BY(mutex_);
    uintptr_t committed_end_ TS_GUARDED_BY(mutex_);
    HostChunks chunks_ TS_GUARDED_BY(mutex_);
    std::list<Pending> pending_ TS_GUARDED_BY(mutex_);  // Oldest first.
    uint64_t pending_bytes_ TS_GUARDED_BY(mutex_) = 0;
    uint64_t held_bytes_peak_ TS_GUARDED_BY(mutex_) = 0;  // In use and pending.
    HostPoolStats stats_ TS_GUARDED_BY(mutex_);           // What is counted, not derived.
    bool changing_ TS_GUARDED_BY(mutex_) = false;
    bool lock_refused_ TS_GUARDED_BY(mutex_) = false;
    bool system_is_full_ TS_GUARDED_BY(mutex_) = false;
    bool headroom_wanted_ TS_GUARDED_BY(mutex_) = false;
    bool stopping_ TS_GUARDED_BY(mutex_) = false;
    bool forked_ TS_GUARDED_BY(mutex_) = false;
    std::unique_ptr<std::thread> background_ TS_GUARDED_BY(mutex_);
    ForkGuard fork_guard_;
};

HostPool::Impl::~Impl() {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    const std::unique_ptr<std::thread> background = std::move(background_);
    lock.unlock();
    if (background) {
        background->join();
    }
    lock.lock();
    try {
        while (wait_for_oldest_pending()) {  // A copy may still read what is about to be unmapped.
            pending_.pop_front();
        }
    } catch (const std::exception&) {
        // The device is gone, and its copies with it.
    }
    for (const HostChunk& chunk : chunks_.locked_chunks()) {
        range_.unlock(chunk.begin);
    }
}

std::optional<HostBlock> HostPool::Impl::allocate(size_t size_bytes, Growth growth) {
    MutexLock lock(mutex_);
    take_back(kPollsMax);
    system_is_full_ = false;
    for (;;) {
        if (const std::optional<HostBlock> block = take(size_bytes)) {
            if (growth == Growth::kAllowed || growth == Growth::kAhead) {
                ask_for_headroom();
            }
            return block;
        }
        if (take_back(SIZE_MAX) > 0) {
            continue;
        }
        if (growth == Growth::kForbidden) {
            return std::nullopt;
        }
        if (changing_) {
            changed_.wait(mutex_);
            continue;
        }
        if (growth == Growth::kJoin) {
            // Once locks are refused, what is joined would be pageable.
            if (lock_refused_ || !join_free_chunks(extent_bytes(size_bytes))) {
                return std::nullopt;
            }
            continue;
        }
        if (!make_room(extent_bytes(size_bytes), growth) && !wait_for_oldest_pending()) {
            return std::nullopt;
        }
    }
}

std::optional<HostRun> HostPool::Impl::run_with(size_t size_bytes,
                                                const std::vector<HostOffer>& offers,
                                                Growth growth) const {
    std::vector<HostPart> parts;
    parts.reserve(offers.size());
    for (const HostOffer& offer : offers) {
        parts.push_back({reinterpret_cast<uintptr_t>(offer.block.address),
                         extent_bytes(offer.block.size_bytes), offer.heat});
    }
    const MutexLock lock(mutex_);
    if (growth == Growth::kForbidden) {
        return chunks_.run_in_chunk(extent_bytes(size_bytes), parts);
    }
    return lock_refused_ ? std::nullopt : chunks_.run_of_chunks(extent_bytes(size_bytes), parts);
}

std::optional<HostBlock> HostPool::Impl::take(size_t size_bytes) {
    const std::optional<HostExtent> extent = chunks_.take(extent_bytes(size_bytes));
    if (!extent) {
        return std::nullopt;
    }
    stats_.in_use_bytes += size_bytes;
    stats_.in_use_bytes_peak = std::max(stats_.in_use_bytes_peak, stats_.in_use_bytes);
    held_bytes_peak_ = std::max(held_bytes_peak_, stats_.in_use_bytes + pending_bytes_);
    return HostBlock{reinterpret_cast<void*>(extent->begin), size_bytes,
                     extent->locked || reads_pageable_memory_, extent->locked};
}

void HostPool::Impl::free(const HostBlock& block, std::vector<Event> after) noexcept {
    const auto begin = reinterpret_cast<uintptr_t>(block.address);
    const size_t size_bytes = extent_bytes(block.size_bytes);
    std::erase(after, nullptr);
    const MutexLock lock(mutex_);
    TS_ASSERT_GE(begin, range_.begin());
    TS_ASSERT_LE(begin + block.size_bytes, chunks_end_);
    TS_ASSERT_LE(block.size_bytes, stats_.in_use_bytes);
    stats_.in_use_bytes -= block.size_bytes;
    if (after.empty()) {
        chunks_.give(begin, size_bytes);
    } else {
        // Not polled here: the caller may hold the pager's lock.
        pending_.push_back({begin, size_bytes, std::move(after)});
        pending_bytes_ += size_bytes;
    }
}

/// Returns how many blocks came back; looks past at most `undone_max` that did not.
size_t HostPool::Impl::take_back(size_t undone_max) {
    size_t taken = 0;
    for (auto pending = pending_.begin(); pending != pending_.end() && undone_max > 0;) {
        if (all_done(pending->after)) {
            chunks_.give(pending->begin, pending->extent_bytes);
            pending_bytes_ -= pending->extent_bytes;
            pending = pending_.erase(pending);
            ++taken;
        } else {
            ++pending;
            --undone_max;
        }
    }
    return taken;
}

/// False: nothing is pending. Opens the lock while it waits.
bool HostPool::Impl::wait_for_oldest_pending() {
    if (pending_.empty()) {
        return false;
    }
    const std::vector<Event> after = pending_.front().after;
    mutex_.unlock();
    try {
        for (const Event& event : after) {
            event->wait();
        }
    } catch (...) {
        mutex_.lock();
        throw;
    }
    mutex_.lock();
    return true;
}

/// One step towards a free extent of `extent_bytes`. False: there is none left to take.
bool HostPool::Impl::make_room(size_t extent_bytes, Growth growth) {
    const size_t tail_bytes = lock_refused_ ? chunks_.pageable_tail_bytes(chunks_end_) : 0;
    TS_ASSERT_LT(tail_bytes, extent_bytes);
    const size_t chunk_bytes = align_up(extent_bytes - tail_bytes, page_bytes());
    if (is_in_excess(chunk_bytes) && join_free_chunks(extent_bytes)) {
        return true;
    }
    return make_chunk(chunk_bytes, growth) || join_free_chunks(extent_bytes) ||
           lengthen_tail(extent_bytes);
}

/// The limit is reached: adds just enough to the free chunks at the end to be joined with them.
bool HostPool::Impl::lengthen_tail(size_t extent_bytes) {
    const size_t tail_bytes = chunks_.free_run_bytes_ending_at(chunks_end_);
    return tail_bytes > 0 && tail_bytes < extent_bytes &&
           make_chunk(align_up(extent_bytes - tail_bytes, page_bytes()), Growth::kAllowed);
}

/// Whether `more_bytes` would make locked memory exceed what was ever held by too much: then free
/// chunks lie about in which nothing fits.
bool HostPool::Impl::is_in_excess(size_t more_bytes) const {
    const uint64_t held_bytes =
        std::max(held_bytes_peak_, stats_.in_use_bytes + pending_bytes_ + more_bytes);
    const uint64_t excess_bytes = std::max(held_bytes / kExcessShare, kExcessMin);
    return chunks_.locked_bytes() + more_bytes > held_bytes + excess_bytes;
}

/// Cuts a chunk from what lies ahead, which grows first when it is too short. False: it cannot.
bool HostPool::Impl::make_chunk(size_t size_bytes, Growth growth) {
    if (ahead_bytes() < size_bytes) {
        const std::optional<size_t> growth_bytes = growth_for(size_bytes - ahead_bytes());
        return growth_bytes && grow(*growth_bytes);  // The caller's next round cuts.
    }
    const uintptr_t begin = chunks_end_;
    const size_t chunk_bytes = growth == Growth::kAhead ? ahead_bytes() : size_bytes;
    changing_ = true;
    add_chunk(begin, chunk_bytes);
    chunks_end_ = begin + chunk_bytes;
    return true;
}

/// Makes one chunk of free neighbours. False: no run of them has `size_bytes`.
bool HostPool::Impl::join_free_chunks(size_t size_bytes) {
    const std::vector<HostChunk> run = chunks_.remove_free_run(size_bytes);
    if (run.empty()) {
        return false;
    }
    changing_ = true;
    mutex_.unlock();
    for (const HostChunk& chunk : run) {
        range_.unlock(chunk.begin);
    }
    mutex_.lock();
    ++stats_.joins;
    const uintptr_t begin = run.front().begin;
    add_chunk(begin, run.back().begin + run.back().size_bytes - begin);
    return true;
}

/// Page-locks the range unless a lock was refused before, and adds it. Ends a change; opens the
/// lock meanwhile.
void HostPool::Impl::add_chunk(uintptr_t begin, size_t size_bytes) {
    TS_ASSERT(changing_);
    const bool may_lock = !lock_refused_;
    const uint64_t locked_bytes = chunks_.locked_bytes();
    mutex_.unlock();
    const auto start = std::chrono::steady_clock::now();
    std::string reason;
    const bool locked = may_lock && range_.lock(begin, size_bytes, &reason);
    if (may_lock && !locked) {
        std::fprintf(stderr, "%s\n", errors::pin_refused(size_bytes, locked_bytes, reason).c_str());
    }
    const auto spent = std::chrono::nanoseconds{std::chrono::steady_clock::now() - start};
    mutex_.lock();
    lock_refused_ = !locked;
    stats_.locks += locked ? 1 : 0;
    stats_.lock_ns += static_cast<uint64_t>(spent.count());
    chunks_.add({begin, size_bytes, locked});
    changing_ = false;
    changed_.notify_all();
}

/// How much to commit when `missing_bytes` are. Nothing: the limit forbids it.
std::optional<size_t> HostPool::Impl::growth_for(size_t missing_bytes) const {
    const uint64_t room_bytes = options_.limit_bytes - committed_bytes();
    if (system_is_full_ || missing_bytes > room_bytes) {
        return std::nullopt;
    }
    const size_t step_bytes = std::min(options_.chunk_bytes_max, committed_bytes() / kGrowthShare);
    const size_t growth_bytes = align_up(std::max(missing_bytes, step_bytes), kGrowthUnit);
    return std::min(growth_bytes, room_bytes);
}

/// How much to commit ahead of need. It begins below half of the headroom, so that one growth
/// serves many blocks, and ends where committed memory would pass 1.03 x the bytes asked for.
size_t HostPool::Impl::growth_for_headroom() const {
    const uint64_t headroom_bytes = std::min(kHeadroomMax, committed_bytes() / kGrowthShare);
    if (headroom_bytes < kGrowthUnit || ahead_bytes() >= headroom_bytes / 2) {
        return 0;
    }
    const uint64_t growth_bytes = align_up(headroom_bytes - ahead_bytes(), kGrowthUnit);
    const uint64_t after_bytes = committed_bytes() + growth_bytes;
    const uint64_t peak_bytes = stats_.in_use_bytes_peak;
    const bool fits =
        after_bytes <= options_.limit_bytes && after_bytes <= peak_bytes + peak_bytes / 100 * 3;
    return fits ? growth_bytes : 0;
}

/// Commits and touches memory; opens the lock meanwhile. False: the system has none.
bool HostPool::Impl::grow(size_t size_bytes) {
    TS_ASSERT(!changing_);
    changing_ = true;
    const uintptr_t begin = committed_end_;
    mutex_.unlock();
    const auto start = std::chrono::steady_clock::now();
    const bool committed = range_.commit(begin, size_bytes);
    const auto spent = std::chrono::nanoseconds{std::chrono::steady_clock::now() - start};
    mutex_.lock();
    if (committed) {
        committed_end_ = begin + size_bytes;
        ++stats_.growths;
        stats_.lock_ns += static_cast<uint64_t>(spent.count());
    } else {
        system_is_full_ = true;  // Until the next allocation: others may give memory back.
    }
    changing_ = false;
    changed_.notify_all();
    return committed;
}

void HostPool::Impl::ask_for_headroom() {
    // From the second growth on: a run that fits into the first needs no thread.
    if (!options_.grow_in_background || forked_ || stats_.growths < 2 ||
        growth_for_headroom() == 0) {
        return;
    }
    headroom_wanted_ = true;
    if (!background_) {
        background_ = std::make_unique<std::thread>([this] { run_background(); });
    }
    changed_.notify_all();
}

void HostPool::Impl::run_background() {
    const MutexLock lock(mutex_);
    while (!stopping_) {
        if (!headroom_wanted_ || changing_) {
            changed_.wait(mutex_);
            continue;
        }
        headroom_wanted_ = false;
        if (const size_t growth_bytes = growth_for_headroom(); growth_bytes > 0) {
            grow(growth_bytes);
        }
    }
}

void HostPool::Impl::enter_child() {
    forked_ = true;
    changing_ = false;  // Whoever made a change is not here; what it took out is lost to the child.
    static_cast<void>(background_.release());
}

HostPoolStats HostPool::Impl::stats() const {
    const MutexLock lock(mutex_);
    HostPoolStats stats = stats_;
    stats.locked_bytes = chunks_.locked_bytes();
    stats.pageable_bytes = chunks_.pageable_bytes();
    stats.ahead_bytes = ahead_bytes();
    stats.limit_bytes = options_.limit_bytes;
    return stats;
}

bool HostPool::Impl::forked() const {
    const MutexLock lock(mutex_);
    return forked_;
}

HostPool::HostPool(Device& device, const HostPoolOptions& options)
    : impl_(std::make_unique<Impl>(device, options)) {}

HostPool::~HostPool() {
    if (impl_->forked()) {
        static_cast<void>(impl_.release());
    }
}

std::optional<HostBlock> HostPool::allocate(size_t size_bytes, Growth growth) {
    return impl_->allocate(size_bytes, growth);
}

void HostPool::free(const HostBlock& block, std::vector<Event> after) noexcept {
    impl_->free(block, std::move(after));
}

std::optional<HostRun> HostPool::run_with(size_t size_bytes, const std::vector<HostOffer>& offers,
                                          Growth growth) const {
    return impl_->run_with(size_bytes, offers, growth);
}

HostPoolStats HostPool::stats() const { return impl_->stats(); }

}  // namespace trainstream
