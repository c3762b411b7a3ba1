#include "base/free_extents.h"

#include <gtest/gtest.h>

namespace trainstream {
namespace {

// Goal: returned parts join. Method: free the middle of three last.
TEST(FreeExtentsTest, FreeBetweenTwoFreeBlocksLeavesOneBlock) {
    FreeExtents extents;
    extents.insert(1000, 100);
    extents.insert(1200, 100);
    EXPECT_EQ(extents.count(), 2u);

    extents.insert(1100, 100);

    EXPECT_EQ(extents.count(), 1u);
    EXPECT_EQ(extents.largest_bytes(), 300u);
    EXPECT_EQ(extents.free_bytes(), 300u);
}

// Goal: the smallest extent that fits is taken; of equals the lowest.
TEST(FreeExtentsTest, BestFitTakesTheSmallestThenTheLowest) {
    FreeExtents extents;
    extents.insert(9000, 50);
    extents.insert(1000, 300);
    extents.insert(5000, 50);
    EXPECT_EQ(extents.take(40), 5000u);
    EXPECT_EQ(extents.take(50), 9000u);
    EXPECT_EQ(extents.take(11), 1000u);  // 10 are left at 5040, which is too small.
    EXPECT_EQ(extents.take(11), 1011u);
    EXPECT_EQ(extents.free_bytes(), 288u);
}

// Goal: from the top, whatever fits best; what is left below joins nothing that is not free.
TEST(FreeExtentsTest, TakeHighTakesTheHighEndOfTheHighestThatFits) {
    FreeExtents extents;
    extents.insert(1000, 300);
    extents.insert(5000, 50);
    extents.insert(9000, 60);
    EXPECT_EQ(extents.take_high(50), 9010u);
    EXPECT_EQ(extents.take_high(50), 5000u);
    EXPECT_EQ(extents.take_high(10), 9000u);
    EXPECT_EQ(extents.take_high(100), 1200u);
    EXPECT_EQ(extents.take_high(201), std::nullopt);
    EXPECT_EQ(extents.count(), 1u);
    EXPECT_EQ(extents.free_bytes(), 200u);
    extents.insert(1200, 100);
    EXPECT_EQ(extents.count(), 1u);
    EXPECT_EQ(extents.largest_bytes(), 300u);
}

TEST(FreeExtentsTest, NothingIsTakenWhenNoExtentIsLargeEnough) {
    FreeExtents extents;
    EXPECT_EQ(extents.take(1), std::nullopt);
    extents.insert(1000, 10);
    extents.insert(2000, 10);
    EXPECT_EQ(extents.take(11), std::nullopt);
    EXPECT_EQ(extents.free_bytes(), 20u);
}

// Goal: what must stay apart stays apart, until its border goes. Method: free both sides of one.
TEST(FreeExtentsTest, NothingJoinsAcrossABorder) {
    FreeExtents extents;
    extents.add_border(1100);
    extents.insert(1100, 100);
    extents.insert(1000, 100);
    extents.insert(1200, 100);
    EXPECT_EQ(extents.count(), 2u);
    EXPECT_EQ(extents.largest_bytes(), 200u);

    extents.remove(1000, 100);
    extents.remove_border(1100);
    extents.insert(1000, 100);

    EXPECT_EQ(extents.count(), 1u);
    EXPECT_EQ(extents.free_bytes(), 300u);
}

TEST(FreeExtentsTest, BytesEndingAtKnowsTheTail) {
    FreeExtents extents;
    EXPECT_EQ(extents.bytes_ending_at(100), 0u);
    extents.insert(1000, 100);
    EXPECT_EQ(extents.bytes_ending_at(1100), 100u);
    EXPECT_EQ(extents.bytes_ending_at(1099), 0u);
    EXPECT_EQ(extents.bytes_ending_at(1101), 0u);
    EXPECT_EQ(extents.bytes_ending_at(1000), 0u);
}

#ifdef TS_DEBUG_CHECKS
// Goal: giving a part back twice stops a debug build.
TEST(FreeExtentsDeathTest, DoubleFreeStops) {
    FreeExtents extents;
    extents.insert(1000, 100);
    EXPECT_DEATH(extents.insert(1050, 10), "check failed");
    EXPECT_DEATH(extents.insert(950, 100), "check failed");
}
#endif

}  // namespace
}  // namespace trainstream
