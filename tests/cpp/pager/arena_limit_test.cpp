#include "pager/arena_limit.h"

#include <gtest/gtest.h>

#include <functional>

#include "base/bytes.h"

namespace trainstream {
namespace {

constexpr uint64_t kBudget = 1024 * kMiB;
constexpr uint64_t kLeast = 32 * kMiB;
constexpr uint64_t kArena = 256 * kMiB;

/// Runs plans until one stays, where a step takes what `step_ns` says. Returns its size.
uint64_t settle(ArenaLimit* limit, const std::function<uint64_t(uint64_t)>& step_ns,
                uint64_t pressed_bytes, int* plans = nullptr) {
    uint64_t arena = kArena;
    for (int i = 1; i <= 10; ++i) {
        if (plans != nullptr) {
            *plans = i;
        }
        if (!limit->judge({arena, pressed_bytes, step_ns(arena)}, kBudget, kLeast)) {
            return arena;
        }
        arena = std::min(kArena, limit->bytes());
    }
    ADD_FAILURE() << "it never settles";
    return 0;
}

TEST(ArenaLimitTest, WhatDoesNotPressStays) {
    ArenaLimit limit;
    EXPECT_EQ(settle(
                  &limit, [](uint64_t) { return 1000; }, kBudget / 16),
              kArena);
    EXPECT_EQ(limit.bytes(), UINT64_MAX);
}

TEST(ArenaLimitTest, ASmallerArenaIsTriedAndKeptWhereItIsFaster) {
    ArenaLimit limit;
    int plans = 0;
    const auto faster = [](uint64_t arena) { return arena; };
    EXPECT_EQ(settle(&limit, faster, kBudget / 2, &plans), kArena / 4);  // Halved twice.
    EXPECT_EQ(plans, 3);
}

TEST(ArenaLimitTest, ItGoesBackWhereTheSmallerOneIsSlower) {
    ArenaLimit limit;
    int plans = 0;
    const auto slower = [](uint64_t arena) { return 2 * kArena - arena; };
    EXPECT_EQ(settle(&limit, slower, kBudget / 2, &plans), kArena);
    EXPECT_EQ(plans, 3);  // There and back.
}

TEST(ArenaLimitTest, NoiseIsNoReasonToShrink) {
    ArenaLimit limit;
    const auto noise = [](uint64_t arena) { return arena == kArena ? 1000 : 990; };
    EXPECT_EQ(settle(&limit, noise, kBudget / 2), kArena);
}

TEST(ArenaLimitTest, WhatSettledStaysWhateverPresses) {
    ArenaLimit limit;
    settle(
        &limit, [](uint64_t arena) { return 2 * kArena - arena; }, kBudget / 2);
    EXPECT_FALSE(limit.judge({kArena, kBudget, 5000}, kBudget, kLeast));
    limit.forget();
    EXPECT_TRUE(limit.judge({kArena, kBudget, 5000}, kBudget, kLeast));
}

TEST(ArenaLimitTest, ASizeWithoutRoomIsNotGoneBackTo) {
    ArenaLimit limit;
    ASSERT_TRUE(limit.judge({kArena, kBudget, 1000}, kBudget, kLeast));
    const uint64_t smaller = limit.bytes();
    ASSERT_TRUE(limit.shrink(smaller, kMiB, kLeast));
    EXPECT_EQ(limit.bytes(), smaller - kMiB);
    EXPECT_FALSE(limit.judge({smaller - kMiB, kBudget, 9000}, kBudget, kLeast));
    EXPECT_EQ(limit.bytes(), smaller - kMiB);
}

TEST(ArenaLimitTest, TwiceAtMostAndNeverBelowTheLeast) {
    ArenaLimit limit;
    EXPECT_FALSE(limit.shrink(kLeast, kBudget, kLeast));
    EXPECT_TRUE(limit.shrink(kLeast + kMiB, kBudget, kLeast));
    EXPECT_EQ(limit.bytes(), kLeast);
    EXPECT_TRUE(limit.shrink(kArena, kMiB, kLeast));
    EXPECT_FALSE(limit.shrink(kArena, kMiB, kLeast));
    limit.forget();
    limit.settle();
    EXPECT_FALSE(limit.shrink(kArena, kMiB, kLeast));
}

}  // namespace
}  // namespace trainstream
