// csrc/device/device.h: the door to a device: its copies, its order of work, its page-locking.
//
// Knows no torch. CudaDevice and SimDevice keep the same contract (tests/cpp/device/
// device_contract_test.cpp); everything above sees only this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trainstream {

/// A compute stream as its runtime names it (cudaStream_t as an integer); 0 is the default stream.
using StreamId = uintptr_t;

/// A point in the device's order of work.
class EventState {
public:
    virtual ~EventState() = default;
    virtual bool is_done() const = 0;
    /// Blocks the calling host thread. Never under a pager lock.
    virtual void wait() const = 0;
};

/// Shared: many waiters hold one event. Null means "already done".
using Event = std::shared_ptr<const EventState>;

enum class CopyDirection : uint8_t { kToHost, kToDevice };

/// As error messages say it.
inline const char* words(CopyDirection direction) {
    return direction == CopyDirection::kToHost ? "to host memory" : "to the device";
}

struct MemoryInfo {
    uint64_t free_bytes = 0;
    uint64_t total_bytes = 0;
};

/// Running totals since the device was made.
struct CopyStats {
    uint64_t to_host_bytes = 0;
    uint64_t to_device_bytes = 0;
    uint64_t busy_ns = 0;  // Time in which a copy ran, both directions added up.
};

/// Owner: the allocator that opened it; it outlives every pager, event and block.
/// Lock:  its own, of rank kDevice, never held while waiting. All calls are thread-safe.
class Device {
public:
    virtual ~Device() = default;

    virtual const char* name() const = 0;
    virtual MemoryInfo memory_info() const = 0;
    /// The NUMA node next to the device, or -1 when unknown.
    virtual int numa_node() const = 0;

    /// Locks pages of host memory and makes them addressable by the device. False: refused, with
    /// the reason; the range is untouched and later calls still work (no sticky error is left).
    /// Ranges are islands: a copy whose host side reaches beyond one is refused, even where the
    /// next range begins [H200, CUDA 13.0], by torch's own copies too.
    virtual bool page_lock(void* address, size_t size_bytes, std::string* reason) = 0;
    /// Waits for all that the device is doing. No copy may use the range.
    virtual void page_unlock(void* address) noexcept = 0;
    /// Whether device code can read host memory that is not page-locked.
    virtual bool reads_pageable_memory() const = 0;

    /// The point that all work given to `stream` so far reaches.
    virtual Event record(StreamId stream) = 0;
    /// Likewise, for ns_between(). Never null.
    virtual Event mark(StreamId stream) = 0;
    /// The device's time from one mark to a later one; 0 where the order is another. Requires: both
    /// are marks of this device and done.
    virtual uint64_t ns_between(const Event& from, const Event& to) const = 0;
    /// Work given to `stream` from now on starts after `event`. The host does not wait on CUDA; the
    /// simulation, whose compute is the host, does.
    virtual void wait(StreamId stream, const Event& event) = 0;
    /// Copies on the copy stream of `direction`, after every event of `after`. Copies of one
    /// direction run in the order given; the two directions run at once.
    /// Throws Error(kCopyFailed) when refused: then nothing was copied or enqueued.
    virtual Event copy(CopyDirection direction, void* target, const void* source, size_t size_bytes,
                       const std::vector<Event>& after) = 0;

    /// True while `stream` is being captured into a graph: nothing may be recorded or copied then.
    virtual bool is_capturing(StreamId stream) const = 0;
    virtual CopyStats copy_stats() const = 0;
};

}  // namespace trainstream
