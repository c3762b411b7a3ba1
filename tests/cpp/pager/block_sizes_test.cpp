// Which blocks fill a capacity best, against all subsets; and even spacing.
#include "pager/block_sizes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "base/bytes.h"

namespace trainstream {
namespace {

using Sizes = std::vector<uint64_t>;

/// The most bytes that a subset of `sizes` has without exceeding `capacity`.
uint64_t fullest_of_all_subsets(const Sizes& sizes, uint64_t capacity) {
    uint64_t best = 0;
    for (size_t subset = 0; subset < size_t{1} << sizes.size(); ++subset) {
        uint64_t bytes = 0;
        for (size_t i = 0; i < sizes.size(); ++i) {
            bytes += (subset >> i & 1) != 0 ? sizes[i] : 0;
        }
        best = bytes <= capacity ? std::max(best, bytes) : best;
    }
    return best;
}

uint64_t fullest(const Sizes& sizes, uint64_t capacity) {
    const std::vector<SizeClass> classes = classes_of(sizes);
    const std::vector<size_t> counts = fullest_counts(classes, capacity);
    uint64_t bytes = 0;
    for (size_t i = 0; i < classes.size(); ++i) {
        EXPECT_LE(counts[i], classes[i].blocks.size());
        bytes += counts[i] * classes[i].size_bytes;
    }
    EXPECT_LE(bytes, capacity);
    return bytes;
}

TEST(BlockSizesTest, ClassesAreLargestFirstAndNameEachBlockOnce) {
    const std::vector<SizeClass> classes = classes_of({5, 9, 5, 1});
    ASSERT_EQ(classes.size(), 3u);
    EXPECT_EQ(classes[0].size_bytes, 9u);
    EXPECT_EQ(classes[1].blocks, (std::vector<size_t>{0, 2}));
    EXPECT_EQ(classes[1].bytes(), 10u);
    EXPECT_EQ(classes[2].blocks, (std::vector<size_t>{3}));
}

// Goal: nothing fills a capacity better. Method: 1000 random lists of up to 12 sizes, few or many
// of them distinct, each compared with all of its subsets.
TEST(BlockSizesTest, NoSubsetIsFuller) {
    std::mt19937_64 random(7);
    for (int round = 0; round < 1000; ++round) {
        SCOPED_TRACE(round);
        const uint64_t largest = round % 2 == 0 ? 4 : 1000;
        Sizes sizes(1 + random() % 12);
        for (uint64_t& size : sizes) {
            size = 1 + random() % largest;
        }
        const uint64_t total = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
        const uint64_t capacity = random() % (total + 2);
        ASSERT_EQ(fullest(sizes, capacity), fullest_of_all_subsets(sizes, capacity));
    }
}

// Goal: a model's sizes, whatever the capacity, take no time. Method: 300 blocks of three sizes,
// and 400 of sizes that all differ; a hundred capacities of each.
TEST(BlockSizesTest, LongListsAreFilledToo) {
    Sizes few;
    Sizes many;
    for (uint64_t i = 0; i < 400; ++i) {
        few.push_back((i % 100 == 0 ? 1000 : 64 + i % 2) * kMiB);
        many.push_back(kMiB + i * i * 512);
    }
    const uint64_t total = std::accumulate(many.begin(), many.end(), uint64_t{0});
    for (uint64_t percent = 0; percent < 100; ++percent) {
        EXPECT_LE(percent * kGiB / 4, fullest(few, percent * kGiB / 4) + kMiB);
        EXPECT_LE(total / 100 * percent, fullest(many, total / 100 * percent) + kMiB);
    }
}

// Goal: neighbours are n/k apart, rounded, around the end as well. Method: all k and n up to 60.
TEST(SpreadTest, PositionsAreEvenlySpaced) {
    for (size_t n = 0; n <= 60; ++n) {
        EXPECT_TRUE(spread(0, n).empty());
        for (size_t k = 1; k <= n; ++k) {
            const std::vector<size_t> positions = spread(k, n);
            ASSERT_EQ(positions.size(), k);
            ASSERT_LT(positions.back(), n);
            for (size_t i = 0; i < k; ++i) {
                const size_t next = i + 1 < k ? positions[i + 1] : positions[0] + n;
                ASSERT_GE(next - positions[i], n / k);
                ASSERT_LE(next - positions[i], (n + k - 1) / k);
            }
        }
    }
    EXPECT_EQ(spread(3, 12), (std::vector<size_t>{2, 6, 10}));
}

}  // namespace
}  // namespace trainstream
