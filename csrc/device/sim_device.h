// csrc/device/sim_device.h: a device made of two copy threads, so that paging runs with no GPU.
//
// Compute is the host itself, so only copies are asynchronous. They are never done on the caller's
// thread: a missing wait is a real race, which the sanitizers and a changed byte both show.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <thread>

#include "base/bytes.h"
#include "base/fork_guard.h"
#include "base/mutex.h"
#include "device/device.h"

namespace trainstream {

struct SimDeviceOptions {
    uint64_t seed = 0;                        // Of the delays and the faults.
    uint64_t memory_bytes = 4 * kGiB;         // What memory_info() says; SimMemory has the bytes.
    uint64_t copy_latency_ns_max = 0;         // Each copy waits for a random part of this.
    uint64_t to_host_bytes_per_second = 0;    // 0: as fast as the host copies.
    uint64_t to_device_bytes_per_second = 0;  // 0: as fast as the host copies.
    bool reads_pageable_memory = true;
};

/// What goes wrong from now on.
struct SimFaults {
    uint64_t fail_copy_one_in = 0;                // 0: never. Which ones, the seed decides.
    uint64_t page_lock_limit_bytes = UINT64_MAX;  // page_lock() refuses beyond this sum.
};

/// Owner: the test, or the CPU allocator; it outlives every event.
/// Lock:  its own, of rank kDevice; held neither while a copy runs nor while an event is awaited.
///
/// Invariants:
///   1. A copy leaves its queue only once it is done; the front of a queue is the one that runs.
///   2. A copy waits only for events that existed before it, so the queues cannot block each other.
///   3. In a forked child no copy thread exists; what was queued is done by the first caller who
///      asks for it, and new copies are done by their caller.
class SimDevice final : public Device {
public:
    explicit SimDevice(const SimDeviceOptions& options = {});
    ~SimDevice() override;  // Finishes every copy.
    SimDevice(const SimDevice&) = delete;
    SimDevice& operator=(const SimDevice&) = delete;

    const char* name() const override { return "sim"; }
    MemoryInfo memory_info() const override;
    int numa_node() const override { return -1; }

    bool page_lock(void* address, size_t size_bytes, std::string* reason) override;
    void page_unlock(void* address) noexcept override;
    bool reads_pageable_memory() const override { return options_.reads_pageable_memory; }

    Event record(StreamId stream) override;
    Event mark(StreamId stream) override;
    uint64_t ns_between(const Event& from, const Event& to) const override;
    void wait(StreamId stream, const Event& event) override;
    Event copy(CopyDirection direction, void* target, const void* source, size_t size_bytes,
               const std::vector<Event>& after) override;

    bool is_capturing(StreamId stream) const override;
    CopyStats copy_stats() const override;

    void set_faults(const SimFaults& faults);
    void set_capturing(bool capturing);
    uint64_t locked_bytes() const;
    /// In a forked child: does what the lost threads had left. Elsewhere nothing.
    void finish_if_forked() TS_EXCLUDES(mutex_);

private:
    class Copy;
    class Mark;
    using Queue = std::deque<std::shared_ptr<Copy>>;

    /// The copies of one direction.
    struct Lane {
        CondVar changed;
        Queue queue;
        std::unique_ptr<std::thread> thread;
    };
    using Lanes = std::array<Lane, 2>;

    void run_lane(CopyDirection direction) TS_EXCLUDES(mutex_);
    void count(const Copy& copy, uint64_t busy_ns) TS_REQUIRES(mutex_);
    void check_fault(CopyDirection direction, size_t size_bytes) TS_REQUIRES(mutex_);
    /// Refuses what CUDA refuses: a host side that is partly in a page-locked range.
    void check_range(CopyDirection direction, const void* host, size_t size_bytes)
        TS_REQUIRES(mutex_);
    /// Whether [begin, end) meets a page-locked range, and whether it lies in that one wholly.
    std::pair<bool, bool> find_locked(uintptr_t begin, uintptr_t end) const TS_REQUIRES(mutex_);
    void enter_child() TS_NO_THREAD_SAFETY_ANALYSIS;

    const SimDeviceOptions options_;
    std::atomic<bool> capturing_{false};
    std::atomic<bool> forked_{false};

    mutable Mutex mutex_{LockRank::kDevice};
    std::unique_ptr<Lanes> lanes_ TS_GUARDED_BY(mutex_);
    bool stopping_ TS_GUARDED_BY(mutex_) = false;
    uint64_t copies_asked_ TS_GUARDED_BY(mutex_) = 0;
    SimFaults faults_ TS_GUARDED_BY(mutex_);
    CopyStats stats_ TS_GUARDED_BY(mutex_);
    std::map<uintptr_t, size_t> locked_ranges_ TS_GUARDED_BY(mutex_);
    uint64_t locked_bytes_ TS_GUARDED_BY(mutex_) = 0;
    ForkGuard fork_guard_;
};

}  // namespace trainstream
