#include "pager/host_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "device/sim_device.h"
#include "support/in_child.h"
#include "support/manual_event.h"

namespace trainstream {
namespace {

using testing::holds_in_child;
using testing::ManualEvent;

HostPoolOptions foreground(uint64_t limit_bytes) {
    return {.limit_bytes = limit_bytes, .grow_in_background = false};
}

HostBlock must(std::optional<HostBlock> block) {
    EXPECT_TRUE(block.has_value());
    return block.value_or(HostBlock{});
}

unsigned char* bytes_of(const HostBlock& block) {
    return static_cast<unsigned char*>(block.address);
}

uintptr_t address_of(const HostBlock& block) { return reinterpret_cast<uintptr_t>(block.address); }

// Goal: a block is what was asked for. Method: odd sizes, written to the last byte.
TEST(HostPoolTest, BlockIsAlignedOfExactSizeAndWritable) {
    SimDevice device;
    HostPool pool(device, foreground(64 * kMiB));
    for (const size_t size : {size_t{1}, size_t{511}, 3 * kMiB + 7, 9 * kMiB}) {
        const HostBlock block = must(pool.allocate(size));
        EXPECT_EQ(block.size_bytes, size);
        EXPECT_EQ(address_of(block) % kBlockAlignment, 0u);
        EXPECT_TRUE(block.device_visible);
        std::memset(block.address, 0xA5, size);
    }
    EXPECT_EQ(pool.stats().in_use_bytes, 1 + 511 + 3 * kMiB + 7 + 9 * kMiB);
    EXPECT_EQ(pool.stats().locked_bytes, device.locked_bytes());
}

// Goal: best fit. Method: holes of 3 and 1 MiB, in this order; 1 MiB goes into the second.
TEST(HostPoolTest, BestFitTakesTheSmallestHole) {
    SimDevice device;
    HostPool pool(device, foreground(5 * kMiB));
    pool.free(must(pool.allocate(5 * kMiB)), {});  // One chunk for all that follows.
    const HostBlock large = must(pool.allocate(3 * kMiB));
    const HostBlock wall = must(pool.allocate(512));
    const HostBlock small = must(pool.allocate(kMiB));
    const HostBlock end = must(pool.allocate(512));
    pool.free(large, {});
    pool.free(small, {});

    EXPECT_EQ(must(pool.allocate(kMiB)).address, small.address);
    EXPECT_EQ(must(pool.allocate(2 * kMiB)).address, large.address);
    pool.free(wall, {});
    pool.free(end, {});
}

// Goal: parts of one chunk join. Method: cut one chunk into three, free the middle one last.
TEST(HostPoolTest, FreeBetweenTwoFreeBlocksLeavesOneBlock) {
    SimDevice device;
    HostPool pool(device, foreground(12 * kMiB));
    pool.free(must(pool.allocate(12 * kMiB)), {});
    std::vector<HostBlock> blocks(3);
    std::generate(blocks.begin(), blocks.end(), [&] { return must(pool.allocate(4 * kMiB)); });
    pool.free(blocks[0], {});
    pool.free(blocks[2], {});
    EXPECT_FALSE(pool.allocate(8 * kMiB).has_value());

    pool.free(blocks[1], {});

    EXPECT_EQ(must(pool.allocate(12 * kMiB)).address, blocks[0].address);
    EXPECT_EQ(pool.stats().locks, 1u);
}

// Goal: no block spans two page-locked ranges, since no copy may. Method: free a block in the
// middle of others; a larger one does not begin in it, and copies of every block are accepted.
TEST(HostPoolTest, BlockNeverSpansTwoLockedRanges) {
    SimDevice device;
    HostPool pool(device, foreground(64 * kMiB));
    std::vector<HostBlock> blocks(4);
    std::generate(blocks.begin(), blocks.end(), [&] { return must(pool.allocate(2 * kMiB)); });
    pool.free(blocks[1], {});
    pool.free(blocks[2], {});
    blocks[1] = must(pool.allocate(3 * kMiB));
    blocks[2] = must(pool.allocate(kMiB));
    const std::vector<unsigned char> from(3 * kMiB, 5);
    for (const HostBlock& block : blocks) {
        EXPECT_NO_THROW(
            device.copy(CopyDirection::kToHost, block.address, from.data(), block.size_bytes, {})
                ->wait());
    }
    EXPECT_EQ(pool.stats().locks, 5u);
    EXPECT_EQ(pool.stats().joins, 0u);
}

// Goal: at the limit free neighbours become one, though that costs a wait for the device. Method:
// the pool is full of small chunks; two of three neighbours are free, then all.
TEST(HostPoolTest, FreeNeighboursAreLockedAsOneAtTheLimit) {
    SimDevice device;
    HostPool pool(device, foreground(12 * kMiB));
    std::vector<HostBlock> blocks(3);
    std::generate(blocks.begin(), blocks.end(), [&] { return must(pool.allocate(4 * kMiB)); });
    pool.free(blocks[0], {});
    pool.free(blocks[2], {});
    EXPECT_FALSE(pool.allocate(8 * kMiB).has_value());
    pool.free(blocks[1], {});

    const HostBlock whole = must(pool.allocate(12 * kMiB));

    EXPECT_EQ(whole.address, blocks[0].address);
    EXPECT_EQ(pool.stats().joins, 1u);
    EXPECT_EQ(pool.stats().locked_bytes, 12 * kMiB);
    EXPECT_EQ(device.locked_bytes(), 12 * kMiB);
    const std::vector<unsigned char> from(12 * kMiB, 5);
    EXPECT_NO_THROW(
        device.copy(CopyDirection::kToHost, whole.address, from.data(), from.size(), {})->wait());
}

// Goal: what is not in a chunk yet is not lost at the limit. Method: 3 of 8 MiB are in none and 2
// are free beside them; 5 are asked for, and 6 are too many.
TEST(HostPoolTest, WhatLiesAheadJoinsFreeNeighboursAtTheLimit) {
    SimDevice device;
    HostPool pool(device, foreground(8 * kMiB));
    must(pool.allocate(3 * kMiB));
    const HostBlock last = must(pool.allocate(2 * kMiB));
    pool.free(last, {});

    EXPECT_FALSE(pool.allocate(6 * kMiB).has_value());
    EXPECT_EQ(pool.stats().locks, 2u);
    EXPECT_EQ(must(pool.allocate(5 * kMiB)).address, last.address);
    EXPECT_EQ(pool.stats().locked_bytes, 8 * kMiB);
}

// Goal: sizes that change from step to step do not make locked memory grow without end. Method:
// every round asks for a few more bytes, so that no chunk of an earlier round ever fits.
TEST(HostPoolTest, GrowingSizesReuseOldChunksInsteadOfLockingMore) {
    SimDevice device;
    HostPool pool(device, foreground(kGiB));
    for (size_t round = 0; round < 40; ++round) {
        std::vector<HostBlock> blocks(4);
        for (HostBlock& block : blocks) {
            block = must(pool.allocate(8 * kMiB + round * 16 * kKiB));
        }
        for (const HostBlock& block : blocks) {
            pool.free(block, {});
        }
    }
    const HostPoolStats stats = pool.stats();
    EXPECT_LE(stats.locked_bytes, stats.in_use_bytes_peak + 64 * kMiB + 16 * kMiB);
    EXPECT_GT(stats.joins, 0u);
}

// Goal: pageable memory has no borders. Method: small growths, then one block over all of them.
TEST(HostPoolTest, PageableBlockSpansGrowths) {
    SimDevice device;
    device.set_faults({.page_lock_limit_bytes = 0});
    HostPool pool(device, foreground(8 * kMiB));
    ::testing::internal::CaptureStderr();
    std::vector<HostBlock> blocks(4);
    std::generate(blocks.begin(), blocks.end(), [&] { return must(pool.allocate(2 * kMiB)); });
    ::testing::internal::GetCapturedStderr();
    for (const HostBlock& block : blocks) {
        pool.free(block, {});
    }
    EXPECT_EQ(must(pool.allocate(8 * kMiB)).address, blocks[0].address);
    EXPECT_EQ(pool.stats().locks, 0u);
}

// Goal: a free pageable tail is used by the growth that follows it. Method: 3 of 4 MiB are free at
// the end; 5 more need only 2 more.
TEST(HostPoolTest, GrowthContinuesTheFreePageableTail) {
    SimDevice device;
    device.set_faults({.page_lock_limit_bytes = 0});
    HostPool pool(device, foreground(64 * kMiB));
    ::testing::internal::CaptureStderr();
    const HostBlock whole = must(pool.allocate(4 * kMiB));
    ::testing::internal::GetCapturedStderr();
    pool.free(whole, {});
    const HostBlock first = must(pool.allocate(kMiB));

    const HostBlock second = must(pool.allocate(5 * kMiB));

    EXPECT_EQ(address_of(second), address_of(first) + kMiB);
    EXPECT_EQ(pool.stats().pageable_bytes, 6 * kMiB);
}

// Goal: a refused page lock is said once and does not stop anything. Method: a limit of 4 MiB.
TEST(HostPoolTest, RefusedPageLockGoesOnInPageableMemoryAndIsSaidOnce) {
    SimDevice device({.reads_pageable_memory = false});
    device.set_faults({.page_lock_limit_bytes = 4 * kMiB});
    HostPool pool(device, foreground(64 * kMiB));
    const HostBlock locked = must(pool.allocate(4 * kMiB));
    ::testing::internal::CaptureStderr();
    std::vector<HostBlock> pageable(4);
    std::generate(pageable.begin(), pageable.end(), [&] { return must(pool.allocate(4 * kMiB)); });
    const std::string said = ::testing::internal::GetCapturedStderr();

    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    EXPECT_EQ(said.find("trainstream: page-locking 4.00 MiB was refused with 4.00 MiB locked"), 0u);
    EXPECT_TRUE(locked.device_visible);
    for (const HostBlock& block : pageable) {
        EXPECT_FALSE(block.device_visible);
        std::memset(block.address, 1, block.size_bytes);
    }
    EXPECT_EQ(pool.stats().locked_bytes, 4 * kMiB);
    EXPECT_EQ(pool.stats().pageable_bytes, 16 * kMiB);
}

// Goal: locked and pageable memory never make one block. Method: free both sides of the border.
TEST(HostPoolTest, LockedAndPageableNeighboursNeverJoin) {
    SimDevice device({.reads_pageable_memory = false});
    device.set_faults({.page_lock_limit_bytes = 4 * kMiB});
    HostPool pool(device, foreground(8 * kMiB));
    const HostBlock locked = must(pool.allocate(4 * kMiB));
    ::testing::internal::CaptureStderr();
    const HostBlock pageable = must(pool.allocate(4 * kMiB));
    ::testing::internal::GetCapturedStderr();
    ASSERT_EQ(address_of(pageable), address_of(locked) + 4 * kMiB);
    pool.free(locked, {});
    pool.free(pageable, {});

    EXPECT_FALSE(pool.allocate(5 * kMiB).has_value());
    EXPECT_TRUE(must(pool.allocate(4 * kMiB)).device_visible);
    EXPECT_FALSE(must(pool.allocate(4 * kMiB)).device_visible);
}

TEST(HostPoolTest, PageableMemoryIsVisibleToADeviceThatReadsIt) {
    SimDevice device({.reads_pageable_memory = true});
    device.set_faults({.page_lock_limit_bytes = 0});
    HostPool pool(device, foreground(8 * kMiB));
    ::testing::internal::CaptureStderr();
    EXPECT_TRUE(must(pool.allocate(kMiB)).device_visible);
    ::testing::internal::GetCapturedStderr();
}

// Goal: the limit holds, and what is freed can be had again. Method: a limit that is no multiple
// of the growth unit, filled to the last page.
TEST(HostPoolTest, NothingIsCommittedBeyondTheLimit) {
    SimDevice device;
    constexpr uint64_t kLimit = 7 * kMiB + 4 * kKiB;
    HostPool pool(device, foreground(kLimit));
    const HostBlock block = must(pool.allocate(kLimit));
    EXPECT_FALSE(pool.allocate(1).has_value());
    EXPECT_FALSE(pool.allocate(kGiB).has_value());
    EXPECT_EQ(pool.stats().locked_bytes, kLimit);
    EXPECT_EQ(pool.stats().limit_bytes, kLimit);

    pool.free(block, {});

    EXPECT_EQ(must(pool.allocate(kLimit)).address, block.address);
}

TEST(HostPoolTest, RangeThatTheSystemRefusesIsAnErrorInWords) {
    SimDevice device;
    try {
        HostPool pool(device, foreground(uint64_t{1} << 60));
        FAIL() << "an exabyte was reserved";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory);
        EXPECT_NE(std::string(error.what()).find("was refused"), std::string::npos);
    }
}

// Goal: a block whose copy still runs is not handed out. Method: hold its event back.
TEST(HostPoolTest, FreedBlockIsNotReusedBeforeItsEvent) {
    SimDevice device;
    HostPool pool(device, foreground(64 * kMiB));
    const HostBlock busy = must(pool.allocate(2 * kMiB));
    const auto copy = std::make_shared<ManualEvent>();
    pool.free(busy, {nullptr, copy});
    EXPECT_EQ(pool.stats().in_use_bytes, 0u);

    const HostBlock other = must(pool.allocate(2 * kMiB));
    EXPECT_NE(other.address, busy.address);
    copy->finish();

    EXPECT_EQ(must(pool.allocate(2 * kMiB)).address, busy.address);
}

// Goal: with growth forbidden nothing happens but what is free is taken. Method: ask for more than
// is free, with a block pending; then for what its event gives back.
TEST(HostPoolTest, ForbiddenGrowthTakesOnlyWhatIsFree) {
    SimDevice device;
    HostPool pool(device, foreground(64 * kMiB));
    const HostBlock busy = must(pool.allocate(2 * kMiB));
    const auto copy = std::make_shared<ManualEvent>();
    pool.free(busy, {copy});
    EXPECT_FALSE(pool.allocate(2 * kMiB, HostPool::Growth::kForbidden).has_value());
    EXPECT_EQ(pool.stats().locks, 1u);
    copy->finish();

    EXPECT_EQ(must(pool.allocate(2 * kMiB, HostPool::Growth::kForbidden)).address, busy.address);
    EXPECT_FALSE(pool.allocate(1, HostPool::Growth::kForbidden).has_value());
}

// Goal: free neighbours are joined on demand, though nothing is at its limit, and nothing is added.
// Method: two small blocks, freed one after the other; a larger one is asked for each time.
TEST(HostPoolTest, JoinTakesFreeNeighboursAndAddsNothing) {
    SimDevice device;
    HostPool pool(device, foreground(64 * kMiB));
    const HostBlock low = must(pool.allocate(2 * kMiB));
    const HostBlock high = must(pool.allocate(2 * kMiB));
    pool.free(low, {});
    EXPECT_FALSE(pool.allocate(3 * kMiB, HostPool::Growth::kJoin).has_value());
    EXPECT_FALSE(pool.run_with(3 * kMiB, {{high, 1}}, HostPool::Growth::kForbidden).has_value());
    EXPECT_TRUE(pool.run_with(3 * kMiB, {{high, 1}}, HostPool::Growth::kJoin).has_value());
    pool.free(high, {});

    EXPECT_EQ(must(pool.allocate(3 * kMiB, HostPool::Growth::kJoin)).address, low.address);
    EXPECT_EQ(pool.stats().locked_bytes, 4 * kMiB);
    EXPECT_EQ(pool.stats().joins, 1u);
}

// Goal: once locks are refused nothing locked is given for pageable memory. Method: two free locked
// neighbours, then a refusal; the pager is told that its copies are of no use there.
TEST(HostPoolTest, NothingIsJoinedAfterARefusal) {
    SimDevice device;
    device.set_faults({.page_lock_limit_bytes = 4 * kMiB});
    HostPool pool(device, foreground(64 * kMiB));
    const HostBlock low = must(pool.allocate(2 * kMiB));
    const HostBlock high = must(pool.allocate(2 * kMiB));
    must(pool.allocate(2 * kMiB));
    pool.free(low, {});
    EXPECT_FALSE(pool.run_with(3 * kMiB, {{high, 1}}, HostPool::Growth::kJoin).has_value());
    pool.free(high, {});

    EXPECT_FALSE(pool.allocate(3 * kMiB, HostPool::Growth::kJoin).has_value());
    EXPECT_EQ(pool.stats().locked_bytes, 4 * kMiB);
}

// Goal: at the limit a freed block is worth waiting for. Method: another thread finishes its copy.
TEST(HostPoolTest, AllocateAtTheLimitWaitsForFreedBlocks) {
    SimDevice device;
    HostPool pool(device, foreground(4 * kMiB));
    const HostBlock first = must(pool.allocate(2 * kMiB));
    const HostBlock second = must(pool.allocate(2 * kMiB));
    const auto early = std::make_shared<ManualEvent>();
    const auto late = std::make_shared<ManualEvent>();
    pool.free(first, {early});
    pool.free(second, {early, late});
    std::thread finisher([&] {
        early->finish();
        late->finish();
    });

    EXPECT_EQ(must(pool.allocate(4 * kMiB)).address, first.address);
    finisher.join();
}

// Goal: unmapping waits for the copies. Method: a copy that takes its time, and no wait but the
// destructor's.
TEST(HostPoolTest, DestructorWaitsForCopiesOfFreedBlocks) {
    SimDevice device({.to_host_bytes_per_second = 500'000'000});
    const std::vector<unsigned char> from(kMiB, 3);
    Event copy;
    {
        HostPool pool(device, foreground(4 * kMiB));
        const HostBlock block = must(pool.allocate(kMiB));
        copy = device.copy(CopyDirection::kToHost, block.address, from.data(), kMiB, {});
        pool.free(block, {copy});
    }
    EXPECT_TRUE(copy->is_done());
    EXPECT_EQ(device.locked_bytes(), 0u);
}

// Goal: locked memory is what was asked for, and committed memory little more. Method: sizes like
// those of a model's storages, with and without the background thread.
TEST(HostPoolTest, LockedBytesStayWithinThreePercentOfThoseAsked) {
    for (const bool in_background : {false, true}) {
        SimDevice device;
        HostPool pool(device, {.limit_bytes = kGiB, .grow_in_background = in_background});
        std::mt19937_64 random(5);
        while (pool.stats().in_use_bytes < 400 * kMiB) {
            must(pool.allocate(kMiB + random() % (6 * kMiB)));
            const HostPoolStats stats = pool.stats();
            const auto asked_bytes = static_cast<double>(stats.in_use_bytes_peak);
            ASSERT_LE(static_cast<double>(stats.locked_bytes), 1.005 * asked_bytes);
            if (stats.in_use_bytes_peak >= 128 * kMiB) {
                ASSERT_LE(static_cast<double>(stats.locked_bytes + stats.ahead_bytes),
                          1.03 * asked_bytes);
            }
        }
    }
}

// Goal: memory is touched before it is asked for. Method: fill the pool until nothing lies ahead;
// then wait until the background thread has grown it.
TEST(HostPoolTest, BackgroundThreadTouchesAheadOfNeed) {
    SimDevice device;
    HostPool pool(device, {.limit_bytes = kGiB, .grow_in_background = true});
    must(pool.allocate(256 * kMiB));
    must(pool.allocate(4 * kMiB));  // The second growth.
    while (pool.stats().ahead_bytes == 0) {
        std::this_thread::yield();
    }
    EXPECT_EQ(pool.stats().locked_bytes, 260 * kMiB);
}

// Goal: the steady state commits nothing. Method: the same round of blocks again and again.
TEST(HostPoolTest, RepeatedRoundsDoNotGrow) {
    SimDevice device;
    HostPool pool(device, foreground(256 * kMiB));
    std::vector<HostBlock> blocks(16);
    uint64_t growths = 0;
    for (int round = 0; round < 10; ++round) {
        for (size_t i = 0; i < blocks.size(); ++i) {
            blocks[i] = must(pool.allocate(kMiB + i * 100 * kKiB));
        }
        for (const HostBlock& block : blocks) {
            pool.free(block, {});
        }
        growths = round == 0 ? pool.stats().growths : growths;
    }
    EXPECT_EQ(pool.stats().growths, growths);
    EXPECT_EQ(pool.stats().locks, blocks.size());
    EXPECT_EQ(pool.stats().joins, 0u);
}

/// The pool in the plainest way: which units of 512 bytes are taken, and where chunks begin.
class PlainPool {
public:
    /// Where best fit puts `size_bytes`; -1: nowhere.
    int64_t best_fit(size_t size_bytes) const {
        const size_t units = units_of(size_bytes);
        size_t best_run = SIZE_MAX;
        int64_t best = -1;
        for (size_t begin = 0; begin < taken_.size();) {
            size_t run = 0;
            while (begin + run < taken_.size() && !taken_[begin + run] &&
                   (run == 0 || !is_chunk_[begin + run])) {
                ++run;
            }
            if (run >= units && run < best_run) {
                best_run = run;
                best = static_cast<int64_t>(begin * kBlockAlignment);
            }
            begin += std::max(run, size_t{1});
        }
        return best;
    }

