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
#include "base/free_extents.h"
#include "base/mutex.h"
#include "pager/host_range.h"

namespace trainstream {
namespace {

constexpr size_t kGrowthUnit = 2 * kMiB;
constexpr size_t kGrowthShare = 64;  // A growth step is at least 1/64 of what is committed.
constexpr size_t kHeadroomMax = 256 * kMiB;
/// How many blocks still in use by a copy an allocation looks past before it takes what is free:
/// each may cost a call into the device's runtime.
constexpr size_t kPollsMax = 8;

HostPoolOptions with_defaults(HostPoolOptions options) {
    const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    if (options.limit_bytes == 0) {
        options.limit_bytes = available_host_bytes();
    }
    options.limit_bytes -= options.limit_bytes % page_bytes;
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
/// Lock:  `mutex_`, of rank kHostPool; open while memory is touched and locked.
///
/// Invariants:
///   1. Every committed byte is in exactly one place: handed out, pending, or free in its kind.
///   2. committed_bytes() <= limit_bytes; one thread grows at a time, the one that set `growing_`.
///   3. Chunks lie end to end from the low end of the range. Once a lock was refused every later
///      chunk is pageable, so locked memory lies below `pageable_begin_` and no other does.
class HostPool::Impl {
public:
    Impl(Device& device, const HostPoolOptions& options)
        : options_(with_defaults(options)),
          reads_pageable_memory_(device.reads_pageable_memory()),
          range_(device, options_.limit_bytes, options_.touch_threads),
          fork_guard_(mutex_, [this] { enter_child(); }) {
        const MutexLock lock(mutex_);
        stats_.limit_bytes = options_.limit_bytes;
    }

    ~Impl();
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;

    std::optional<HostBlock> allocate(size_t size_bytes);
    void free(const HostBlock& block, std::vector<Event> after) noexcept;
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
    void give(uintptr_t begin, size_t extent_bytes) TS_REQUIRES(mutex_);
    size_t take_back(size_t undone_max) TS_REQUIRES(mutex_);
    bool wait_for_oldest_pending() TS_REQUIRES(mutex_);

    uint64_t committed_bytes() const TS_REQUIRES(mutex_) {
        return stats_.locked_bytes + stats_.pageable_bytes;
    }
    uintptr_t committed_end() const TS_REQUIRES(mutex_) {
        return range_.begin() + committed_bytes();
    }
    bool lock_refused() const TS_REQUIRES(mutex_) { return pageable_begin_ != UINTPTR_MAX; }
    size_t growth_for(size_t extent_bytes) const TS_REQUIRES(mutex_);
    size_t growth_for_headroom() const TS_REQUIRES(mutex_);
    bool grow(size_t size_bytes) TS_REQUIRES(mutex_);
    void add(uintptr_t begin, size_t size_bytes, bool locked) TS_REQUIRES(mutex_);

    void ask_for_headroom() TS_REQUIRES(mutex_);
    void run_background() TS_EXCLUDES(mutex_);
    void enter_child() TS_NO_THREAD_SAFETY_ANALYSIS;

    const HostPoolOptions options_;
    const bool reads_pageable_memory_;
    HostRange range_;

    mutable Mutex mutex_{LockRank::kHostPool};
    CondVar changed_;  // A growth ended, headroom is wanted, or the pool is being destroyed.
    FreeExtents locked_free_ TS_GUARDED_BY(mutex_);
    FreeExtents pageable_free_ TS_GUARDED_BY(mutex_);
    uintptr_t pageable_begin_ TS_GUARDED_BY(mutex_) = UINTPTR_MAX;
    std::vector<uintptr_t> locked_chunks_ TS_GUARDED_BY(mutex_);
    std::list<Pending> pending_ TS_GUARDED_BY(mutex_);  // Oldest first.
    HostPoolStats stats_ TS_GUARDED_BY(mutex_);
    bool growing_ TS_GUARDED_BY(mutex_) = false;
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
    for (const uintptr_t chunk : locked_chunks_) {
        range_.unlock(chunk);
    }
}

std::optional<HostBlock> HostPool::Impl::allocate(size_t size_bytes) {
    MutexLock lock(mutex_);
    take_back(kPollsMax);
    system_is_full_ = false;
    for (;;) {
        if (const std::optional<HostBlock> block = take(size_bytes)) {
            ask_for_headroom();
            return block;
        }
        if (take_back(SIZE_MAX) > 0) {
            continue;
        }
        if (growing_) {
            changed_.wait(mutex_);
            continue;
        }
        const size_t growth_bytes = growth_for(extent_bytes(size_bytes));
        if (growth_bytes > 0 && grow(growth_bytes)) {
            continue;
        }
        if (!wait_for_oldest_pending()) {
            return std::nullopt;
        }
    }
}

std::optional<HostBlock> HostPool::Impl::take(size_t size_bytes) {
    const size_t wanted_bytes = extent_bytes(size_bytes);
    bool locked = true;
    std::optional<uintptr_t> begin = locked_free_.take(wanted_bytes);
    if (!begin) {
        locked = false;
        begin = pageable_free_.take(wanted_bytes);
    }
    if (!begin) {
        return std::nullopt;
    }
    stats_.in_use_bytes += size_bytes;
    stats_.in_use_bytes_peak = std::max(stats_.in_use_bytes_peak, stats_.in_use_bytes);
    return HostBlock{reinterpret_cast<void*>(*begin), size_bytes, locked || reads_pageable_memory_};
}

void HostPool::Impl::free(const HostBlock& block, std::vector<Event> after) noexcept {
    const auto begin = reinterpret_cast<uintptr_t>(block.address);
    std::erase(after, nullptr);
    const MutexLock lock(mutex_);
    TS_ASSERT_GE(begin, range_.begin());
    TS_ASSERT_LE(begin + block.size_bytes, committed_end());
    TS_ASSERT_LE(block.size_bytes, stats_.in_use_bytes);
    stats_.in_use_bytes -= block.size_bytes;
    if (after.empty()) {
        give(begin, extent_bytes(block.size_bytes));
    } else {
        // Not polled here: the caller may hold the pager's lock.
        pending_.push_back({begin, extent_bytes(block.size_bytes), std::move(after)});
    }
}

void HostPool::Impl::give(uintptr_t begin, size_t extent_bytes) {
    (begin < pageable_begin_ ? locked_free_ : pageable_free_).insert(begin, extent_bytes);
}

/// Returns how many blocks came back; looks past at most `undone_max` that did not.
size_t HostPool::Impl::take_back(size_t undone_max) {
    size_t taken = 0;
    for (auto pending = pending_.begin(); pending != pending_.end() && undone_max > 0;) {
        if (all_done(pending->after)) {
            give(pending->begin, pending->extent_bytes);
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

/// How much to commit so that a block of `extent_bytes` fits; 0: the limit forbids it.
size_t HostPool::Impl::growth_for(size_t extent_bytes) const {
    const uint64_t room_bytes = options_.limit_bytes - committed_bytes();
    const FreeExtents& growing_kind = lock_refused() ? pageable_free_ : locked_free_;
    const size_t tail_bytes = growing_kind.bytes_ending_at(committed_end());
    TS_ASSERT_LT(tail_bytes, extent_bytes);
    const size_t needed_bytes = extent_bytes - tail_bytes;
    if (system_is_full_ || needed_bytes > room_bytes) {
        return 0;
    }
    const size_t step_bytes = std::min(options_.chunk_bytes_max, committed_bytes() / kGrowthShare);
    const size_t growth_bytes = align_up(std::max(needed_bytes, step_bytes), kGrowthUnit);
    return std::min(growth_bytes, room_bytes);
}

/// How much to commit ahead of need. It begins below half of the headroom, so that one growth
/// serves many blocks, and ends where locked memory would pass 1.03 x the bytes asked for.
size_t HostPool::Impl::growth_for_headroom() const {
    const uint64_t headroom_bytes = std::min(kHeadroomMax, committed_bytes() / kGrowthShare);
    const uint64_t free_bytes = locked_free_.free_bytes() + pageable_free_.free_bytes();
    if (headroom_bytes < kGrowthUnit || free_bytes >= headroom_bytes / 2) {
        return 0;
    }
    const uint64_t growth_bytes = align_up(headroom_bytes - free_bytes, kGrowthUnit);
    const uint64_t after_bytes = committed_bytes() + growth_bytes;
    const uint64_t peak_bytes = stats_.in_use_bytes_peak;
    const bool fits =
        after_bytes <= options_.limit_bytes && after_bytes <= peak_bytes + peak_bytes / 100 * 3;
    return fits ? growth_bytes : 0;
}

/// Opens the lock while memory is touched and locked. False: the system has none.
bool HostPool::Impl::grow(size_t size_bytes) {
    TS_ASSERT(!growing_);
    growing_ = true;
    const uintptr_t begin = committed_end();
    const bool may_lock = !lock_refused();
    const uint64_t locked_bytes = stats_.locked_bytes;
    mutex_.unlock();
    const auto start = std::chrono::steady_clock::now();
    const bool committed = range_.commit(begin, size_bytes);
    std::string reason;
    const bool locked = committed && may_lock && range_.lock(begin, size_bytes, &reason);
    if (committed && may_lock && !locked) {
        std::fprintf(stderr, "%s\n", errors::pin_refused(size_bytes, locked_bytes, reason).c_str());
    }
    const auto spent = std::chrono::nanoseconds{std::chrono::steady_clock::now() - start};
    mutex_.lock();
    growing_ = false;
    changed_.notify_all();
    if (!committed) {
        system_is_full_ = true;  // Until the next allocation: others may give memory back.
        return false;
    }
    add(begin, size_bytes, locked);
    ++stats_.growths;
    stats_.lock_ns += static_cast<uint64_t>(spent.count());
    return true;
}

void HostPool::Impl::add(uintptr_t begin, size_t size_bytes, bool locked) {
    if (locked) {
        stats_.locked_bytes += size_bytes;
        locked_chunks_.push_back(begin);
    } else {
        stats_.pageable_bytes += size_bytes;
        pageable_begin_ = std::min(pageable_begin_, begin);
    }
    give(begin, size_bytes);
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
        if (!headroom_wanted_ || growing_) {
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
    growing_ = false;  // Whoever grew is not here, and had not added its chunk yet.
    static_cast<void>(background_.release());
}

HostPoolStats HostPool::Impl::stats() const {
    const MutexLock lock(mutex_);
    return stats_;
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

std::optional<HostBlock> HostPool::allocate(size_t size_bytes) {
    return impl_->allocate(size_bytes);
}

void HostPool::free(const HostBlock& block, std::vector<Event> after) noexcept {
    impl_->free(block, std::move(after));
}

HostPoolStats HostPool::stats() const { return impl_->stats(); }

}  // namespace trainstream
