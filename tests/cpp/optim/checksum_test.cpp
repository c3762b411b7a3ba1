#include "optim/checksum.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace trainstream::optim {
namespace {

std::vector<uint16_t> random_weights(size_t count) {
    std::mt19937 random(17);
    std::vector<uint16_t> weights(count);
    for (uint16_t& weight : weights) {
        weight = static_cast<uint16_t>(random());
    }
    return weights;
}

// Goal: what the header says of the factors: odd, and each once in a tile, so that two different
// weights that change places are seen.
TEST(ChecksumTest, FactorsAreOddAndDiffer) {
    std::set<int16_t> seen;
    for (size_t place = 0; place < kTile; ++place) {
        EXPECT_EQ(checksum_factor(place) & 1, 1);
        EXPECT_EQ(checksum_factor(place), kChecksumFactors.at[place]);
        seen.insert(checksum_factor(place));
    }
    EXPECT_EQ(seen.size(), kTile);
}

// Goal: a change of any single bit is seen. Method: all 16 bits of all 2048 places.
TEST(ChecksumTest, EverySingleBitChangeIsSeen) {
    std::vector<uint16_t> weights = random_weights(kTile);
    const uint32_t before = checksum(weights.data(), kTile);
    for (size_t place = 0; place < kTile; ++place) {
        for (unsigned bit = 0; bit < 16; ++bit) {
            const auto flip = static_cast<uint16_t>(1U << bit);
            weights[place] ^= flip;
            ASSERT_NE(checksum(weights.data(), kTile), before) << place << ", bit " << bit;
            weights[place] ^= flip;
        }
    }
    EXPECT_EQ(checksum(weights.data(), kTile), before);
}

// Goal: changes that follow a pattern are seen, as an optimizer or a scale would make: the whole
// tile one step up, differences of second order, every weight to its neighbour.
TEST(ChecksumTest, RegularChangesAreSeen) {
    const std::vector<uint16_t> weights = random_weights(kTile);
    const uint32_t before = checksum(weights.data(), kTile);
    for (uint16_t step = 1; step < 300; ++step) {
        std::vector<uint16_t> changed = weights;
        for (uint16_t& weight : changed) {
            weight = static_cast<uint16_t>(weight + step);
        }
        ASSERT_NE(checksum(changed.data(), kTile), before) << step;
    }
    for (size_t place = 0; place + 2 < kTile; ++place) {
        std::vector<uint16_t> changed = weights;
        ++changed[place];
        --changed[place + 1];
        --changed[place + 1];
        ++changed[place + 2];
        ASSERT_NE(checksum(changed.data(), kTile), before) << place;
    }
    std::vector<uint16_t> shifted(weights.begin() + 1, weights.end());
    shifted.push_back(weights.front());
    EXPECT_NE(checksum(shifted.data(), kTile), before);
}

TEST(ChecksumTest, TilesHaveOneEach) {
    const std::vector<uint16_t> weights = random_weights(2 * kTile + 5);
    std::vector<uint32_t> checksums(3);
    checksum_tiles(weights.data(), weights.size(), checksums.data());
    EXPECT_EQ(checksums[0], checksum(weights.data(), kTile));
    EXPECT_EQ(checksums[1], checksum(weights.data() + kTile, kTile));
    EXPECT_EQ(checksums[2], checksum(weights.data() + 2 * kTile, 5));
    checksum_tiles(nullptr, 0, nullptr);
}

}  // namespace
}  // namespace trainstream::optim
