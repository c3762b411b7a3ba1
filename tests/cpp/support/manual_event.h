// tests/cpp/support/manual_event.h: an event that is done when the test says so.
#pragma once

#include <atomic>
#include <memory>

#include "device/device.h"

namespace trainstream::testing {

/// Lock: none. finish() hands over what the finishing thread wrote before.
class ManualEvent final : public EventState {
public:
    bool is_done() const override { return done_.load(std::memory_order_acquire); }
    void wait() const override {
        awaited_.store(true, std::memory_order_release);
        awaited_.notify_all();
        done_.wait(false, std::memory_order_acquire);
    }
    /// Returns once somebody waits for it.
    void until_awaited() const { awaited_.wait(false, std::memory_order_acquire); }
    void finish() {
        done_.store(true, std::memory_order_release);
        done_.notify_all();
    }

private:
    std::atomic<bool> done_{false};
    mutable std::atomic<bool> awaited_{false};
};

}  // namespace trainstream::testing
