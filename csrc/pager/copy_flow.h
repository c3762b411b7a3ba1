// csrc/pager/copy_flow.h: copies of one size in one direction, as many as the link takes.
//
// For the hardware profile: several are under way at once, as when the pager moves storages, so
// that the link never waits for the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "device/device.h"

namespace trainstream {

/// Memory on both sides of the link, for one direction's copies alone.
struct CopyPlaces {
    std::byte* host = nullptr;
    size_t host_bytes = 0;
    std::byte* device = nullptr;
    size_t device_bytes = 0;
};

/// Owner: one measurement. Lock: none. Invariant: at most `depth` copies are under way, and none is
/// when it is gone.
class CopyFlow {
public:
    /// Requires: `copy_bytes` fit on both sides, and nobody else uses these.
    CopyFlow(Device& device, CopyDirection direction, const CopyPlaces& places, size_t copy_bytes,
             size_t depth);
    ~CopyFlow();
    CopyFlow(const CopyFlow&) = delete;
    CopyFlow& operator=(const CopyFlow&) = delete;

    /// Asks for copies up to the depth, waits for the oldest and counts those that are done.
    /// Throws what the device throws.
    void advance();
    uint64_t done_bytes() const { return done_bytes_; }

private:
    Event next_copy();

    Device& device_;
    const CopyDirection direction_;
    const CopyPlaces places_;
    const size_t copy_bytes_;
    const size_t depth_;
    std::deque<Event> under_way_;
    size_t asked_ = 0;
    uint64_t done_bytes_ = 0;
};

}  // namespace trainstream
