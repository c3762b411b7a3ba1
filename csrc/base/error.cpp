#include "base/error.h"

#include <algorithm>

#include "base/bytes.h"

namespace trainstream::errors {

Error out_of_memory(const MemoryNumbers& n) {
    const uint64_t movable = n.in_use_bytes - n.pinned_bytes;
    return {ErrorKind::kOutOfMemory,
            "trainstream: cannot place a storage of " + format_bytes(n.asked_bytes) +
                ": device budget " + format_bytes(n.budget_bytes) + ", in use " +
                format_bytes(n.in_use_bytes) + ", of which " + format_bytes(n.pinned_bytes) +
                " is pinned and " + format_bytes(movable) + " can move; host memory limit " +
                format_bytes(n.host_limit_bytes) + ", in use " + format_bytes(n.host_in_use_bytes) +
                ". Raise vram or ram in PYTORCH_TRAINSTREAM_CONF by at least " +
                format_bytes(n.asked_bytes) + ", or make the batch smaller."};
}

Error host_memory_exhausted(uint64_t asked_bytes, uint64_t in_use_bytes, uint64_t limit_bytes) {
    return {ErrorKind::kOutOfMemory,
            "trainstream: no host memory for an optimizer state of " + format_bytes(asked_bytes) +
                ": limit " + format_bytes(limit_bytes) + ", in use " + format_bytes(in_use_bytes) +
                ". Raise ram in PYTORCH_TRAINSTREAM_CONF, use moments='bfloat16', or train fewer "
                "parameters."};
}

Error does_not_fit(const FitNumbers& n) {
    const uint64_t device = n.fixed_bytes + n.resident_bytes + n.inflight_bytes;
    const uint64_t lack = device - std::min(device, n.device_budget_bytes);
    const uint64_t host_lack = n.paged_bytes - std::min(n.paged_bytes, n.host_budget_bytes);
    std::string advice = "Raise ram by at least " + format_bytes(host_lack);
    if (lack > 0) {
        // More host memory helps where a block could still be paged.
        const std::string what = n.resident_bytes > 0 && host_lack == 0 ? "vram or ram" : "vram";
        advice = "Raise " + what + " by at least " + format_bytes(lack) +
                 (host_lack > 0 ? " and ram by " + format_bytes(host_lack) : "");
    }
    std::string on_device;
    if (device > 0) {
        on_device = "device memory must hold " + format_bytes(device) + " at once (" +
                    format_bytes(n.fixed_bytes) + " outside the blocks + " +
                    format_bytes(n.resident_bytes) + " in blocks that stay + " +
                    format_bytes(n.inflight_bytes) + " in flight), the budget is " +
                    format_bytes(n.device_budget_bytes) + "; ";
    }
    return {ErrorKind::kOutOfMemory,
            "trainstream: the run cannot fit: " + on_device + "host memory must hold " +
                format_bytes(n.paged_bytes) + " in paged blocks, the limit is " +
                format_bytes(n.host_budget_bytes) + ". " + advice +
                ", make the batch smaller, or try all the same with check_memory=False."};
}

Error copy_failed(const char* direction, size_t size_bytes, const std::string& reason) {
    return {ErrorKind::kCopyFailed, "trainstream: copy of " + format_bytes(size_bytes) + " " +
                                        direction + " failed: " + reason +
                                        ". The storage stays where it is; nothing is lost."};
}

Error device(const char* call, const std::string& reason) {
    return {ErrorKind::kDevice, std::string("trainstream: ") + call + " failed: " + reason + "."};
}

Error late_update_failed(const std::string& reason) {
    return {ErrorKind::kDevice,
            "trainstream: an optimizer's update, put off until its weights were used, failed: " +
                reason.substr(0, reason.find('\n')) +
                " The weights are as they were before it, and the run stops here. With "
                "late_updates:0 in PYTORCH_TRAINSTREAM_CONF updates are made within their step."};
}

Error invalid_argument(const std::string& text) {
    return {ErrorKind::kInvalidArgument, "trainstream: " + text};
}

Error host_range_refused(size_t size_bytes, const std::string& reason) {
    return {ErrorKind::kOutOfMemory,
            "trainstream: reserving addresses for " + format_bytes(size_bytes) +
                " of host memory was refused: " + reason +
                ". Raise the limit on address space (ulimit -v) or lower ram in "
                "PYTORCH_TRAINSTREAM_CONF."};
}

std::string pin_refused(size_t size_bytes, uint64_t locked_bytes, const std::string& reason) {
    return "trainstream: page-locking " + format_bytes(size_bytes) + " was refused with " +
           format_bytes(locked_bytes) + " locked so far: " + reason +
           ". Going on in pageable memory: right, but slower. Raise the limit (ulimit -l, the "
           "container's memory lock) or lower ram in PYTORCH_TRAINSTREAM_CONF.";
}

}  // namespace trainstream::errors
