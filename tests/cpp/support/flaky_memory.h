// tests/cpp/support/flaky_memory.h: device memory that breaks down when a test says so.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "base/error.h"
#include "device/device_memory.h"

namespace trainstream::testing {

/// Passes every call on. Lock: none; the flag may be set at any time.
class FlakyMemory final : public DeviceMemory {
public:
    explicit FlakyMemory(DeviceMemory& memory) : memory_(memory) {}

    void* allocate(size_t size_bytes, StreamId stream) override {
        if (throws) {
            throw errors::device("allocate", "the test says so");
        }
        return memory_.allocate(size_bytes, stream);
    }
    void* allocate_high(size_t size_bytes, StreamId stream, const Region& gap) override {
        if (throws) {
            throw errors::device("allocate", "the test says so");
        }
        return memory_.allocate_high(size_bytes, stream, gap);
    }
    uint64_t refusals() const override { return memory_.refusals(); }
    void free(void* address) noexcept override { memory_.free(address); }
    void defer_reuse(void* address, StreamId stream) override {
        memory_.defer_reuse(address, stream);
    }
    std::vector<Region> regions(StreamId stream) const override {
        if (const std::function<void()> copy = before_regions) {
            copy();
        }
        return memory_.regions(stream);
    }
    bool wants_rebuild(StreamId stream) const override { return memory_.wants_rebuild(stream); }
    uint64_t scattered_bytes() const override { return scattered; }
    void clear_workspaces() override { ++workspaces_cleared; }
    bool lay_anew() override {
        ++laid_anew;
        return true;
    }
    bool rebuild(StreamId stream) override { return memory_.rebuild(stream); }
    size_t slack_bytes() const override { return memory_.slack_bytes(); }
    void* allocate_beyond_budget(size_t size_bytes, StreamId stream) override {
        return memory_.allocate_beyond_budget(size_bytes, stream);
    }
    uint64_t budget_bytes() const override { return memory_.budget_bytes(); }
    uint64_t peak_bytes() const override { return memory_.peak_bytes(); }

    /// Not for lack of memory: a device that reports an error of an earlier kernel.
    std::atomic<bool> throws{false};
    /// What it says lies outside its regions, and how often it was asked to change that.
    std::atomic<uint64_t> scattered{0};
    std::atomic<int> laid_anew{0};
    std::atomic<int> workspaces_cleared{0};
    /// Run by regions(): what other threads do at this moment. It may replace itself.
    std::function<void()> before_regions;

private:
    DeviceMemory& memory_;
};

}  // namespace trainstream::testing
