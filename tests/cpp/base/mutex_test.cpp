#include "base/mutex.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace trainstream {
namespace {

TEST(MutexTest, RisingRanksAreFineAndAnyOrderOfUnlocking) {
    Mutex low(LockRank::kPager);
    Mutex high(LockRank::kDevice);
    {
        MutexLock first(low);
        const MutexLock second(high);
        first.unlock();
    }
    const MutexLock again(low);
}

// Goal: a lock excludes. Method: threads count without atomics.
TEST(MutexTest, ThreadsExcludeEachOther) {
    Mutex mutex(LockRank::kPager);
    int count = 0;
    std::vector<std::thread> threads(4);
    for (std::thread& thread : threads) {
        thread = std::thread([&] {
            for (int i = 0; i < 1000; ++i) {
                const MutexLock lock(mutex);
                ++count;
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    EXPECT_EQ(count, 4000);
}

// Goal: waiting gives the mutex away and takes it back.
TEST(CondVarTest, WaitOpensTheMutexAndHoldsItAfterwards) {
    Mutex mutex(LockRank::kPager);
    CondVar changed;
    bool ready = false;
    std::thread other([&] {
        const MutexLock lock(mutex);
        ready = true;
        changed.notify_all();
    });
    {
        const MutexLock lock(mutex);
        while (!ready) {
            changed.wait(mutex);
        }
    }
    other.join();
    EXPECT_TRUE(ready);
}

#ifdef TS_DEBUG_CHECKS
// Goal: a wrong order stops at once, not at the first deadlock. Method: a falling and an equal
// rank.
TEST(MutexDeathTest, FallingRankStops) {
    Mutex low(LockRank::kPager);
    Mutex high(LockRank::kDevice);
    EXPECT_DEATH(
        {
            const MutexLock first(high);
            const MutexLock second(low);
        },
        "check failed");
}

TEST(MutexDeathTest, EqualRankStops) {
    Mutex one(LockRank::kPager);
    Mutex other(LockRank::kPager);
    EXPECT_DEATH(
        {
            const MutexLock first(one);
            const MutexLock second(other);
        },
        "check failed");
}

TEST(MutexTest, HoldsNoLockKnowsThisThreadOnly) {
    Mutex mutex(LockRank::kPager);
    EXPECT_TRUE(holds_no_lock());
    const MutexLock lock(mutex);
    EXPECT_FALSE(holds_no_lock());
    std::thread([] { EXPECT_TRUE(holds_no_lock()); }).join();
}
#endif

}  // namespace
}  // namespace trainstream
