#include "pager/busy_cores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

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
    const uint64_t written = std::accumulate(words.begin(), words.end(), uint64_t{0});
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

// Goal: every place is walked over as often as any other, and a later walk goes on where one ended.
// Method: one thread, whose words count how often each was written: along the walk, from where it
// began, the counts may fall once, by one, and that at the place to go on from.
TEST(BusyCoresTest, WalksOverAllInTurnAndGoesOn) {
    const size_t stream_words = 2 * kMiB / sizeof(uint64_t) / 3 / 8 * 8;
    std::vector<uint64_t> words(2 * kMiB / sizeof(uint64_t));
    uint64_t position = 0;
    for (int walk = 0; walk < 3; ++walk) {
        BusyCores cores(bytes_of(words, 2 * kMiB), 1, position);
        wait_until_busy(cores, kMiB);  // A sixth of a pass, or more if this thread gets no turn.
        cores.stop();
        position = cores.position();
        const size_t place = position / 3 / sizeof(uint64_t) % stream_words;
        const uint64_t passes = position / 3 / sizeof(uint64_t) / stream_words;
        for (size_t i = 0; i < 3 * stream_words; ++i) {
            ASSERT_EQ(words[i], passes + (i % stream_words < place ? 1 : 0)) << i;
        }
    }
}

// Goal: threads share the memory wherever the walk begins. Method: two in one place would lose
// counts (and be a race for ThreadSanitizer).
TEST(BusyCoresTest, ThreadsBeginAtAnyPlace) {
    for (const uint64_t position : {uint64_t{kMiB}, uint64_t{2 * kMiB - 1}, uint64_t{7 * kMiB}}) {
        std::vector<uint64_t> words(2 * kMiB / sizeof(uint64_t));
        BusyCores cores(bytes_of(words, 2 * kMiB), 3, position);
        wait_until_busy(cores, 12 * kMiB);
        cores.stop();
        const uint64_t written = std::accumulate(words.begin(), words.end(), uint64_t{0});
        EXPECT_EQ(cores.touched_bytes(), written * 2 * sizeof(uint64_t));
        EXPECT_EQ(cores.position(), position + written * sizeof(uint64_t));
    }
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
