// csrc/pager/host_pool.h: page-locked host memory for storages that left the device.
//
// One reserved range of addresses. Its low end is cut into chunks, each page-locked as one and just
// as large as the block it was made for, so that locked bytes stay close to asked bytes; larger for
// callers whose sizes vary (Growth). Behind them lies memory that is touched but not locked yet:
// touching is the slow half (4 GB/s a thread, locking 40), so it is done ahead of need, by many
// threads. Best fit with coalescing inside a chunk; a block never spans two, since no copy may
// (device.h). Apart from the pager, so that it is tested alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "device/device.h"
#include "pager/host_runs.h"

namespace trainstream {

struct HostBlock {
    void* address = nullptr;
    size_t size_bytes = 0;
    /// The device can address it. False for pageable memory on a device that cannot read that.
    bool device_visible = false;
    bool page_locked = false;

    explicit operator bool() const { return address != nullptr; }
};

/// A block with a copy that its holder would give up.
struct HostOffer {
    HostBlock block;
    uint64_t heat = 0;  // Of the storage that it is a copy of: the hotter, the sooner given up.
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
    enum class Growth : uint8_t {
        kAllowed,    // By just what is asked for.
        kAhead,      // Likewise, and what is touched already is locked with it, as one.
        kJoin,       // Nothing is committed; free neighbours may be locked as one.
        kForbidden,  // Only from what is free now: nothing is committed, locked or awaited.
    };

    HostPool(Device& device, const HostPoolOptions& options);
    ~HostPool();
    HostPool(const HostPool&) = delete;
    HostPool& operator=(const HostPool&) = delete;

    /// A block of exactly `size_bytes`, aligned to kBlockAlignment. Nothing: `growth` makes no
    /// room, the limit is reached or the system has no memory. Blocks whose events are done are
    /// taken back first.
    std::optional<HostBlock> allocate(size_t size_bytes, Growth growth = Growth::kAllowed);
    /// Takes the block back; it is reused only once every event of `after` is done.
    void free(const HostBlock& block, std::vector<Event> after) noexcept;

    /// Where those blocks of `offers` begin that are to be freed, so that allocate(size_bytes,
    /// growth) finds room with kJoin or kForbidden. Nothing: all of them would not do.
    std::optional<HostRun> run_with(size_t size_bytes, const std::vector<HostOffer>& offers,
                                    Growth growth) const;

    HostPoolStats stats() const;

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace trainstream
