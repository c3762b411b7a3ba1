#include "base/bytes.h"

#include <gtest/gtest.h>

namespace trainstream {
namespace {

TEST(FormatBytesTest, BelowOneKibibyteBytesAreExact) {
    EXPECT_EQ(format_bytes(0), "0 B");
    EXPECT_EQ(format_bytes(1), "1 B");
    EXPECT_EQ(format_bytes(1023), "1023 B");
}

TEST(FormatBytesTest, LargerSizesHaveTwoDigitsOfTheLargestUnit) {
    EXPECT_EQ(format_bytes(kKiB), "1.00 KiB");
    EXPECT_EQ(format_bytes(64 * kMiB), "64.00 MiB");
    EXPECT_EQ(format_bytes(kGiB + kGiB / 2), "1.50 GiB");
    EXPECT_EQ(format_bytes(3 * 1024 * kGiB), "3.00 TiB");
}

// Goal: nothing is past the last unit. Method: the largest number there is.
TEST(FormatBytesTest, BeyondTebibytesTheUnitStays) {
    EXPECT_EQ(format_bytes(UINT64_MAX), "16777216.00 TiB");
}

TEST(AlignUpTest, RoundsToTheNextMultipleAndKeepsMultiples) {
    EXPECT_EQ(align_up(0, 512), 0u);
    EXPECT_EQ(align_up(1, 512), 512u);
    EXPECT_EQ(align_up(512, 512), 512u);
    EXPECT_EQ(align_up(513, 512), 1024u);
}

}  // namespace
}  // namespace trainstream
