#include "pager/pager.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "support/pager_world.h"

namespace trainstream {
namespace {

using testing::FakeOwner;
using testing::PagerWorld;

constexpr size_t kBlock = 64 * kKiB;  // Four of them fill the default budget.

/// `count` storages of kBlock bytes, filled with marks 1, 2, ... in this order.
std::vector<FakeOwner*> make_blocks(PagerWorld& world, unsigned count) {
    std::vector<FakeOwner*> owners;
    for (unsigned mark = 1; mark <= count; ++mark) {
        owners.push_back(world.make(kBlock, mark));
    }
    return owners;
}

void drop_all(PagerWorld& world, const std::vector<FakeOwner*>& owners) {
    for (FakeOwner* owner : owners) {
        world.port.drop(owner);
    }
    world.expect_nothing_left();
}

/// Every storage has the bytes of its place in the row; read where they are.
void expect_bytes(PagerWorld& world, const std::vector<FakeOwner*>& owners) {
    for (unsigned i = 0; i < owners.size(); ++i) {
        EXPECT_TRUE(world.reads(owners[i], i + 1)) << "storage " << i;
    }
}

/// Uses so far apart that each counts as one of its own.
void pass_time(PagerWorld& world, FakeOwner* on, int uses = 40) {
    for (int i = 0; i < uses; ++i) {
        world.use(on, UseKind::kInPlace);
    }
}

// --- Out and in again ---

// Goal: leaving and coming back loses no byte. Method: six storages where four fit; then each is
// brought in, which evicts another.
TEST(PagerTest, EvictedStoragesComeBackWithTheirBytes) {
    PagerWorld world;
    const std::vector<FakeOwner*> owners = make_blocks(world, 6);
    EXPECT_TRUE(world.is_cold(owners[0]));
    EXPECT_TRUE(world.is_cold(owners[1]));
    EXPECT_TRUE(world.is_resident(owners[5]));
    EXPECT_EQ(world.pager.stats().evicted_bytes, 2 * kBlock);
    for (int round = 0; round < 3; ++round) {
        for (unsigned i = 0; i < 6; ++i) {
            EXPECT_TRUE(world.reads(owners[i], i + 1, UseKind::kBringIn));
            EXPECT_TRUE(world.is_resident(owners[i]));
        }
    }

    const PagerStats stats = world.pager.stats();
    EXPECT_EQ(stats.resident_bytes, 4 * kBlock);
    EXPECT_EQ(stats.cold_bytes, 2 * kBlock);
    EXPECT_EQ(stats.restored_bytes, stats.restores * kBlock);
    EXPECT_EQ(stats.evicted_bytes + stats.dropped_bytes, stats.evictions * kBlock);
    EXPECT_LE(stats.peak_bytes, stats.budget_bytes);
    EXPECT_EQ(stats.failures, 0u);
    drop_all(world, owners);
}

// Goal: what is used each step stays when a scan passes. Method: one storage used at intervals,
// beside many that are made and never used again.
TEST(PagerTest, StorageOfEveryStepOutlivesAScan) {
    PagerWorld world;
    std::vector<FakeOwner*> owners = make_blocks(world, 2);
    for (int step = 0; step < 3; ++step) {
        pass_time(world, owners[1], 3000);  // The scan, 17 x 129 uses, takes less than a step.
        world.use(owners[0], UseKind::kBringIn);
    }
    for (unsigned mark = 3; mark < 20; ++mark) {
        owners.push_back(world.make(kBlock, mark));
        world.use(owners.back(), UseKind::kInPlace);
        pass_time(world, owners[1], kNewbornTicks);
    }
    EXPECT_TRUE(world.is_resident(owners[0]));
    expect_bytes(world, owners);
    drop_all(world, owners);
}

// Goal: bytes that the host still has are not copied again. Method: out, in, out.
TEST(PagerTest, CleanStorageLeavesWithoutACopy) {
    PagerWorld world;
    FakeOwner* owner = world.make(kBlock, 1);
    EXPECT_EQ(world.pager.evict_all(), kBlock);
    EXPECT_TRUE(world.reads(owner, 1, UseKind::kBringIn));
    const uint64_t copied = world.device.copy_stats().to_host_bytes;

    EXPECT_EQ(world.pager.evict_all(), kBlock);

    EXPECT_EQ(world.device.copy_stats().to_host_bytes, copied);
    EXPECT_EQ(world.pager.stats().evicted_bytes, kBlock);
    EXPECT_EQ(world.pager.stats().dropped_bytes, kBlock);
    EXPECT_EQ(world.memory.used_bytes(), 0u);
    EXPECT_TRUE(world.reads(owner, 1));
    drop_all(world, {owner});
}

// Goal: a write makes the host copy void, whatever kind of use announces it.
TEST(PagerTest, WrittenStorageLeavesWithACopy) {
    for (const UseKind kind :
         {UseKind::kMetadata, UseKind::kInPlace, UseKind::kBringInIfRoom, UseKind::kBringIn}) {
        PagerWorld world;
        FakeOwner* owner = world.make(kBlock, 1);
        world.pager.evict_all();
        world.use(owner, UseKind::kBringIn);
        EXPECT_EQ(world.host.stats().in_use_bytes, kBlock);

        world.write(owner, 2, kind);

        EXPECT_EQ(world.host.stats().in_use_bytes, 0u);
        EXPECT_EQ(world.pager.evict_all(), kBlock);
        EXPECT_EQ(world.pager.stats().evicted_bytes, 2 * kBlock);
        EXPECT_TRUE(world.reads(owner, 2));
        drop_all(world, {owner});
    }
}

// Goal: what is written in host memory is what comes back.
TEST(PagerTest, WriteInPlaceReachesTheDevice) {
    PagerWorld world;
    FakeOwner* owner = world.make(kBlock, 1);
    world.pager.evict_all();
    world.write(owner, 2, UseKind::kInPlace);
    EXPECT_TRUE(world.is_cold(owner));

    EXPECT_TRUE(world.reads(owner, 2, UseKind::kBringIn));

    EXPECT_TRUE(world.is_resident(owner));
    EXPECT_TRUE(world.reads(owner, 2));
    drop_all(world, {owner});
}

TEST(PagerTest, EvictAllMovesAllThatMayMoveAndCountsIt) {
    PagerWorld world;
    std::vector<FakeOwner*> owners = make_blocks(world, 3);
    Pins pins;
    world.pager.begin_use({{owners[0], false, UseKind::kInPlace}}, 0, &pins);

    EXPECT_EQ(world.pager.evict_all(), 2 * kBlock);

    EXPECT_TRUE(world.is_resident(owners[0]));
    EXPECT_EQ(world.pager.stats().cold_bytes, 2 * kBlock);
    EXPECT_EQ(world.pager.stats().resident_bytes, kBlock);
    world.pager.end_use(&pins);
    EXPECT_EQ(world.pager.evict_all(), kBlock);
    EXPECT_EQ(world.pager.evict_all(), 0u);
    expect_bytes(world, owners);
    drop_all(world, owners);
}

// --- What stays ---

// Goal: a pin keeps the address. Method: the coldest storage is pinned while others need room.
TEST(PagerTest, PinnedStorageKeepsItsPlace) {
    PagerWorld world;
    std::vector<FakeOwner*> owners = make_blocks(world, 1);
    Pins pins;
    world.pager.begin_use({{owners[0], false, UseKind::kInPlace}}, 0, &pins);
    void* const address = owners[0]->address;
    for (unsigned mark = 2; mark < 12; ++mark) {
        owners.push_back(world.make(kBlock, mark));
    }
    EXPECT_EQ(owners[0]->address, address);

    world.pager.end_use(&pins);

    EXPECT_TRUE(pins.empty());
    owners.push_back(world.make(kBlock, 12));
    EXPECT_NE(owners[0]->address, address);
    expect_bytes(world, owners);
    drop_all(world, owners);
}

TEST(PagerTest, PinnedOutputKeepsItsPlace) {
    PagerWorld world;
    FakeOwner* owner = world.make_unknown(kBlock, 1);
    Pins pins;
    world.pager.note_outputs({owner, owner}, 0, &pins);
    EXPECT_EQ(world.pager.evict_all(), 0u);
    world.pager.end_use(&pins);
    EXPECT_EQ(world.pager.evict_all(), kBlock);
    drop_all(world, {owner});
}

// Goal: before its operator has ended a new storage does not move, and others do.
TEST(PagerTest, StorageOfUnknownOwnerNeverMoves) {
    PagerWorld world;
    std::vector<FakeOwner*> owners = {world.make_unknown(kBlock, 1)};
    void* const address = owners[0]->address;
    for (unsigned mark = 2; mark < 12; ++mark) {
        owners.push_back(world.make(kBlock, mark));
    }
    world.pager.evict_all();
    EXPECT_EQ(owners[0]->address, address);
    EXPECT_TRUE(world.is_resident(owners[0]));
    expect_bytes(world, owners);  // Which names all of them.
    EXPECT_EQ(world.pager.evict_all(), kBlock);
    EXPECT_TRUE(world.is_cold(owners[0]));
    drop_all(world, owners);
}

TEST(PagerTest, BornColdWhenNothingCanMove) {
    PagerWorld world;
    std::vector<FakeOwner*> owners;
    for (unsigned mark = 1; mark <= 6; ++mark) {
        owners.push_back(world.make_unknown(kBlock, mark));
    }
    EXPECT_TRUE(world.is_resident(owners[3]));
    EXPECT_TRUE(world.is_cold(owners[4]));
    EXPECT_TRUE(world.is_cold(owners[5]));
    EXPECT_EQ(world.pager.stats().born_cold_bytes, 2 * kBlock);
    EXPECT_EQ(world.pager.stats().cold_bytes, 2 * kBlock);
    expect_bytes(world, owners);
    EXPECT_TRUE(world.reads(owners[5], 6, UseKind::kBringIn));
    EXPECT_TRUE(world.is_resident(owners[5]));
    drop_all(world, owners);
}

TEST(PagerTest, StorageLargerThanTheBudgetIsBornCold) {
    PagerWorld world;
    FakeOwner* owner = world.make(5 * kBlock, 1);
    EXPECT_TRUE(world.is_cold(owner));
    EXPECT_TRUE(world.reads(owner, 1, UseKind::kBringIn));
    EXPECT_TRUE(world.is_cold(owner));
    drop_all(world, {owner});
}

// Goal: the error says every number, and is no end. Method: budget and host memory for four
// storages each; the ninth fails, then one goes and there is room for one.
TEST(PagerTest, OutOfMemoryNamesEveryNumberAndAllStaysUsable) {
    PagerWorld world({.host_bytes = 4 * kBlock});
    std::vector<FakeOwner*> owners = make_blocks(world, 8);
    Pins pins;
    world.pager.begin_use({{owners[7], false, UseKind::kBringIn}}, 0, &pins);
    try {
        world.pager.allocate(kBlock + kKiB, 0);
        FAIL() << "there was room";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory);
        EXPECT_STREQ(error.what(),
                     "trainstream: cannot place a storage of 65.00 KiB: device budget 256.00 KiB, "
                     "in use 256.00 KiB, of which 64.00 KiB is pinned and 192.00 KiB can move; "
                     "host memory limit 256.00 KiB, in use 256.00 KiB. Raise vram or ram in "
                     "PYTORCH_TRAINSTREAM_CONF by at least 65.00 KiB, or make the batch smaller.");
    }
    world.pager.end_use(&pins);
    expect_bytes(world, owners);
    world.port.drop(owners[2]);

