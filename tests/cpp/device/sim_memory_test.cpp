#include "device/sim_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"

namespace trainstream {
namespace {

constexpr size_t kPage = 4 * kKiB;

// Goal: the budget is kept to the page. Method: fill it exactly, then ask for one byte more.
TEST(SimMemoryTest, AllocateBeyondTheBudgetReturnsNull) {
    SimMemory memory({.budget_bytes = 8 * kPage});
    void* const all = memory.allocate(8 * kPage, 0);
    ASSERT_NE(all, nullptr);

    EXPECT_EQ(memory.allocate(1, 0), nullptr);
    EXPECT_EQ(memory.allocate(SIZE_MAX, 0), nullptr);

    memory.free(all);
    EXPECT_NE(memory.allocate(8 * kPage, 0), nullptr);
}

// Goal: what is counted is whole pages, and the peak stays. Method: blocks of odd sizes.
TEST(SimMemoryTest, UsedBytesAreWholePagesAndThePeakStays) {
    SimMemory memory({.budget_bytes = 16 * kPage});
    void* const one = memory.allocate(1, 0);
    void* const two = memory.allocate(kPage + 1, 0);
    EXPECT_EQ(memory.used_bytes(), 3 * kPage);

    memory.free(one);
    memory.free(two);

    EXPECT_EQ(memory.used_bytes(), 0u);
    EXPECT_EQ(memory.peak_bytes(), 3 * kPage);
    EXPECT_EQ(memory.budget_bytes(), 16 * kPage);
}

// Goal: a stale pointer faults at once. Method: read a freed block in a death test.
TEST(SimMemoryDeathTest, ReadingFreedMemoryFaults) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    SimMemory memory({.budget_bytes = 4 * kPage});
    auto* const bytes = static_cast<volatile char*>(memory.allocate(kPage, 0));
    bytes[0] = 1;
    memory.free(const_cast<char*>(bytes));

    EXPECT_DEATH(static_cast<void>(bytes[0]), "");
}

#ifdef TS_DEBUG_CHECKS
// Goal: freeing what was never handed out stops a debug build.
TEST(SimMemoryDeathTest, FreeingAnUnknownAddressStops) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    SimMemory memory({.budget_bytes = 4 * kPage});
    char elsewhere = 0;
    EXPECT_DEATH(memory.free(&elsewhere), "check failed");
}
#endif

// Goal: a block's old bytes do not reach its next owner. Method: fill, free, allocate, compare.
TEST(SimMemoryTest, NewBlockReadsAsZero) {
    SimMemory memory({.budget_bytes = 4 * kPage});
    void* const first = memory.allocate(4 * kPage, 0);
    std::memset(first, 0xA5, 4 * kPage);
    memory.free(first);

    const auto* const second = static_cast<const unsigned char*>(memory.allocate(4 * kPage, 0));

    ASSERT_EQ(second, first);
    EXPECT_TRUE(std::all_of(second, second + 4 * kPage, [](unsigned char b) { return b == 0; }));
}

// Goal: fragmentation is real. Method: free every other page of a full arena; half is free, and
// still two pages in a row are not to be had until a neighbour leaves too.
TEST(SimMemoryTest, FragmentedArenaRefusesWhatTheSumWouldFit) {
    SimMemory memory({.budget_bytes = 8 * kPage});
    std::vector<void*> pages(8);
    std::generate(pages.begin(), pages.end(), [&] { return memory.allocate(kPage, 0); });
    for (size_t i = 0; i < pages.size(); i += 2) {
        memory.free(pages[i]);
    }
    EXPECT_EQ(memory.allocate(2 * kPage, 0), nullptr);

    memory.free(pages[1]);

    EXPECT_EQ(memory.allocate(3 * kPage, 0), pages[0]);
}

// Goal: callers can find joined free blocks. Method: every block lies in the one region.
TEST(SimMemoryTest, EveryBlockLiesInTheOneRegion) {
    SimMemory memory({.budget_bytes = 4 * kPage + 1});
    const std::vector<Region> regions = memory.regions(0);
    ASSERT_EQ(regions.size(), 1u);
    EXPECT_EQ(regions[0].end - regions[0].begin, 5 * kPage);
    void* const block = memory.allocate(4 * kPage, 0);
    EXPECT_TRUE(regions[0].contains(reinterpret_cast<uintptr_t>(block)));
    EXPECT_FALSE(memory.rebuild(0));
}

TEST(SimMemoryTest, BudgetOfZeroIsRefusedInWords) {
    EXPECT_THROW(SimMemory({.budget_bytes = 0}), Error);
}

// Goal: blocks never overlap and the sum is kept, whatever the threads do. Method: each thread
// fills its blocks with its own byte, looks whether they stayed so, and frees them.
TEST(SimMemoryTest, ThreadsNeverShareABlock) {
    SimMemory memory({.budget_bytes = 256 * kPage});
    const auto walk = [&memory](unsigned char mark) {
        std::mt19937 random(mark);
        for (int round = 0; round < 300; ++round) {
            const size_t size = 1 + random() % (8 * kPage);
            auto* const block = static_cast<unsigned char*>(memory.allocate(size, 0));
            ASSERT_NE(block, nullptr);
            std::memset(block, mark, size);
            EXPECT_TRUE(
                std::all_of(block, block + size, [mark](unsigned char b) { return b == mark; }));
            memory.free(block);
        }
    };
    std::vector<std::thread> threads;
    for (unsigned char mark = 1; mark <= 4; ++mark) {
        threads.emplace_back(walk, mark);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    EXPECT_EQ(memory.used_bytes(), 0u);
}

}  // namespace
}  // namespace trainstream
