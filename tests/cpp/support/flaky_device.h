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
        if (refuse_page_lock) {
            *reason = "the test says so";
            return false;
        }
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
    Event mark(StreamId stream) override {
        if (refuse_record) {
            throw errors::device("record", "the test says so");
        }
        return device_.mark(stream);
    }
    uint64_t ns_between(const Event& from, const Event& to) const override {
        return device_.ns_between(from, to);
    }
    void wait(StreamId stream, const Event& event) override {
        if (refuse_wait) {
            throw errors::device("wait", "the test says so");
        }
        device_.wait(stream, event);
    }
    Event copy(CopyDirection direction, void* target, const void* source, size_t size_bytes,
               const std::vector<Event>& after) override {
        const uint64_t one_in = refuse_copy_one_in;
        if (one_in != 0 && copies_.fetch_add(1) % one_in == one_in - 1) {
            throw errors::copy_failed(words(direction), size_bytes, "the test says so");
        }
        return device_.copy(direction, target, source, size_bytes, after);
    }
    bool is_capturing(StreamId stream) const override { return device_.is_capturing(stream); }
    CopyStats copy_stats() const override { return device_.copy_stats(); }

    std::atomic<bool> refuse_record{false};
    std::atomic<bool> refuse_wait{false};
    std::atomic<bool> refuse_page_lock{false};
    std::atomic<uint64_t> refuse_copy_one_in{0};  // 0: none.

private:
    std::atomic<uint64_t> copies_{0};
    Device& device_;
};

}  // namespace trainstream::testing
