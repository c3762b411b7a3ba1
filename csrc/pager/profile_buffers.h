// csrc/pager/profile_buffers.h: the memory that the hardware profile is measured in.
//
// Not blocks of the host pool: that may be full, and how fast and how far memory can be page-locked
// is part of what is measured. Taken the pool's own way (host_range.h), and all given back.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/device_memory.h"
#include "pager/copy_flow.h"
#include "pager/host_range.h"

namespace trainstream {

struct ProfileBufferSizes {
    /// Page-locked, half for each direction. May fit into a cache: a link is slower than that too,
    /// and beside the cores these wash the caches out.
    size_t copy_bytes = 0;
    size_t core_bytes = 0;    // For the cores: core_bytes_for() of their caches.
    size_t device_bytes = 0;  // Half for each direction.
    /// Not more than an eighth of this is taken, half of that for copies: others need it too.
    uint64_t available_host_bytes = UINT64_MAX;
    uint64_t cache_bytes = 0;  // last_level_cache_bytes(). 0: unknown.
    /// From then on no more is taken for the cores than the first 64 MiB: where a virtual machine
    /// gets its memory only when it is touched, 1 GiB takes 3 s.
    std::chrono::steady_clock::time_point touch_until =
        std::chrono::steady_clock::time_point::max();
};

/// How much memory the cores must work in for its rate to be the memory's, not the caches': three
/// times these, of which no more than a third is then in them; 256 MiB at least, 1 GiB at most.
size_t core_bytes_for(uint64_t cache_bytes);

/// Where there is less room than asked for it takes less, and says so.
///
/// Owner: one profile; no copy is under way and no thread uses the memory when it goes. Lock: none.
///
/// Invariant: the two directions' places and the cores' memory do not overlap.
class ProfileBuffers {
public:
    /// The device's memory is `stream`'s; copies may use it at once.
    ProfileBuffers(Device& device, DeviceMemory& memory, StreamId stream,
                   const ProfileBufferSizes& sizes);
    ~ProfileBuffers();
    ProfileBuffers(const ProfileBuffers&) = delete;
    ProfileBuffers& operator=(const ProfileBuffers&) = delete;

    /// What one direction's copies may use; of 0 bytes where there is no memory for them.
    CopyPlaces places(CopyDirection direction) const;
    /// Empty without memory.
    std::span<std::byte> for_cores() const { return for_cores_; }

    /// Of mapping, touching and locking. 0: refused.
    double page_lock_bytes_per_second() const { return page_lock_bytes_per_second_; }
    /// What was locked at once: all that was asked for, or, after a refusal, all that was granted.
    uint64_t page_locked_bytes() const { return page_locked_bytes_; }
    /// Why no more was. Empty: nothing was refused.
    const std::string& page_lock_refusal() const { return page_lock_refusal_; }
    /// What there was not enough of, a sentence each.
    const std::vector<std::string>& notes() const { return notes_; }

private:
    void take_host_memory(const ProfileBufferSizes& sizes);
    void take_memory_for_copies(uintptr_t begin, size_t size_bytes);
    void take_memory_for_cores(uintptr_t begin, size_t size_bytes,
                               std::chrono::steady_clock::time_point until);
    void lock_pages(uintptr_t begin, size_t size_bytes);
    void take_device_memory(StreamId stream, size_t block_bytes);
    void release() noexcept;

    Device& device_;
    DeviceMemory& memory_;
    std::optional<HostRange> range_;
    std::vector<uintptr_t> locks_;  // Where a page-locked part of it begins.
    std::span<std::byte> for_copies_;
    std::span<std::byte> for_cores_;
    std::vector<void*> blocks_;
    size_t block_bytes_ = 0;
    double page_lock_bytes_per_second_ = 0;
    uint64_t page_locked_bytes_ = 0;
    std::string page_lock_refusal_;
    std::vector<std::string> notes_;
};

}  // namespace trainstream
