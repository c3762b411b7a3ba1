// csrc/pager/hardware_profile.h: what this machine's link and memories give, measured.
//
// What to keep, stream or spill is arithmetic on rates that no data sheet tells: cores and copies
// share host memory, and small copies are slow. Apart from the pager, which works without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "device/device.h"
#include "device/device_memory.h"

namespace trainstream {

/// Bytes a second in each direction. 0: not measured; a note says why.
struct CopyRates {
    double to_device = 0;
    double to_host = 0;
};

/// What can be had now, other processes and control groups counted.
struct AvailableMemory {
    uint64_t device_free_bytes = 0;  // As the driver counts: what an allocator caches is not free.
    uint64_t device_total_bytes = 0;
    uint64_t host_bytes = 0;  // available_host_bytes().
};

AvailableMemory available_memory(const Device& device);

/// Copies are from and to page-locked memory; "large" ones have large_copy_bytes.
struct HardwareProfile {
    CopyRates alone;          // Large, the other direction and the cores idle.
    CopyRates both;           // Large, both directions at once: each one's rate.
    CopyRates beside_cores;   // Large, one direction, while the cores update.
    CopyRates everything;     // Large, both directions, while the cores update.
    CopyRates copies_64_kib;  // One direction.
    CopyRates copies_1_mib;   // One direction.
    size_t large_copy_bytes = 0;

    // Three streams read, changed and written, as an optimizer does: bytes read + bytes written. In
    // memory larger than the caches, all of it in turn.
    size_t cores = 0;
    double update_bytes_per_second = 0;                // By all cores, the link idle.
    double update_beside_copies_bytes_per_second = 0;  // As part of `everything`.
    /// Cores and copies together: the sum over `everything`.
    double host_memory_bytes_per_second = 0;

    double page_lock_bytes_per_second = 0;  // Mapping, touching and locking.
    uint64_t page_locked_bytes = 0;         // How much was locked at once to see that.
    /// Why no more than page_locked_bytes may be locked. Empty: no refusal was met.
    std::string page_lock_refusal;

    AvailableMemory available;  // Before anything was taken.
    /// What was measured otherwise than asked for, or not at all: a sentence each.
    std::vector<std::string> notes;

    /// Host memory that may be page-locked beside what is: what was granted if more was refused,
    /// else what the system can spare. Nobody knows it for certain without locking it all.
    uint64_t page_lock_limit_bytes() const;
};

struct ProfileOptions {
    size_t cores = 1;  // usable_cores().
    /// Of all together: the measurements share what taking the memory leaves of it, and no less
    /// than 2 ms each. No more than half of it goes into touching the cores' memory, unless the
    /// copies' took that long; only giving the memory back comes on top.
    uint64_t time_budget_ns = 1'500'000'000;
    uint64_t cache_bytes = 0;                 // last_level_cache_bytes(). 0: unknown.
    size_t host_copy_bytes_max = 256 * kMiB;  // Page-locked, half for each direction.
    size_t host_core_bytes_max = 0;           // The cores'. 0: core_bytes_for(cache_bytes).
    size_t device_bytes_max = 128 * kMiB;     // Half for each direction.
    StreamId stream = 0;                      // For which device memory is allocated.
};

/// Measures, and gives all it took back. Other work on the device or the host makes the numbers
/// smaller. What is refused or fails is noted, and the rest is measured.
/// Throws Error(kInvalidArgument) while `stream` is being captured, and Error(kDevice) when the
/// device does not even tell its memory.
HardwareProfile measure_hardware(Device& device, DeviceMemory& memory,
                                 const ProfileOptions& options);

}  // namespace trainstream
