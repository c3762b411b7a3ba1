// csrc/pager/host_runs.h: parts side by side that together have bytes enough, and which to take.
//
// Apart from the chunks, so that the choice is compared with all runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace trainstream {

/// Bytes that are free, or would be if a copy in them were given up.
struct HostPart {
    static constexpr uint64_t kFree = UINT64_MAX;

    uintptr_t begin = 0;
    size_t size_bytes = 0;
    uint64_t heat = kFree;      // Of the coldest copy in it.
    bool after_border = false;  // It makes no run with the part before it.
};

/// Parts side by side.
struct HostRun {
    uintptr_t begin = 0;
    size_t size_bytes = 0;

    bool has(uintptr_t address) const { return address - begin < size_bytes; }
};

/// The run of `size_bytes` or more whose coldest copy is the hottest, since that one leaves last;
/// of equals, the one with the fewest bytes. `parts`: by rising address. Nothing: there is none.
std::optional<HostRun> best_run(const std::vector<HostPart>& parts, size_t size_bytes);

}  // namespace trainstream