    /// A new chunk at the end.
    void append(uint64_t begin, size_t size_bytes) {
        ASSERT_EQ(begin, taken_.size() * kBlockAlignment);
        taken_.resize(taken_.size() + units_of(size_bytes));
        is_chunk_.resize(taken_.size());
        is_chunk_[begin / kBlockAlignment] = true;
    }

    /// The chunks from `begin` on, as few as have `size_bytes`, became one. All must be free.
    void join(uint64_t begin, size_t size_bytes) {
        size_t unit = begin / kBlockAlignment;
        ASSERT_TRUE(is_chunk_[unit]);
        const size_t enough = unit + units_of(size_bytes);
        for (; unit < enough || (unit < taken_.size() && !is_chunk_[unit]); ++unit) {
            ASSERT_LT(unit, taken_.size());
            ASSERT_FALSE(taken_[unit]);
            is_chunk_[unit] = unit == begin / kBlockAlignment;
        }
    }

    void set(uint64_t offset, size_t size_bytes, bool taken) {
        const size_t begin = offset / kBlockAlignment;
        for (size_t unit = begin; unit < begin + units_of(size_bytes); ++unit) {
            ASSERT_NE(taken_.at(unit), taken) << "unit " << unit;
            taken_[unit] = taken;
        }
    }

