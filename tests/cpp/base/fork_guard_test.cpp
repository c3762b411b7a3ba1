#include "base/fork_guard.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "support/in_child.h"

namespace trainstream {
namespace {

using testing::holds_in_child;

// Goal: the child is told, the parent is not.
TEST(ForkGuardTest, OnlyTheChildIsTold) {
    Mutex mutex(LockRank::kPager);
    bool told = false;
    const ForkGuard guard(mutex, [&] { told = true; });

    EXPECT_TRUE(holds_in_child([&] { return told; }));

    EXPECT_FALSE(told);
    const MutexLock lock(mutex);  // Open again in the parent.
}

// Goal: the child never meets a closed mutex nor a half-made change. Method: a thread changes two
// numbers together all the while; forked children lock and compare.
TEST(ForkGuardTest, ChildFindsTheMutexOpenAndWhatItGuardsWhole) {
    Mutex mutex(LockRank::kPager);
    const ForkGuard guard(mutex, [] {});
    int first = 0;
    int second = 0;
    std::atomic<bool> stop{false};
    std::thread writer([&] {
        while (!stop) {
            const MutexLock lock(mutex);
            ++first;
            std::this_thread::yield();
            ++second;
        }
    });
    for (int round = 0; round < 50; ++round) {
        EXPECT_TRUE(holds_in_child([&] {
            const MutexLock lock(mutex);
            return first == second;
        }));
    }
    stop = true;
    writer.join();
}

// Goal: guards of one rank and of several live together, and one that is gone is not called.
TEST(ForkGuardTest, ManyGuardsAreHeldAndGoneOnesForgotten) {
    Mutex low(LockRank::kPager);
    Mutex high(LockRank::kDevice);
    Mutex equal(LockRank::kDevice);
    int told = 0;
    const ForkGuard last(high, [&] { ++told; });
    const ForkGuard also_last(equal, [&] { ++told; });
    const ForkGuard first(low, [&] { ++told; });
    {
        Mutex gone(LockRank::kDevice);
        const ForkGuard guard(gone, [&] { told += 100; });
    }
    EXPECT_TRUE(holds_in_child([&] {
        const MutexLock lock(low);
        const MutexLock inner(high);
        return told == 3;
    }));
}

}  // namespace
}  // namespace trainstream
