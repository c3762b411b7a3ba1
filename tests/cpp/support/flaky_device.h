// tests/cpp/support/flaky_device.h: a device whose order of work breaks down when a test says so.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/device.h"

namespace trainstream::testing {

/// Passes every call on. Lock: none; the flags may be set at any time.
class FlakyDevice final : public Device {
public:
    explicit FlakyDevice(Device& device) : device_(device) {}

    const char* name() const override { return device_.name(); }
    MemoryInfo memory_info() const override { return device_.memory_info(); }
    int numa_node() const override { return device_.numa_node(); }
    bool page_lock(void* address, size_t size_bytes, std::string* reason) override {
        return device_.page_lock(address, size_bytes, reason);
    }
    void page_unlock(void* address) noexcept override { device_.page_unlock(address); }
    bool reads_pageable_memory() const override { return device_.reads_pageable_memory(); }
    Event record(StreamId stream) override {
        if (refuse_record) {
            throw errors::device("record", "the test says so");
        }
        return device_.record(stream);
    }
    void wait(StreamId stream, const Event& event) override {
        if (refuse_wait) {
            throw errors::device("wait", "the test says so");
        }
        device_.wait(stream, event);
    }
    Event copy(CopyDirection direction, void* target, const void* source, size_t size_bytes,
               const std::vector<Event>& after) override {
        return device_.copy(direction, target, source, size_bytes, after);
    }
    bool is_capturing(StreamId stream) const override { return device_.is_capturing(stream); }
    CopyStats copy_stats() const override { return device_.copy_stats(); }

    std::atomic<bool> refuse_record{false};
    std::atomic<bool> refuse_wait{false};

private:
    Device& device_;
};

}  // namespace trainstream::testing
