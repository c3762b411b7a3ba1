// csrc/pager/host_pool.h: page-locked host memory for storages that left the device.
//
// One reserved range of addresses, committed and page-locked from its low end in chunks, so that
// blocks may span chunks and locked bytes stay close to asked bytes. Best fit with coalescing, no
// rounding to powers of two. Apart from the pager, so that it is tested and measured alone.
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

    explicit operator bool() const { return address != nullptr; }
};

struct HostPoolOptions {
    uint64_t limit_bytes = 0;    // Committed bytes never exceed this. 0: available_host_bytes().
    size_t chunk_bytes_max = 0;  // Largest growth step. 0: 1 GiB.
    int touch_threads =
        0;  // Threads of the first touch. 0: as many as affinity allows, at most 16.
    bool grow_in_background = true;
};

struct HostPoolStats {
    uint64_t in_use_bytes = 0;  // Handed out now, as asked (not rounded).
    uint64_t in_use_bytes_peak = 0;
    uint64_t locked_bytes = 0;    // Page-locked now.
    uint64_t pageable_bytes = 0;  // Committed without a page lock, after a refusal.
    uint64_t limit_bytes = 0;
    uint64_t growths = 0;  // Times memory was committed.
    uint64_t lock_ns = 0;  // Time spent touching and locking.
};

/// What this process may still take: min(cgroup limit - usage, MemAvailable), less 1/16 kept back.
uint64_t available_host_bytes();

/// Owner: the allocator, one for each device.
/// Lock:  rank kHostPool; not held while pages are touched or locked, nor while an event is polled
///        by the background thread.
class HostPool {
public:
    HostPool(Device& device, const HostPoolOptions& options);
    ~HostPool();
    HostPool(const HostPool&) = delete;
    HostPool& operator=(const HostPool&) = delete;

    /// A block of exactly `size_bytes`, aligned to kBlockAlignment. Nothing: the limit is reached
    /// or the system has no memory; blocks whose events are done are taken back first.
    std::optional<HostBlock> allocate(size_t size_bytes);
    /// Takes the block back; it is reused only once every event of `after` is done.
    void free(const HostBlock& block, std::vector<Event> after) noexcept;

    HostPoolStats stats() const;

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace trainstream
