// csrc/pager/host_pool.h: page-locked host memory for storages that left the device.
//
// One reserved range of addresses. Its low end is cut into chunks, each page-locked as one and just
// as large as the block it was made for, so that locked bytes stay close to asked bytes. Behind
// them lies memory that is touched but not locked yet: touching is the slow half (4 GB/s a thread,
// locking 40), so it is done ahead of need, by many threads. Best fit with coalescing inside a
// chunk; a block never spans two, since no copy may (device.h). Apart from the pager, so that it is
// tested alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "device/device.h"

namespace trainstream {

struct HostBlock {
    void* address = nullptr;
    size_t size_bytes = 0;
    /// The device can address it. False for pageable memory on a device that cannot read that.
    bool device_visible = false;
    bool page_locked = false;

    explicit operator bool() const { return address != nullptr; }
};

struct HostPoolOptions {
    uint64_t limit_bytes = 0;    // Committed bytes never exceed this. 0: available_host_bytes().
    size_t chunk_bytes_max = 0;  // Largest step ahead of need. 0: 1 GiB.
    int touch_threads = 0;       // Of the first touch. 0: as affinity allows, at most 16.
    bool grow_in_background = true;
};

struct HostPoolStats {
    uint64_t in_use_bytes = 0;  // Handed out now, as asked (not rounded).
    uint64_t in_use_bytes_peak = 0;
    uint64_t locked_bytes = 0;    // Page-locked now.
    uint64_t pageable_bytes = 0;  // Committed without a page lock, after a refusal.
    uint64_t ahead_bytes = 0;     // Committed and touched, in no chunk yet.
    uint64_t limit_bytes = 0;
    uint64_t growths = 0;  // Times memory was committed.
    uint64_t locks = 0;    // Times memory was page-locked.
    uint64_t joins = 0;    // Of these, free neighbours locked as one: that waits for the device.
    uint64_t lock_ns = 0;  // Time spent touching and locking.
};

/// What this process may still take: min(cgroup limit - usage, MemAvailable), less 1/16 kept back.
uint64_t available_host_bytes();

/// Owner: the allocator, one for each device.
/// Lock:  rank kHostPool; not held while pages are touched or locked, nor while an event is polled
///        by the background thread.
class HostPool {
public:
    enum class Growth : uint8_t { kAllowed, kForbidden };

    HostPool(Device& device, const HostPoolOptions& options);
    ~HostPool();
    HostPool(const HostPool&) = delete;
    HostPool& operator=(const HostPool&) = delete;

    /// A block of exactly `size_bytes`, aligned to kBlockAlignment. Nothing: the limit is reached
    /// or the system has no memory; blocks whose events are done are taken back first.
    /// With growth forbidden: only from what is free now; nothing is committed, locked or awaited.
    std::optional<HostBlock> allocate(size_t size_bytes, Growth growth = Growth::kAllowed);
    /// Takes the block back; it is reused only once every event of `after` is done.
    void free(const HostBlock& block, std::vector<Event> after) noexcept;

    HostPoolStats stats() const;

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace trainstream
