#include "allocator/limits.h"

#include <algorithm>

#include <unistd.h>

#include "base/bytes.h"
#include "pager/host_pool.h"

namespace trainstream {

namespace {

uint64_t share(int64_t minus_percent, uint64_t total_bytes) {
    return total_bytes / 100 * static_cast<uint64_t>(-minus_percent);
}

}  // namespace

uint64_t host_limit_bytes(int64_t setting) {
    if (setting > 0) {
        return static_cast<uint64_t>(setting);
    }
    if (setting == 0) {
        return available_host_bytes();
    }
    const auto pages = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES));
    return share(setting, pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
}

uint64_t device_limit_bytes(int64_t setting, uint64_t free_bytes, uint64_t total_bytes) {
    if (setting > 0) {
        return static_cast<uint64_t>(setting);
    }
    if (setting < 0) {
        return share(setting, total_bytes);
    }
    const uint64_t kept_back = std::max<uint64_t>(total_bytes / 32, 512 * kMiB);
    return free_bytes > kept_back ? free_bytes - kept_back : free_bytes / 2;
}

}  // namespace trainstream
