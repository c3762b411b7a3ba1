#include "pager/busy_cores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "base/bytes.h"

namespace trainstream {
namespace {

std::span<std::byte> bytes_of(std::vector<uint64_t>& words, size_t size_bytes) {
    return std::as_writable_bytes(std::span(words)).first(size_bytes);
}

void wait_until_busy(const BusyCores& cores, uint64_t touched_bytes) {
    while (cores.touched_bytes() < touched_bytes) {
        std::this_thread::yield();
    }
}

// Goal: the count is the truth. Method: each word counts how often it was written, so the sum of
// all words is what was touched, at 8 bytes read and 8 written each.
TEST(BusyCoresTest, CountsTheBytesThatWereReadAndWritten) {
    std::vector<uint64_t> words(kMiB / sizeof(uint64_t));
    BusyCores cores(bytes_of(words, kMiB), 3);
    EXPECT_GE(cores.threads(), 1u);
    wait_until_busy(cores, 8 * kMiB);
    cores.stop();
    uint64_t written = 0;
    for (const uint64_t word : words) {
        written += word;
    }
    EXPECT_EQ(cores.touched_bytes(), written * 2 * sizeof(uint64_t));
    EXPECT_EQ(cores.threads(), 0u);
}

// Goal: nothing outside the memory is touched. Method: an odd size, and a border that stays.
TEST(BusyCoresTest, StaysInItsMemory) {
    std::vector<uint64_t> words(64 * kKiB / sizeof(uint64_t));
    const size_t size_bytes = 32 * kKiB + 24;
    {
        const BusyCores cores(bytes_of(words, size_bytes), 2);
        wait_until_busy(cores, 4 * size_bytes);
    }
    const auto begin = words.begin() + static_cast<ptrdiff_t>(size_bytes / sizeof(uint64_t));
    EXPECT_TRUE(std::all_of(begin, words.end(), [](uint64_t word) { return word == 0; }));
    EXPECT_TRUE(std::any_of(words.begin(), begin, [](uint64_t word) { return word != 0; }));
}

// Goal: more threads than memory for them are no error.
TEST(BusyCoresTest, SmallMemoryHasFewerThreads) {
    std::vector<uint64_t> words(kKiB / sizeof(uint64_t));
    const BusyCores cores(bytes_of(words, 400), 100);
    wait_until_busy(cores, 1);
    EXPECT_LE(cores.threads(), 2u);
}

}  // namespace
}  // namespace trainstream
