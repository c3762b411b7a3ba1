// csrc/allocator/limits.h: a limit as configured (bytes, a share, or automatic) to a number of
// bytes.
#pragma once

#include <cstdint>

namespace trainstream {

/// `setting` > 0: bytes. 0: what the system can spare. < 0: minus a percentage of all of it.
uint64_t host_limit_bytes(int64_t setting);
/// Likewise for a device with `free_bytes` of `total_bytes` left; automatic keeps back what a CUDA
/// context, its modules and libraries take later: 1/32 of the device and at least 512 MiB.
uint64_t device_limit_bytes(int64_t setting, uint64_t free_bytes, uint64_t total_bytes);

}  // namespace trainstream
