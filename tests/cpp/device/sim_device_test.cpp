#include "device/sim_device.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"
#include "support/in_child.h"
#include "support/manual_event.h"

namespace trainstream {
namespace {

using testing::holds_in_child;
using testing::ManualEvent;
using Bytes = std::vector<unsigned char>;

/// Which of `count` copies are refused, one character each.
std::string faults_of(uint64_t seed, uint64_t one_in, int count) {
    SimDevice device({.seed = seed});
    device.set_faults({.fail_copy_one_in = one_in});
    std::string outcome;
    const char from = 1;
    char to = 0;
    for (int i = 0; i < count; ++i) {
        try {
            device.copy(CopyDirection::kToHost, &to, &from, 1, {})->wait();
            outcome += '.';
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::kCopyFailed);
            outcome += 'x';
        }
    }
    return outcome;
}

// Goal: a failing run can be repeated. Method: the same seed twice, and another one.
TEST(SimDeviceTest, FaultsFollowTheSeed) {
    const std::string first = faults_of(/*seed=*/7, /*one_in=*/4, 200);
    EXPECT_EQ(first, faults_of(7, 4, 200));
    EXPECT_NE(first, faults_of(8, 4, 200));
    EXPECT_NE(first.find('x'), std::string::npos);
    EXPECT_NE(first.find('.'), std::string::npos);
    EXPECT_EQ(faults_of(7, 0, 50), std::string(50, '.'));
    EXPECT_EQ(faults_of(7, 1, 50), std::string(50, 'x'));
}

// Goal: a refused copy moves nothing and leaves the queue whole.
TEST(SimDeviceTest, RefusedCopyMovesNothingAndTheNextOneWorks) {
    SimDevice device;
    const Bytes from(1000, 0xA5);
    Bytes to(1000, 0);
    device.set_faults({.fail_copy_one_in = 1});
    EXPECT_THROW(device.copy(CopyDirection::kToDevice, to.data(), from.data(), 1000, {}), Error);
    device.set_faults({});
    EXPECT_EQ(to, Bytes(1000, 0));
    EXPECT_EQ(device.copy_stats().to_device_bytes, 0u);

    device.copy(CopyDirection::kToDevice, to.data(), from.data(), 1000, {})->wait();

    EXPECT_EQ(to, from);
}

// Goal: the two directions run at once. Method: one is held up by an event; the other finishes.
TEST(SimDeviceTest, OneDirectionDoesNotWaitForTheOther) {
    SimDevice device;
    const auto gate = std::make_shared<ManualEvent>();
    const char from = 1;
    char held = 0;
    char passed = 0;
    const Event held_copy = device.copy(CopyDirection::kToHost, &held, &from, 1, {gate});

    device.copy(CopyDirection::kToDevice, &passed, &from, 1, {})->wait();

    EXPECT_EQ(passed, 1);
    EXPECT_FALSE(held_copy->is_done());
    gate->finish();
    held_copy->wait();
    EXPECT_EQ(held, 1);
}

// Goal: a link has the rate and latency it was given. Method: lower bounds only: a copy may take
// longer, never less.
TEST(SimDeviceTest, CopyTakesAtLeastItsTransferTime) {
    SimDevice device({.copy_latency_ns_max = 1000, .to_host_bytes_per_second = 1'000'000'000});
    const Bytes from(2'000'000, 3);
    Bytes to(from.size());
    device.copy(CopyDirection::kToHost, to.data(), from.data(), from.size(), {})->wait();
    EXPECT_EQ(to, from);
    EXPECT_GE(device.copy_stats().busy_ns, 2'000'000u);
    EXPECT_EQ(device.copy_stats().to_host_bytes, from.size());
}

// Goal: no copy is lost. Method: destroy the device with its queue full.
TEST(SimDeviceTest, DestructorFinishesEveryCopy) {
    const Bytes from(4096, 0x5A);
    std::vector<Bytes> to(64, Bytes(from.size()));
    {
        SimDevice device({.seed = 3, .copy_latency_ns_max = 20'000});
        for (Bytes& target : to) {
            device.copy(CopyDirection::kToHost, target.data(), from.data(), from.size(), {});
        }
    }
    EXPECT_EQ(to, std::vector<Bytes>(64, from));
}

// Goal: the limit on page-locking holds, is said in words, and comes back on unlocking.
TEST(SimDeviceTest, PageLockIsRefusedBeyondTheLimit) {
    SimDevice device;
    device.set_faults({.page_lock_limit_bytes = 100});
    Bytes first(80);
    Bytes second(80);
    std::string reason;
    EXPECT_TRUE(device.page_lock(first.data(), first.size(), &reason));
    EXPECT_FALSE(device.page_lock(second.data(), second.size(), &reason));
    EXPECT_EQ(reason, "the simulated limit is 100 B");
    EXPECT_EQ(device.locked_bytes(), 80u);

    device.page_unlock(first.data());

    EXPECT_TRUE(device.page_lock(second.data(), second.size(), &reason));
    device.page_unlock(second.data());
    EXPECT_EQ(device.locked_bytes(), 0u);
}

// Goal: the simulation refuses what CUDA refuses. Method: two ranges side by side, and copies
// inside one, across both, and out of one into pageable memory.
TEST(SimDeviceTest, CopyBeyondOnePageLockedRangeIsRefused) {
    SimDevice device;
    Bytes host(300);
    Bytes block(300);
    std::string reason;
    ASSERT_TRUE(device.page_lock(host.data(), 100, &reason));
    ASSERT_TRUE(device.page_lock(host.data() + 100, 100, &reason));
    const auto copy = [&](size_t offset, size_t size) {
        device.copy(CopyDirection::kToDevice, block.data(), host.data() + offset, size, {})->wait();
        device.copy(CopyDirection::kToHost, host.data() + offset, block.data(), size, {})->wait();
    };
    EXPECT_NO_THROW(copy(0, 100));
    EXPECT_NO_THROW(copy(150, 50));
    EXPECT_NO_THROW(copy(200, 100));
    EXPECT_THROW(copy(50, 100), Error);
    EXPECT_THROW(copy(150, 100), Error);
    EXPECT_THROW(copy(0, 300), Error);
    device.page_unlock(host.data());
    device.page_unlock(host.data() + 100);
}

TEST(SimDeviceTest, CapturingIsWhatTheTestSays) {
    SimDevice device;
    EXPECT_FALSE(device.is_capturing(0));
    device.set_capturing(true);
    EXPECT_TRUE(device.is_capturing(0));
}

// Goal: a forked child can copy, though it has no copy threads.
TEST(SimDeviceForkTest, ChildCopiesInline) {
    SimDevice device;
    const Bytes from(5000, 9);
    Bytes to(5000);
    device.copy(CopyDirection::kToHost, to.data(), from.data(), 1, {})->wait();

    EXPECT_TRUE(holds_in_child([&] {
        const Event done =
            device.copy(CopyDirection::kToHost, to.data(), from.data(), to.size(), {});
        return done->is_done() && to == from;
    }));
}

// Goal: a copy that was queued at the fork is not lost in the child. Method: hold the copies up so
// that the fork cuts them off, and ask for the last one in the child; a chain over both directions.
TEST(SimDeviceForkTest, ChildFinishesWhatTheForkCutOff) {
    SimDevice device({.to_host_bytes_per_second = 10'000'000});
    const Bytes from(1'000'000, 0x77);
    Bytes middle(from.size());
    Bytes to(from.size());
    const Event first =
        device.copy(CopyDirection::kToHost, middle.data(), from.data(), from.size(), {});
    const Event second =
        device.copy(CopyDirection::kToDevice, to.data(), middle.data(), to.size(), {first});

    EXPECT_TRUE(holds_in_child([&] {
        second->wait();
        return first->is_done() && to == from;
    }));

    second->wait();
    EXPECT_EQ(to, from);
}

// Goal: a child that ends in the ordinary way does not hang on threads it lacks.
TEST(SimDeviceForkTest, ChildCanDestroyTheDevice) {
    auto device = std::make_unique<SimDevice>();
    const char from = 1;
    char to = 0;
    device->copy(CopyDirection::kToHost, &to, &from, 1, {})->wait();
    EXPECT_TRUE(holds_in_child([&] {
        device.reset();
        return true;
    }));
}

// Goal: no fork meets a lock that a lost thread holds. Method: fork while copies run.
TEST(SimDeviceForkTest, ForkUnderLoadNeverHangsTheChild) {
    SimDevice device;
    const Bytes from(64, 1);
    Bytes to(64);
    for (int round = 0; round < 20; ++round) {
        Event last;
        for (int i = 0; i < 50; ++i) {
            last = device.copy(CopyDirection::kToHost, to.data(), from.data(), to.size(), {});
        }
        EXPECT_TRUE(holds_in_child([&] {
            last->wait();
            return device.copy_stats().to_host_bytes > 0;
        }));
        last->wait();
    }
}

}  // namespace
}  // namespace trainstream