    uint64_t size_bytes() const { return taken_.size() * kBlockAlignment; }

private:
    static size_t units_of(size_t size_bytes) {
        return align_up(size_bytes, kBlockAlignment) / kBlockAlignment;
    }

    std::vector<bool> taken_;
    std::vector<bool> is_chunk_;
};

// Goal: the pool places every block where best fit says, joins only free neighbours and keeps its
// sums. Method: a random walk beside the plain model, half of it at the limit.
TEST(HostPoolTest, RandomWalkAgreesWithThePlainModel) {
    const uint64_t seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    SimDevice device;
    HostPool pool(device, foreground(48 * kMiB));
    PlainPool model;
    uintptr_t origin = 0;
    std::vector<HostBlock> blocks;
    uint64_t in_use_bytes = 0;
    for (int step = 0; step < 2000 && !HasFatalFailure(); ++step) {
        SCOPED_TRACE("step " + std::to_string(step));
        if (blocks.empty() || random() % 5 < 3) {
            const size_t size = 1 + random() % (2 * kMiB);
            const HostPoolStats before = pool.stats();
            const int64_t expected = model.best_fit(size);
            const std::optional<HostBlock> block = pool.allocate(size);
            const HostPoolStats after = pool.stats();
            ASSERT_TRUE(block.has_value() || expected < 0);
            origin = origin == 0 ? address_of(*block) : origin;  // The first block comes first.
            if (after.locked_bytes > before.locked_bytes) {
                model.append(before.locked_bytes, after.locked_bytes - before.locked_bytes);
            }
            if (!block) {
                ASSERT_GT(before.locked_bytes + align_up(size, 4 * kKiB), after.limit_bytes);
                continue;
            }
            const uint64_t offset = address_of(*block) - origin;
            if (after.joins > before.joins) {
                ASSERT_LT(expected, 0);
                model.join(offset, size);
            } else {
                ASSERT_EQ(offset,
                          expected < 0 ? before.locked_bytes : static_cast<uint64_t>(expected));
            }
            model.set(offset, size, true);
            blocks.push_back(*block);
            in_use_bytes += size;
        } else {
            std::swap(blocks[random() % blocks.size()], blocks.back());
            const HostBlock block = blocks.back();
            blocks.pop_back();
            pool.free(block, {});
            model.set(address_of(block) - origin, block.size_bytes, false);
            in_use_bytes -= block.size_bytes;
        }
        const HostPoolStats stats = pool.stats();
        ASSERT_EQ(stats.in_use_bytes, in_use_bytes);
        ASSERT_EQ(stats.locked_bytes, model.size_bytes());
        ASSERT_EQ(stats.locked_bytes, device.locked_bytes());
        ASSERT_LE(stats.locked_bytes + stats.ahead_bytes, stats.limit_bytes);
    }
}

// Goal: threads share the pool and no byte. Method: each copies its own bytes through the device
// into blocks, frees them with the copy as event, and finds what it kept unchanged.
TEST(HostPoolTest, ThreadsNeverShareAByte) {
    SimDevice device({.seed = 9, .copy_latency_ns_max = 50'000});
    HostPool pool(device, {.limit_bytes = 24 * kMiB, .touch_threads = 2});
    const auto walk = [&](unsigned char mark) {
        std::mt19937 random(mark);
        const std::vector<unsigned char> from(kMiB, mark);
        Event last;
        for (int round = 0; round < 100; ++round) {
            const size_t size = 1 + random() % kMiB;
            const HostBlock kept = must(pool.allocate(size));
            const HostBlock passing = must(pool.allocate(size));
            device.copy(CopyDirection::kToHost, kept.address, from.data(), size, {})->wait();
            last = device.copy(CopyDirection::kToHost, passing.address, from.data(), size, {});
            pool.free(passing, {last});
            EXPECT_TRUE(std::all_of(bytes_of(kept), bytes_of(kept) + size,
                                    [mark](unsigned char byte) { return byte == mark; }));
            pool.free(kept, {});
        }
        last->wait();  // It reads `from`.
    };
    std::vector<std::thread> threads;
    for (unsigned char mark = 1; mark <= 4; ++mark) {
        threads.emplace_back(walk, mark);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    EXPECT_EQ(pool.stats().in_use_bytes, 0u);
}

// Goal: a data-loader worker that inherits the pool can use it and end. Method: fork with a
// background thread alive and a copy pending.
TEST(HostPoolForkTest, ChildUsesThePoolAndDestroysIt) {
    SimDevice device({.to_host_bytes_per_second = 100'000'000});
    auto pool = std::make_unique<HostPool>(
        device, HostPoolOptions{.limit_bytes = 512 * kMiB, .grow_in_background = true});
    must(pool->allocate(128 * kMiB));
    const HostBlock kept = must(pool->allocate(4 * kMiB));
    const HostBlock block = must(pool->allocate(kMiB));
    const std::vector<unsigned char> from(kMiB, 3);
    std::memset(kept.address, 7, kept.size_bytes);
    const Event copy = device.copy(CopyDirection::kToHost, block.address, from.data(), kMiB, {});
    pool->free(block, {copy});

    EXPECT_TRUE(holds_in_child([&] {
        const std::optional<HostBlock> mine = pool->allocate(4 * kMiB);
        if (!mine) {
            return false;
        }
        std::memset(mine->address, 1, mine->size_bytes);
        pool->free(*mine, {copy});
        const bool whole = bytes_of(kept)[0] == 7;
        pool.reset();
        return whole;
    }));
    copy->wait();  // It reads `from`.
}

}  // namespace
}  // namespace trainstream