    owners[2] = world.make(kBlock, 3);

    expect_bytes(world, owners);
    EXPECT_THROW(world.pager.allocate(kBlock, 0), Error);
    drop_all(world, owners);
}

// --- Kinds of use ---

TEST(PagerTest, UseInPlaceBringsNothingInAndIsCounted) {
    PagerWorld world;
    FakeOwner* owner = world.make(kBlock, 1);
    world.pager.evict_all();
    EXPECT_TRUE(world.reads(owner, 1, UseKind::kInPlace));
    EXPECT_TRUE(world.is_cold(owner));
    EXPECT_EQ(world.pager.stats().in_place_bytes, kBlock);
    world.use(owner, UseKind::kMetadata);
    EXPECT_TRUE(world.is_cold(owner));
    EXPECT_EQ(world.pager.stats().in_place_bytes, kBlock);
    drop_all(world, {owner});
}

// Goal: unknown operators take free room, and take nobody else's.
TEST(PagerTest, BringInIfRoomEvictsNothing) {
    PagerWorld world;
    const std::vector<FakeOwner*> owners = make_blocks(world, 5);
    ASSERT_TRUE(world.is_cold(owners[0]));
    const uint64_t evictions = world.pager.stats().evictions;
    EXPECT_TRUE(world.reads(owners[0], 1, UseKind::kBringInIfRoom));
    EXPECT_TRUE(world.is_cold(owners[0]));
    EXPECT_EQ(world.pager.stats().evictions, evictions);
    EXPECT_EQ(world.pager.stats().in_place_bytes, kBlock);

    world.port.drop(owners[3]);

    EXPECT_TRUE(world.reads(owners[0], 1, UseKind::kBringInIfRoom));
    EXPECT_TRUE(world.is_resident(owners[0]));
    EXPECT_EQ(world.pager.stats().evictions, evictions);
    drop_all(world, {owners[0], owners[1], owners[2], owners[4]});
}

TEST(PagerTest, BringInEvictsTheColdest) {
    PagerWorld world;
    const std::vector<FakeOwner*> owners = make_blocks(world, 5);
    for (const unsigned i : {2u, 1u, 4u, 3u}) {
        world.use(owners[i], UseKind::kInPlace);
    }
    EXPECT_TRUE(world.reads(owners[0], 1, UseKind::kBringIn));
    EXPECT_TRUE(world.is_resident(owners[0]));
    EXPECT_TRUE(world.is_cold(owners[2]));
    drop_all(world, owners);
}

// Goal: a storage named twice is one: the stronger kind counts, and one write is a write. Method:
// clean storage, named to be read in place and to be brought in and written, in both orders.
TEST(PagerTest, UseThatNamesAStorageTwiceTakesTheStronger) {
    for (const bool weaker_first : {true, false}) {
        PagerWorld world;
        FakeOwner* owner = world.make(kBlock, 1);
        world.pager.evict_all();
        const Use weaker{owner, false, UseKind::kMetadata};
        const Use stronger{owner, true, UseKind::kBringIn};
        Pins pins;

        world.pager.begin_use(weaker_first ? std::vector<Use>{weaker, stronger, weaker}
                                           : std::vector<Use>{stronger, weaker, weaker},
                              0, &pins);

        EXPECT_EQ(pins.size(), 1u);
        EXPECT_TRUE(world.is_resident(owner));
        EXPECT_EQ(world.host.stats().in_use_bytes, 0u);
        world.fill(owner, 2);
        world.pager.end_use(&pins);
        EXPECT_EQ(world.pager.evict_all(), kBlock);
        EXPECT_TRUE(world.reads(owner, 2));
        drop_all(world, {owner});
    }
}

// Goal: an operator on more bytes than fit is served as far as the budget goes; the rest is used
// where it is.
TEST(PagerTest, UseOfMoreThanTheBudgetBringsInWhatFits) {
    PagerWorld world;
    const std::vector<FakeOwner*> owners = make_blocks(world, 9);
    world.pager.evict_all();
    std::vector<Use> uses;
    for (FakeOwner* owner : owners) {
        uses.push_back({owner, false, UseKind::kBringIn});
    }
    Pins pins;

    world.pager.begin_use(uses, 0, &pins);

    EXPECT_EQ(pins.size(), 9u);
    EXPECT_EQ(world.pager.stats().resident_bytes, 4 * kBlock);
    for (unsigned i = 0; i < 9; ++i) {
        EXPECT_EQ(world.is_resident(owners[i]), i < 4);
        EXPECT_TRUE(world.has(owners[i], i + 1));
    }
    world.pager.end_use(&pins);
    drop_all(world, owners);
}

TEST(PagerTest, OwnersOfOtherBytesAreIgnored) {
    PagerWorld world;
    std::array<char, 64> elsewhere{};
    FakeOwner* stranger = world.port.adopt(elsewhere.data(), elsewhere.size());
    FakeOwner* empty = world.port.adopt(nullptr, 0);
    Pins pins;
    world.pager.begin_use({{stranger, true, UseKind::kBringIn}, {empty, true, UseKind::kBringIn}},
                          0, &pins);
    world.pager.note_outputs({stranger, empty}, 0, &pins);
    world.pager.pin_for_good(stranger, 0);
    EXPECT_TRUE(pins.empty());
    EXPECT_FALSE(world.pager.free(elsewhere.data()));
    EXPECT_FALSE(world.pager.free(nullptr));
    EXPECT_FALSE(world.pager.record_stream(elsewhere.data(), 0));
    Residency residency{};
    EXPECT_FALSE(world.pager.residency(elsewhere.data(), &residency));
    stranger->address = nullptr;
    drop_all(world, {stranger, empty});
}

// Goal: what an operator uses in place keeps its address: it has a bare pointer, and may write. It
// is a matter of speed only, so a second operator uses it there as well. Method: both in flight at
// once; then the bytes are brought in.
TEST(PagerTest, StorageUsedInPlaceIsNotBroughtInMeanwhile) {
    for (const UseKind kind : {UseKind::kInPlace, UseKind::kBringInIfRoom}) {
        PagerWorld world;
        std::vector<FakeOwner*> owners = make_blocks(world, 5);
        ASSERT_TRUE(world.is_cold(owners[0]));
        Pins first;
        world.pager.begin_use({{owners[0], /*writes=*/true, kind}}, 1, &first);
        void* const address = owners[0]->address;

        EXPECT_TRUE(world.reads(owners[0], 1, UseKind::kBringIn, /*stream=*/2));

        ASSERT_EQ(owners[0]->address, address);
        world.fill(owners[0], 1);
        world.pager.end_use(&first);
        EXPECT_TRUE(world.reads(owners[0], 1, UseKind::kBringIn));
        EXPECT_TRUE(world.is_resident(owners[0]));
        drop_all(world, owners);
    }
}

// Goal: an operator that only passes a storage on, touching no byte, does not keep it cold.
TEST(PagerTest, StorageNamedForItsShapeIsBroughtInMeanwhile) {
    PagerWorld world;
    FakeOwner* owner = world.make(kBlock, 1);
    world.pager.evict_all();
    Pins outer;
    world.pager.begin_use({{owner, false, UseKind::kMetadata}}, 0, &outer);
    EXPECT_TRUE(world.reads(owner, 1, UseKind::kBringIn));
    EXPECT_TRUE(world.is_resident(owner));
    world.pager.end_use(&outer);
    drop_all(world, {owner});
}

// Goal: an output that was born cold keeps its address while the operator around may write to it.
TEST(PagerTest, PinnedOutputThatIsColdIsNotBroughtIn) {
    PagerWorld world;
    FakeOwner* output = world.make(5 * kBlock / 2, 1);
    world.pager.evict_all();
    void* const address = output->address;
    Pins outer;
    world.pager.note_outputs({output}, 0, &outer);
    EXPECT_TRUE(world.reads(output, 1, UseKind::kBringIn));
    EXPECT_EQ(output->address, address);
    world.pager.end_use(&outer);
    EXPECT_TRUE(world.reads(output, 1, UseKind::kBringIn));
    EXPECT_NE(output->address, address);
    drop_all(world, {output});
}

// --- Owners that let go ---

// Goal: an owner may die while its storage leaves. Method: its last reference is dropped once the
// pager holds it; the pager's release then frees the bytes.
TEST(PagerTest, OwnerDroppedWhileItsStorageLeavesIsFreedAfterwards) {
    PagerWorld world;
    FakeOwner* owner = world.make(kBlock, 1);
    world.port.after_hold = [&](FakeOwner& held) {
        std::thread([&] { world.port.drop(&held); }).join();
    };

    EXPECT_EQ(world.pager.evict_all(), kBlock);

    world.expect_nothing_left();
    EXPECT_FALSE(world.pager.free(owner));
}

// Goal: the same when the owner dies before the pager holds it.
TEST(PagerTest, OwnerDroppedBeforeItIsHeldFreesAResidentStorage) {
    PagerWorld world;
    world.make(kBlock, 1);
    world.port.before_hold = [&](FakeOwner& owner) {
        std::thread([&] { world.port.drop(&owner); }).join();
    };

    EXPECT_EQ(world.pager.evict_all(), 0u);

    world.expect_nothing_left();
    EXPECT_EQ(world.pager.stats().evictions, 0u);
}

/// Frees the storage's bytes though its owner lives on (as resize_() does), on another thread.
void free_bytes_elsewhere(PagerWorld& world, FakeOwner& owner) {
    void* address = std::exchange(owner.address, nullptr);
    std::thread([&] { EXPECT_TRUE(world.pager.free(address)); }).join();
}

// Goal: bytes freed in mid-eviction are freed once, with their host copy if there is one.
TEST(PagerTest, StorageFreedWhileItLeavesIsCleanedUpByTheMover) {
    for (const bool clean : {false, true}) {
        SCOPED_TRACE(clean ? "clean" : "written");
        PagerWorld world({.device = {.seed = 1, .copy_latency_ns_max = 200'000}});
        FakeOwner* owner = world.make(kBlock, 1);
        if (clean) {
            world.pager.evict_all();
            world.use(owner, UseKind::kBringIn);
        }
        world.port.after_hold = [&](FakeOwner& held) { free_bytes_elsewhere(world, held); };

        EXPECT_EQ(world.pager.evict_all(), 0u);

        drop_all(world, {owner});
    }
}

// Goal: bytes freed in mid-restore are freed once. Method: they go while room is made for them.
TEST(PagerTest, StorageFreedWhileItComesInIsCleanedUpByTheMover) {
    PagerWorld world;
    const std::vector<FakeOwner*> owners = make_blocks(world, 5);
    ASSERT_TRUE(world.is_cold(owners[0]));
    world.port.after_hold = [&](FakeOwner&) {
        world.port.after_hold = nullptr;
        free_bytes_elsewhere(world, *owners[0]);
    };

    world.use(owners[0], UseKind::kBringIn);

    EXPECT_EQ(world.pager.stats().restores, 0u);
    EXPECT_EQ(world.pager.stats().cold_bytes, kBlock);
    drop_all(world, owners);
}

/// Hands the bytes of `from` to a new owner.
FakeOwner* move_bytes_from(PagerWorld& world, FakeOwner& from) {
    return world.port.adopt(std::exchange(from.address, nullptr), from.size_bytes);
}

// Goal: a storage whose bytes change hands in mid-eviction stays, and moves for its new owner.
TEST(PagerTest, StorageWhoseOwnerPointsElsewhereStays) {
    for (const bool clean : {false, true}) {
        SCOPED_TRACE(clean ? "clean" : "written");
        PagerWorld world;
        FakeOwner* first = world.make(kBlock, 1);
        if (clean) {
            world.pager.evict_all();
            world.use(first, UseKind::kBringIn);
        }
        FakeOwner* second = nullptr;
        world.port.after_hold = [&](FakeOwner& held) {
            second = move_bytes_from(world, held);
            world.port.after_hold = nullptr;
        };
        EXPECT_EQ(world.pager.evict_all(), 0u);
        EXPECT_TRUE(world.is_resident(second));
        EXPECT_TRUE(world.reads(second, 1));

        EXPECT_EQ(world.pager.evict_all(), kBlock);

        EXPECT_TRUE(world.is_cold(second));
        EXPECT_TRUE(world.reads(second, 1, UseKind::kBringIn));
        drop_all(world, {first, second});
    }
}

// Goal: a storage whose owner has lost it does not stand in the way of those that can move. Method:
// the coldest one is handed on outside of every operator; its old owner lives, or does not.
TEST(PagerTest, StorageOfAStaleOwnerDoesNotKeepOthersFromLeaving) {
    for (const bool old_owner_lives : {true, false}) {
        PagerWorld world;
        std::vector<FakeOwner*> owners = make_blocks(world, 4);
        FakeOwner* old_owner = std::exchange(owners[0], move_bytes_from(world, *owners[0]));
        if (!old_owner_lives) {
            world.port.drop(std::exchange(old_owner, nullptr));
        }

        owners.push_back(world.make(kBlock, 5));

        EXPECT_TRUE(world.is_resident(owners[0]));
        EXPECT_TRUE(world.is_cold(owners[1]));
        EXPECT_TRUE(world.is_resident(owners[4]));
        expect_bytes(world, owners);
        if (old_owner != nullptr) {
            world.port.drop(old_owner);
        }
        drop_all(world, owners);
    }
}

// Goal: a storage freed under an operator that names it is freed once. Method: it goes while the
// same use brings another one in.
TEST(PagerTest, StorageFreedInTheMiddleOfAUseIsFreedOnce) {
    PagerWorld world;
    FakeOwner* doomed = world.make(kBlock, 1);
    world.pager.evict_all();
    world.use(doomed, UseKind::kBringIn);  // Clean: it has a block in both places.
    std::vector<FakeOwner*> owners = {doomed};
    for (unsigned mark = 2; mark <= 5; ++mark) {
        owners.push_back(world.make(kBlock, mark));
        world.use(doomed, UseKind::kInPlace);
    }
    ASSERT_TRUE(world.is_cold(owners[1]));
    ASSERT_TRUE(world.is_resident(doomed));
    world.port.after_hold = [&](FakeOwner&) {
        world.port.after_hold = nullptr;
        free_bytes_elsewhere(world, *doomed);
    };
    Pins pins;

    world.pager.begin_use(
        {{owners[1], false, UseKind::kBringIn}, {doomed, /*writes=*/true, UseKind::kInPlace}}, 0,
        &pins);

    EXPECT_EQ(doomed->address, nullptr);
    world.pager.end_use(&pins);
    drop_all(world, owners);
}

// --- Host memory that is short, page locks and copies that are refused ---

// Goal: copies kept to spare a copy give way to bytes that have no other place. Method: host memory
// for four; four clean storages keep copies there; four others come and push them out.
TEST(PagerTest, HostCopiesAreGivenUpWhenHostMemoryIsShort) {
    PagerWorld world({.host_bytes = 4 * kBlock});
    std::vector<FakeOwner*> owners = make_blocks(world, 4);
    world.pager.evict_all();
    for (FakeOwner* owner : owners) {
        world.use(owner, UseKind::kBringIn);
    }
    EXPECT_EQ(world.host.stats().in_use_bytes, 4 * kBlock);

    owners.push_back(world.make(2 * kBlock, 5));

    EXPECT_TRUE(world.is_resident(owners[4]));
    expect_bytes(world, owners);
    for (unsigned round = 0; round < 3; ++round) {
        for (unsigned i = 0; i < 5; ++i) {
            EXPECT_TRUE(world.reads(owners[i], i + 1, UseKind::kBringIn));
            EXPECT_TRUE(world.is_resident(owners[i]));
        }
    }
    drop_all(world, owners);
}

TEST(PagerTest, RefusedPageLocksChangeNothingWhereTheDeviceReadsPageableMemory) {
    PagerWorld world(
        {.device = {.reads_pageable_memory = true}, .faults = {.page_lock_limit_bytes = 0}});
    const std::vector<FakeOwner*> owners = make_blocks(world, 6);
    EXPECT_TRUE(world.reads(owners[0], 1, UseKind::kInPlace));
    EXPECT_TRUE(world.is_cold(owners[0]));
    EXPECT_EQ(world.host.stats().locked_bytes, 0u);
    EXPECT_TRUE(world.reads(owners[0], 1, UseKind::kBringIn));
    drop_all(world, owners);
}

// Goal: a device that cannot read pageable memory never has to. Method: every kind of use of bytes
// brings in, and nothing is born there.
TEST(PagerTest, UnreadableHostMemoryIsAlwaysBroughtInFrom) {
    PagerWorld world(
        {.device = {.reads_pageable_memory = false}, .faults = {.page_lock_limit_bytes = 0}});
    FakeOwner* owner = world.make(kBlock, 1);
    for (const UseKind kind : {UseKind::kInPlace, UseKind::kBringInIfRoom, UseKind::kBringIn}) {
        world.pager.evict_all();
        world.use(owner, UseKind::kMetadata);
        EXPECT_TRUE(world.is_cold(owner));
        EXPECT_TRUE(world.reads(owner, 1, kind));
        EXPECT_TRUE(world.is_resident(owner));
    }
    EXPECT_EQ(world.pager.stats().in_place_bytes, 0u);
    world.pager.evict_all();
    std::vector<FakeOwner*> owners = {owner};
    for (unsigned mark = 2; mark <= 5; ++mark) {
        owners.push_back(world.make_unknown(kBlock, mark));
    }
    EXPECT_THROW(world.pager.allocate(kBlock, 0), Error);
    EXPECT_EQ(world.pager.stats().born_cold_bytes, 0u);
    EXPECT_EQ(world.host.stats().in_use_bytes, kBlock);
    drop_all(world, owners);
}

// Goal: a refused copy leaves everything as it was. Method: all copies fail for a while; a new
// storage is born cold then, and one that is cold is used in place.
TEST(PagerTest, RefusedCopiesLeaveEveryByteWhereItIs) {
    PagerWorld world;
    std::vector<FakeOwner*> owners = make_blocks(world, 5);
    ASSERT_TRUE(world.is_cold(owners[0]));
    world.device.set_faults({.fail_copy_one_in = 1});

    EXPECT_EQ(world.pager.evict_all(), 0u);
    EXPECT_EQ(world.pager.stats().failures, 4u);
    EXPECT_EQ(world.host.stats().in_use_bytes, kBlock);
    owners.push_back(world.make(kBlock, 6));
    EXPECT_TRUE(world.is_cold(owners[5]));
    world.port.drop(owners[4]);
    const uint64_t failures = world.pager.stats().failures;
    EXPECT_TRUE(world.reads(owners[0], 1, UseKind::kBringIn));
    EXPECT_TRUE(world.is_cold(owners[0]));
    EXPECT_EQ(world.pager.stats().failures, failures + 1);
    EXPECT_EQ(world.memory.used_bytes(), 3 * kBlock);

    world.device.set_faults({});
    owners[4] = world.make(kBlock, 5);
    EXPECT_TRUE(world.reads(owners[0], 1, UseKind::kBringIn));
    EXPECT_TRUE(world.is_resident(owners[0]));
    expect_bytes(world, owners);
    drop_all(world, owners);
}

// --- For good: pins, captures, the end ---

TEST(PagerTest, PinForGoodBringsInAndKeeps) {
    PagerWorld world;
    std::vector<FakeOwner*> owners = make_blocks(world, 5);
    ASSERT_TRUE(world.is_cold(owners[0]));

    world.pager.pin_for_good(owners[0], 0);

    ASSERT_TRUE(world.is_resident(owners[0]));
    EXPECT_EQ(world.pager.stats().pinned_storages, 1u);
    void* const address = owners[0]->address;
    world.fill(owners[0], 1);
    world.pager.evict_all();
    EXPECT_EQ(owners[0]->address, address);
    expect_bytes(world, owners);
    drop_all(world, owners);
}

// Goal: an address that was given away for good stays, be it in host memory. Method: no room when
// it was given away; then there is.
TEST(PagerTest, StoragePinnedForGoodInHostMemoryStaysThere) {
    PagerWorld world;
    FakeOwner* cold = world.make(kBlock, 1);
    world.pager.evict_all();
    FakeOwner* filler = world.make_unknown(4 * kBlock, 2);
    world.pager.pin_for_good(cold, 0);
    ASSERT_TRUE(world.is_cold(cold));
    EXPECT_EQ(world.pager.stats().pinned_storages, 1u);
    void* const address = cold->address;

    world.port.drop(filler);

    EXPECT_TRUE(world.reads(cold, 1, UseKind::kBringIn));
    world.pager.pin_for_good(cold, 0);
    EXPECT_EQ(cold->address, address);
    drop_all(world, {cold});
}

// Goal: a graph that read cold bytes reads them at each replay. Method: after the capture there is
// room, and an operator would like them on the device.
TEST(PagerTest, ColdStorageOfACaptureKeepsItsAddressAfterIt) {
    PagerWorld world;
    FakeOwner* cold = world.make(kBlock, 1);
    world.pager.evict_all();
    void* const address = cold->address;
    world.pager.set_capturing(true);
    world.use(cold, UseKind::kBringIn);
    world.pager.set_capturing(false);

    EXPECT_TRUE(world.reads(cold, 1, UseKind::kBringIn));

    EXPECT_EQ(cold->address, address);
    drop_all(world, {cold});
}

// Goal: while a graph is captured nothing moves, what it touches stays for good, and what is freed
// comes back after it. Method: a cold and a resident storage are touched, a cold one is freed.
TEST(PagerTest, CapturePinsWhatItTouchesAndMovesNothing) {
    PagerWorld world;
    std::vector<FakeOwner*> owners = make_blocks(world, 6);
    ASSERT_TRUE(world.is_cold(owners[0]) && world.is_cold(owners[1]));
    const PagerStats before = world.pager.stats();
    world.pager.set_capturing(true);
    world.device.set_capturing(true);  // A copy or an event would stop the program now.

    EXPECT_TRUE(world.reads(owners[5], 6, UseKind::kBringIn));
    world.use(owners[4], UseKind::kMetadata);
    EXPECT_TRUE(world.reads(owners[0], 1, UseKind::kBringIn));
    EXPECT_EQ(world.pager.evict_all(), 0u);
    owners.push_back(world.make(kBlock, 7));
    world.port.drop(std::exchange(owners[1], nullptr));
    EXPECT_EQ(world.host.stats().in_use_bytes, 3 * kBlock);  // 0, 6 and the freed one.
    EXPECT_TRUE(world.is_cold(owners[6]));
    EXPECT_EQ(world.pager.stats().evictions, before.evictions);
    EXPECT_EQ(world.pager.stats().restores, before.restores);

    world.pager.set_capturing(false);
    world.device.set_capturing(false);
    EXPECT_EQ(world.pager.evict_all(), 3 * kBlock);  // 2, 3 and 4; 5 stays.
    EXPECT_TRUE(world.is_resident(owners[5]));
    world.use(owners[5], UseKind::kMetadata);  // Any use sweeps.
    EXPECT_EQ(world.host.stats().in_use_bytes, 5 * kBlock);
    owners.erase(owners.begin() + 1);
    drop_all(world, owners);
}

TEST(PagerTest, CloseStopsEveryMove) {
    PagerWorld world;
    std::vector<FakeOwner*> owners = make_blocks(world, 5);
    ASSERT_TRUE(world.is_cold(owners[0]));

    world.pager.close();

    EXPECT_EQ(world.port.watchers(), 0);
    EXPECT_EQ(world.pager.evict_all(), 0u);
    EXPECT_TRUE(world.reads(owners[0], 1, UseKind::kBringIn));
    EXPECT_TRUE(world.is_cold(owners[0]));
    owners.push_back(world.make(kBlock, 6));
    EXPECT_TRUE(world.is_cold(owners[5]));
    expect_bytes(world, owners);
    drop_all(world, owners);
}

// Goal: the operator guard is let go of once, however the end comes.
TEST(PagerTest, CloseEndsTheWatchOnce) {
    for (const bool quiet_before : {false, true}) {
        PagerWorld world;
        std::vector<FakeOwner*> owners = make_blocks(world, 2);
        for (int i = 0; quiet_before && i < 3; ++i) {
            world.pager.step_done();
        }
        world.pager.close();
        world.pager.close();
        EXPECT_EQ(world.port.watchers(), 0);
        for (int i = 0; i < 3; ++i) {
            world.pager.step_done();
        }
        owners.push_back(world.make(2 * kBlock, 3));
        owners.push_back(world.make(2 * kBlock, 4));
        EXPECT_EQ(world.port.watchers(), 0);
        expect_bytes(world, owners);
        drop_all(world, owners);
    }
}

// --- Watching ---

constexpr int kWarmUpBoundaries = 128;

// Goal: a run that fits stops being watched, and growth starts it again; nothing moves before
// operators that began unwatched have ended.
TEST(PagerTest, WatchEndsAfterQuietStepsAndComesBackWithGrowth) {
    PagerWorld world;
    std::vector<FakeOwner*> owners = make_blocks(world, 2);
    world.pager.step_done();
    world.pager.step_done();
    EXPECT_EQ(world.port.watchers(), 0);
    EXPECT_EQ(world.pager.evict_all(), 0u);
    owners.push_back(world.make(kBlock, 3));
    EXPECT_EQ(world.port.watchers(), 0);

    owners.push_back(world.make(kBlock, 4));  // Past the middle between the peak and the budget.

    EXPECT_EQ(world.port.watchers(), 1);
    for (int i = 0; i < kWarmUpBoundaries; ++i) {
        EXPECT_EQ(world.pager.evict_all(), 0u);
        world.pager.boundary();
    }
    EXPECT_EQ(world.pager.evict_all(), 4 * kBlock);
    expect_bytes(world, owners);
    drop_all(world, owners);
    EXPECT_EQ(world.pager.stats().steps, 2u);
}

// Goal: a thread that began an operator unwatched, and has not come back, keeps everything where it
// is; one that never comes back does so for a limited time.
TEST(PagerTest, NothingMovesWhileSomeThreadHasNotBeenHeardOf) {
    for (const int longest_operator_ms : {3600 * 1000, 0}) {
        testing::WorldOptions options;
        options.pager.longest_operator = std::chrono::milliseconds(longest_operator_ms);
        PagerWorld world(options);
        std::vector<FakeOwner*> owners = make_blocks(world, 2);
        world.pager.step_done();
        world.pager.step_done();
        world.port.announced = false;
        owners.push_back(world.make(2 * kBlock, 3));
        ASSERT_EQ(world.port.watchers(), 1);
        const auto pass_boundaries = [&] {
            for (int i = 0; i < kWarmUpBoundaries; ++i) {
                world.pager.boundary();
            }
        };
        pass_boundaries();
        if (longest_operator_ms > 0) {
            pass_boundaries();
            EXPECT_EQ(world.pager.evict_all(), 0u);
            world.port.announced = true;
            pass_boundaries();
        }
        EXPECT_EQ(world.pager.evict_all(), 4 * kBlock);
        expect_bytes(world, owners);
        drop_all(world, owners);
    }
}

// Goal: in the warm-up there is no eviction, so what does not fit is born cold. Method: an
// allocation over the budget is what ends the unwatched time.
TEST(PagerTest, AllocationOverTheBudgetWhileUnwatchedIsBornColdAndStartsWatching) {
    PagerWorld world;
    std::vector<FakeOwner*> owners = make_blocks(world, 2);
    world.pager.step_done();
    world.pager.step_done();
    ASSERT_EQ(world.port.watchers(), 0);

    owners.push_back(world.make(3 * kBlock, 3));

    EXPECT_EQ(world.port.watchers(), 1);
    EXPECT_TRUE(world.is_cold(owners[2]));
    EXPECT_TRUE(world.reads(owners[2], 3, UseKind::kBringIn));
    EXPECT_TRUE(world.is_cold(owners[2]));
    for (int i = 0; i < kWarmUpBoundaries; ++i) {
        world.pager.boundary();
    }
    EXPECT_TRUE(world.reads(owners[2], 3, UseKind::kBringIn));
    EXPECT_TRUE(world.is_resident(owners[2]));
    expect_bytes(world, owners);
    drop_all(world, owners);
}

// Goal: only a run that fits is quiet. Method: cold bytes, a move in each step, a peak near the
// budget, a capture: each keeps the watch on.
TEST(PagerTest, WatchStaysWhileTheRunIsNotQuiet) {
    const auto watched_after = [](unsigned blocks, const auto& step) {
        PagerWorld world;
        const std::vector<FakeOwner*> owners = make_blocks(world, blocks);
        for (int i = 0; i < 5; ++i) {
            step(world, owners);
            world.pager.step_done();
        }
        world.pager.set_capturing(false);
        const bool watched = world.port.watchers() == 1;
        drop_all(world, owners);
        return watched;
    };
    const auto nothing = [](PagerWorld&, const std::vector<FakeOwner*>&) {};
    EXPECT_FALSE(watched_after(2, nothing));
    EXPECT_TRUE(watched_after(4, nothing));
    EXPECT_TRUE(watched_after(2, [](PagerWorld& world, const auto&) { world.pager.evict_all(); }));
    EXPECT_TRUE(watched_after(2, [](PagerWorld& world, const auto& owners) {
        world.pager.evict_all();
        world.use(owners[0], UseKind::kBringIn);
        world.use(owners[1], UseKind::kBringIn);
    }));
    EXPECT_TRUE(
        watched_after(2, [](PagerWorld& world, const auto&) { world.pager.set_capturing(true); }));
}

// Goal: what is written while nobody watches is not lost. Method: a clean storage is written then,
// and leaves after the watch has come back.
TEST(PagerTest, WriteWhileUnwatchedIsNotLost) {
    PagerWorld world;
    std::vector<FakeOwner*> owners = make_blocks(world, 2);
    world.pager.evict_all();
    world.use(owners[0], UseKind::kBringIn);
    world.use(owners[1], UseKind::kBringIn);
    for (int i = 0; i < 3; ++i) {
        world.pager.step_done();
    }
    ASSERT_EQ(world.port.watchers(), 0);
    world.fill(owners[0], 9);

    owners.push_back(world.make(2 * kBlock, 3));
    ASSERT_EQ(world.port.watchers(), 1);
    world.fill(owners[1], 8);  // By an operator that began before.
    for (int i = 0; i < kWarmUpBoundaries; ++i) {
        world.pager.boundary();
    }

    EXPECT_EQ(world.pager.evict_all(), 4 * kBlock);
    EXPECT_TRUE(world.reads(owners[0], 9));
    EXPECT_TRUE(world.reads(owners[1], 8));
    drop_all(world, owners);
}

// Goal: no step is quiet while a storage moves. Method: steps end in the middle of an eviction that
// began in a quiet run.
TEST(PagerTest, WatchStaysWhileAStorageIsMoving) {
    PagerWorld world;
    const std::vector<FakeOwner*> owners = make_blocks(world, 2);
    world.pager.step_done();
    world.port.after_hold = [&](FakeOwner&) {
        world.pager.step_done();
        world.pager.step_done();
        EXPECT_EQ(world.port.watchers(), 1);
    };
    world.pager.evict_all();
    world.port.after_hold = nullptr;
    expect_bytes(world, owners);
    drop_all(world, owners);
}

// Goal: what was brought in counts towards the peak that decides whether a run fits. Method: born
// cold beside bytes that go, then brought in; the device is nearly full.
TEST(PagerTest, WatchStaysWhenWhatWasBroughtInFillsTheDevice) {
    PagerWorld world;
    FakeOwner* passing = world.make_unknown(40 * kKiB, 1);
    FakeOwner* owner = world.make(240 * kKiB, 2);
    ASSERT_TRUE(world.is_cold(owner));
    world.port.drop(passing);
    world.use(owner, UseKind::kBringIn);
    ASSERT_TRUE(world.is_resident(owner));
    for (int i = 0; i < 5; ++i) {
        world.pager.step_done();
    }
    EXPECT_EQ(world.port.watchers(), 1);
    drop_all(world, {owner});
}

// --- Verify ---

// Goal: a write that nobody announced is found, said and kept. Method: a clean storage is written
// behind the pager's back and then leaves; one that was not written beside it.
TEST(PagerTest, VerifyFindsAnUnannouncedWriteAndKeepsItsBytes) {
    PagerWorld world({.pager = {.verify = true}});
    const std::vector<FakeOwner*> owners = make_blocks(world, 2);
    world.pager.evict_all();
    world.use(owners[0], UseKind::kBringIn);
    world.use(owners[1], UseKind::kBringIn);
    world.fill(owners[0], 9);
    ::testing::internal::CaptureStderr();

    EXPECT_EQ(world.pager.evict_all(), 2 * kBlock);

    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find("a storage of 64.00 KiB was written without being announced"),
              std::string::npos)
        << said;
    EXPECT_EQ(world.pager.stats().verify_faults, 1u);
    EXPECT_EQ(world.host.stats().in_use_bytes, 2 * kBlock);
    EXPECT_TRUE(world.reads(owners[0], 9, UseKind::kBringIn));
    EXPECT_TRUE(world.reads(owners[1], 2, UseKind::kBringIn));
    drop_all(world, owners);
}

// Goal: a check that cannot be made leaves nothing behind. Method: its copy is refused.
TEST(PagerTest, RefusedCopyOfAVerificationLosesNoHostMemory) {
    PagerWorld world({.pager = {.verify = true}});
    FakeOwner* owner = world.make(kBlock, 1);
    world.pager.evict_all();
    world.use(owner, UseKind::kBringIn);
    world.device.set_faults({.fail_copy_one_in = 1});
    EXPECT_EQ(world.pager.evict_all(), 0u);
    EXPECT_EQ(world.host.stats().in_use_bytes, kBlock);
    EXPECT_EQ(world.pager.stats().failures, 1u);

    world.device.set_faults({});

    EXPECT_EQ(world.pager.evict_all(), kBlock);
    EXPECT_TRUE(world.reads(owner, 1));
    drop_all(world, {owner});
}

// --- A device that breaks down ---

// Goal: freeing never throws. Method: no event is to be had for a cold storage; its block is lost,
// and said so.
TEST(PagerTest, FreeOnABrokenDeviceSaysSoAndGoesOn) {
    PagerWorld world;
    FakeOwner* owner = world.make(kBlock, 1);
    world.pager.evict_all();
    world.door.refuse_record = true;
    ::testing::internal::CaptureStderr();

    world.port.drop(owner);

    EXPECT_EQ(::testing::internal::GetCapturedStderr(),
              "trainstream: record failed: the test says so.\n");
    EXPECT_EQ(world.pager.stats().cold_bytes, 0u);
    EXPECT_EQ(world.port.owners(), 0);
}

// Goal: the same when the mover has to free. Method: freed in mid-eviction and in mid-restore.
TEST(PagerTest, StorageFreedInMidMoveOnABrokenDeviceIsCleanedUpOnce) {
    PagerWorld world;
    const std::vector<FakeOwner*> owners = make_blocks(world, 5);
    ASSERT_TRUE(world.is_cold(owners[0]));
    world.port.after_hold = [&](FakeOwner&) {
        world.port.after_hold = nullptr;
        free_bytes_elsewhere(world, *owners[0]);
        world.door.refuse_record = true;
    };
    ::testing::internal::CaptureStderr();
    world.use(owners[0], UseKind::kBringIn);
    world.door.refuse_record = false;
    world.port.after_hold = [&](FakeOwner& held) {
        free_bytes_elsewhere(world, held);
        world.door.refuse_record = true;
    };
    world.pager.evict_all();
    world.door.refuse_record = false;
    ::testing::internal::GetCapturedStderr();
    for (FakeOwner* owner : owners) {
        world.port.drop(owner);
    }
    EXPECT_EQ(world.memory.used_bytes(), 0u);
    EXPECT_EQ(world.pager.stats().cold_bytes, 0u);
    EXPECT_EQ(world.port.owners(), 0);
    EXPECT_EQ(world.port.held(), 0);
}

// Goal: a move that breaks off in its last call leaves no storage in transition, which others would
// wait for. Method: the streams cannot be made to wait for the copy.
TEST(PagerTest, RefusedWaitLeavesNoStorageInTransition) {
    PagerWorld world;
    FakeOwner* owner = world.make(kBlock, 1);
    world.door.refuse_wait = true;
    EXPECT_EQ(world.pager.evict_all(), 0u);
    EXPECT_TRUE(world.is_resident(owner));
    world.door.refuse_wait = false;
    EXPECT_EQ(world.pager.evict_all(), kBlock);

    world.door.refuse_wait = true;
    world.use(owner, UseKind::kBringIn);

    EXPECT_TRUE(world.is_cold(owner));
    EXPECT_EQ(world.memory.used_bytes(), 0u);
    EXPECT_EQ(world.pager.stats().failures, 2u);
    world.door.refuse_wait = false;
    EXPECT_TRUE(world.reads(owner, 1, UseKind::kBringIn));
    EXPECT_TRUE(world.is_resident(owner));
    drop_all(world, {owner});
}

// --- Streams ---

TEST(PagerTest, RecordStreamKnowsOnlyManagedStorages) {
    PagerWorld world;
    FakeOwner* owner = world.make(kBlock, 1);
    EXPECT_TRUE(world.pager.record_stream(owner->address, 7));
    EXPECT_FALSE(world.pager.record_stream(owner->bytes() + 1, 7));
    world.pager.evict_all();
    EXPECT_TRUE(world.pager.record_stream(owner->address, 7));
    EXPECT_TRUE(world.reads(owner, 1, UseKind::kBringIn, /*stream=*/9));
    drop_all(world, {owner});
}

// Goal: a stream that did not ask for the copy waits for it as well. Method: slow copies; brought
// in for one stream, read on another, and read in host memory on a third right after leaving.
TEST(PagerTest, EveryStreamWaitsForTheCopy) {
    PagerWorld world({.device = {.to_host_bytes_per_second = 20'000'000,
                                 .to_device_bytes_per_second = 20'000'000}});
    FakeOwner* owner = world.make(kBlock, 1, /*stream=*/1);
    for (int round = 0; round < 3; ++round) {
        world.use(owner, UseKind::kBringIn, /*writes=*/true, /*stream=*/2);
        EXPECT_TRUE(world.reads(owner, 1, UseKind::kInPlace, /*stream=*/3));
        EXPECT_EQ(world.pager.evict_all(), kBlock);
        EXPECT_TRUE(world.reads(owner, 1, UseKind::kInPlace, /*stream=*/4));
    }
    drop_all(world, {owner});
}

// --- Threads ---

// Goal: two operators that name the same storages in opposite orders both end. Method: budget for
// one of the two storages, so that each use moves, many times over.
TEST(PagerTest, OppositeOrdersOfTheSameStoragesDoNotBlock) {
    PagerWorld world(
        {.budget_bytes = 3 * kBlock, .device = {.seed = 5, .copy_latency_ns_max = 20'000}});
    const std::vector<FakeOwner*> owners = {world.make(2 * kBlock, 1), world.make(2 * kBlock, 2)};
    const auto walk = [&](unsigned first) {
        for (int round = 0; round < 300; ++round) {
            Pins pins;
            world.pager.begin_use({{owners[first], false, UseKind::kBringIn},
                                   {owners[1 - first], false, UseKind::kBringIn}},
                                  first, &pins);
            EXPECT_TRUE(world.has(owners[first], first + 1));
            EXPECT_TRUE(world.has(owners[1 - first], 2 - first));
            world.pager.end_use(&pins);
        }
    };
    std::thread other([&] { walk(1); });
    walk(0);
    other.join();
    drop_all(world, owners);
}

/// Uses `owner` on another thread, and returns once that waits for the thread that moves it.
std::thread use_in_mid_move(PagerWorld& world, FakeOwner* owner) {
    std::thread waiter([&world, owner] { world.use(owner, UseKind::kInPlace); });
    while (world.port.blocked() == 0) {
        std::this_thread::yield();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // From there to its sleep.
    return waiter;
}

// Goal: who waits for a storage in transition is woken by the end of it, however it ends. Method: a
// thread waits in mid-eviction; nothing else happens after that.
TEST(PagerTest, WaiterIsWokenByTheEndOfAnEviction) {
    for (const bool fails : {false, true}) {
        PagerWorld world;
        FakeOwner* owner = world.make(kBlock, 1);
        FakeOwner* old_owner = nullptr;
        std::thread waiter;
        world.port.after_hold = [&](FakeOwner& held) {
            world.port.after_hold = nullptr;
            if (fails) {
                old_owner = std::exchange(owner, move_bytes_from(world, held));
            }
            waiter = use_in_mid_move(world, owner);
        };
        EXPECT_EQ(world.pager.evict_all(), fails ? 0 : kBlock);
        waiter.join();
        if (old_owner != nullptr) {
            world.port.drop(old_owner);
        }
        drop_all(world, {owner});
    }
}

// Goal: the same for a storage that comes in. Method: a thread waits while room is being made; the
// copy takes longer than the eviction, which wakes it too, or is refused.
TEST(PagerTest, WaiterIsWokenByTheEndOfARestore) {
    for (const bool fails : {false, true}) {
        PagerWorld world({.device = {.to_device_bytes_per_second = 10'000'000}});
        const std::vector<FakeOwner*> owners = make_blocks(world, 5);
        ASSERT_TRUE(world.is_cold(owners[0]));
        std::thread waiter;
        world.port.after_hold = [&](FakeOwner&) {
            world.port.after_hold = nullptr;
            waiter = use_in_mid_move(world, owners[0]);
            world.door.refuse_wait = fails;
        };
        world.use(owners[0], UseKind::kBringIn);
        waiter.join();
        world.door.refuse_wait = false;
        EXPECT_EQ(world.is_resident(owners[0]), !fails);
        expect_bytes(world, owners);
        drop_all(world, owners);
    }
}

#ifdef TS_DEBUG_CHECKS
// Goal: a thread that would wait for its own move says so instead. Method: an owner that uses its
// storage while the pager holds it to move it.
TEST(PagerDeathTest, WaitingForOnesOwnMoveStopsTheProgram) {
    const auto wait_for_own_move = [] {
        PagerWorld world;
        world.make(kBlock, 1);
        world.port.after_hold = [&](FakeOwner& owner) { world.use(&owner, UseKind::kInPlace); };
        world.pager.evict_all();
    };
    EXPECT_DEATH(wait_for_own_move(), "t_moves");
}
#endif

}  // namespace
}  // namespace trainstream
