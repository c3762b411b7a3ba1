#include "pager/storage.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

#include "base/bytes.h"
#include "support/manual_event.h"

namespace trainstream {
namespace {

using testing::ManualEvent;

constexpr size_t kSize = 1000;
constexpr StreamId kHome = 1;

/// Addresses that are never read.
char g_device_block;
char g_host_block;
char g_owner;

HostBlock host_block(size_t size_bytes = kSize) { return {&g_host_block, size_bytes, true}; }

/// A storage that somebody owns, on its legal way to `residency`.
Storage storage_in(Residency residency) {
    if (residency == Residency::kCold || residency == Residency::kRestoring) {
        Storage storage(kSize, kHome, host_block());
        storage.owner = &g_owner;
        if (residency == Residency::kRestoring) {
            storage.begin_restore();
        }
        return storage;
    }
    Storage storage(kSize, kHome, &g_device_block);
    storage.owner = &g_owner;
    if (residency == Residency::kEvicting) {
        storage.begin_evict();
    }
    return storage;
}

/// A step of the state machine, whence it is legal and whither it leads.
struct Step {
    const char* name;
    Residency from;
    Residency to;
    void (*take)(Storage&);
};

constexpr std::array<Residency, 4> kResidencies = {Residency::kResident, Residency::kEvicting,
                                                   Residency::kCold, Residency::kRestoring};

const std::array<Step, 6> kSteps = {{
    {"begin_evict", Residency::kResident, Residency::kEvicting,
     [](Storage& storage) { storage.begin_evict(); }},
    {"finish_evict", Residency::kEvicting, Residency::kCold,
     [](Storage& storage) { EXPECT_EQ(storage.finish_evict(host_block()), &g_device_block); }},
    {"cancel_evict", Residency::kEvicting, Residency::kResident,
     [](Storage& storage) { storage.cancel_evict(); }},
    {"begin_restore", Residency::kCold, Residency::kRestoring,
     [](Storage& storage) { storage.begin_restore(); }},
    {"finish_restore", Residency::kRestoring, Residency::kResident,
     [](Storage& storage) { storage.finish_restore(&g_device_block); }},
    {"cancel_restore", Residency::kRestoring, Residency::kCold,
     [](Storage& storage) { storage.cancel_restore(); }},
}};

// Goal: each step leads where the header says, and the address follows.
TEST(StorageTest, LegalStepsLeadWhereTheyShould) {
    for (const Step& step : kSteps) {
        SCOPED_TRACE(step.name);
        Storage storage = storage_in(step.from);

        step.take(storage);

        EXPECT_EQ(storage.residency(), step.to);
        const bool on_device = step.to == Residency::kResident || step.to == Residency::kEvicting;
        EXPECT_EQ(storage.address(), on_device ? &g_device_block : &g_host_block);
        EXPECT_EQ(storage.in_transition(),
                  step.to == Residency::kEvicting || step.to == Residency::kRestoring);
    }
}

#ifdef TS_DEBUG_CHECKS
// Goal: no other step is possible. Method: every step from every state that it does not start in.
TEST(StorageDeathTest, IllegalStepsStopTheProgram) {
    for (const Step& step : kSteps) {
        for (const Residency residency : kResidencies) {
            if (residency != step.from) {
                SCOPED_TRACE(std::string(step.name) + " from " +
                             std::to_string(static_cast<int>(residency)));
                Storage storage = storage_in(residency);
                EXPECT_DEATH(step.take(storage), "check failed");
            }
        }
    }
}

TEST(StorageDeathTest, WhatMustStayCannotBegin) {
    Storage pinned = storage_in(Residency::kResident);
    pinned.pin();
    EXPECT_DEATH(pinned.begin_evict(), "movable");
    Storage fixed = storage_in(Residency::kResident);
    fixed.pin_for_good();
    EXPECT_DEATH(fixed.begin_evict(), "movable");
    Storage ownerless(kSize, kHome, &g_device_block);
    EXPECT_DEATH(ownerless.begin_evict(), "movable");
}

TEST(StorageDeathTest, UnpinWithoutPinStopsTheProgram) {
    Storage storage = storage_in(Residency::kResident);
    EXPECT_DEATH(storage.unpin(), "pin_count_");
}

TEST(StorageDeathTest, AddressPinWithoutAPinOrInMidRestoreStopsTheProgram) {
    Storage storage = storage_in(Residency::kCold);
    EXPECT_DEATH(storage.pin_address(), "address_pin_count_");
    EXPECT_DEATH(storage.unpin_address(), "address_pin_count_");
    storage.pin();
    storage.pin_address();
    EXPECT_DEATH(storage.begin_restore(), "may_come_in");
    storage.unpin_address();
    storage.begin_restore();
    EXPECT_DEATH(storage.pin_address(), "kRestoring");
}

TEST(StorageDeathTest, HostBlockOfAnotherSizeStopsTheProgram) {
    Storage storage = storage_in(Residency::kEvicting);
    EXPECT_DEATH(storage.finish_evict(host_block(kSize + 1)), "size_bytes");
}

TEST(StorageDeathTest, StorageWithoutABlockStopsTheProgram) {
    EXPECT_DEATH(Storage(kSize, kHome, nullptr), "check failed");
    EXPECT_DEATH(Storage(kSize, kHome, HostBlock{}), "check failed");
}
#endif

// Goal: the host copy survives the way in, and only the way in. Method: one whole round.
TEST(StorageTest, RestoredStorageIsCleanUntilItsCopyIsDropped) {
    Storage storage = storage_in(Residency::kRestoring);
    EXPECT_FALSE(storage.drop_host_copy());  // Its only bytes.
    storage.finish_restore(&g_device_block);
    EXPECT_TRUE(storage.is_clean());

    EXPECT_EQ(storage.drop_host_copy().address, &g_host_block);

    EXPECT_FALSE(storage.is_clean());
    EXPECT_EQ(storage.host().address, nullptr);
    EXPECT_FALSE(storage.drop_host_copy());
    EXPECT_FALSE(storage_in(Residency::kCold).drop_host_copy());
}

TEST(StorageTest, CancelledEvictionOfACleanStorageKeepsItClean) {
    Storage storage = storage_in(Residency::kRestoring);
    storage.finish_restore(&g_device_block);
    storage.begin_evict();
    EXPECT_FALSE(storage.is_clean());  // Its host copy may not be dropped now.
    EXPECT_FALSE(storage.drop_host_copy());

    storage.cancel_evict();

    EXPECT_TRUE(storage.is_clean());
}

TEST(StorageTest, OnlyAnOwnedUnpinnedResidentStorageIsMovable) {
    Storage storage(kSize, kHome, &g_device_block);
    EXPECT_FALSE(storage.movable());
    storage.owner = &g_owner;
    EXPECT_TRUE(storage.movable());
    storage.pin();
    storage.pin();
    storage.unpin();
    EXPECT_FALSE(storage.movable());
    storage.unpin();
    EXPECT_TRUE(storage.movable());
    storage.begin_evict();
    EXPECT_FALSE(storage.movable());
    storage.finish_evict(host_block());
    EXPECT_FALSE(storage.movable());

    Storage fixed = storage_in(Residency::kResident);
    fixed.pin_for_good();
    EXPECT_FALSE(fixed.movable());
}

// Goal: who has the address keeps the storage where it is, and only while he has it.
TEST(StorageTest, AddressPinKeepsAColdStorageCold) {
    Storage storage = storage_in(Residency::kCold);
    storage.pin();
    EXPECT_TRUE(storage.may_come_in());
    storage.pin_address();
    EXPECT_FALSE(storage.may_come_in());
    storage.unpin_address();
    EXPECT_TRUE(storage.may_come_in());
    storage.begin_restore();
    EXPECT_FALSE(storage.may_come_in());
    storage.finish_restore(&g_device_block);
    EXPECT_FALSE(storage.may_come_in());
}

// Goal: a stream waits for a copy until it has been made to, and for the next copy again.
TEST(StorageTest, EachStreamWaitsForACopyUntilItHasBeenMadeTo) {
    Storage storage = storage_in(Residency::kResident);
    EXPECT_EQ(storage.unsynced(7), nullptr);  // No copy yet.
    const auto first = std::make_shared<ManualEvent>();
    const auto second = std::make_shared<ManualEvent>();
    storage.set_ready(first, {kHome});
    EXPECT_EQ(storage.unsynced(kHome), nullptr);
    EXPECT_EQ(storage.unsynced(7), first);
    EXPECT_EQ(storage.unsynced(7), first);  // Another thread on the same stream.
    storage.note_waited(7, first);
    EXPECT_EQ(storage.unsynced(7), nullptr);
    EXPECT_EQ(storage.unsynced(8), first);

    storage.set_ready(second, {8});

    storage.note_waited(7, first);  // Too late: there was another copy meanwhile.
    EXPECT_EQ(storage.unsynced(8), nullptr);
    EXPECT_EQ(storage.unsynced(7), second);
    EXPECT_EQ(storage.unsynced(kHome), second);
    EXPECT_EQ(storage.ready(), second);
}

// Goal: a write made on one stream is waited for by each other stream, and no move in between
// changes that.
TEST(StorageTest, EachOtherStreamWaitsForAWriteUntilItHasBeenMadeTo) {
    Storage storage = storage_in(Residency::kResident);
    EXPECT_EQ(storage.unsynced_write(7), nullptr);  // None yet.
    const auto first = std::make_shared<ManualEvent>();
    const auto second = std::make_shared<ManualEvent>();
    storage.set_written(first, 7);
    storage.set_ready(std::make_shared<ManualEvent>(), {kHome, 8});
    EXPECT_EQ(storage.unsynced_write(7), nullptr);
    EXPECT_EQ(storage.unsynced_write(8), first);
    storage.note_waited(8, first);
    EXPECT_EQ(storage.unsynced_write(8), nullptr);
    EXPECT_EQ(storage.unsynced_write(kHome), first);

    storage.set_written(second, 8);

    EXPECT_EQ(storage.unsynced_write(8), nullptr);
    EXPECT_EQ(storage.unsynced_write(7), second);
}

// Goal: what a copy has to wait for. Method: streams come once each, and an eviction, which waits
// for all of them, forgets all but the home. What the user recorded holds until the storage is
// freed.
TEST(StorageTest, EvictionForgetsTheStreamsThatItWaitedForButNotTheRecordedOnes) {
    Storage storage = storage_in(Residency::kResident);
    storage.used_by(7);
    storage.used_by(7);
    storage.record_stream(8);
    storage.record_stream(8);
    EXPECT_EQ(storage.streams(), (std::vector<StreamId>{kHome, 7, 8}));
    EXPECT_EQ(storage.recorded(), (std::vector<StreamId>{8}));

    storage.begin_evict();
    storage.finish_evict(host_block());

    EXPECT_EQ(storage.streams(), (std::vector<StreamId>{kHome}));
    EXPECT_EQ(storage.recorded(), (std::vector<StreamId>{8}));
}

// Goal: a scan of storages used once leaves before one that every step uses. Method: three steps of
// 1000 ticks; then the one of each step was used longest ago, and is still the hottest.
TEST(StorageTest, ScanOfOneUseLeavesBeforeWhatEveryStepUses) {
    Storage weight = storage_in(Residency::kResident);
    for (const uint64_t now : {1000u, 2000u, 3000u}) {
        weight.touch(now);
    }
    for (uint64_t now = 3001; now < 4000; ++now) {
        Storage scanned = storage_in(Residency::kResident);
        scanned.touch(now);
        ASSERT_GT(weight.heat(now + kNewbornTicks), scanned.heat(now + kNewbornTicks));
    }
    Storage of_next_step = storage_in(Residency::kResident);
    of_next_step.touch(4001);
    EXPECT_LT(weight.heat(5000), of_next_step.heat(5000));  // It did not come back: its turn.
}

// Goal: what has just been made is what the next operators work on. Method: beside a storage that
// comes back at intervals, at both ends of the time for which it counts as new.
TEST(StorageTest, NewbornIsHotterThanWhatComesBack) {
    Storage weight = storage_in(Residency::kResident);
    weight.touch(1000);
    weight.touch(2000);
    Storage newborn = storage_in(Residency::kResident);
    newborn.touch(2000);
    EXPECT_GT(newborn.heat(2000), weight.heat(2000));
    EXPECT_GT(newborn.heat(1999 + kNewbornTicks), weight.heat(1999 + kNewbornTicks));
    EXPECT_LT(newborn.heat(2000 + kNewbornTicks), weight.heat(2000 + kNewbornTicks));
    newborn.touch(4000);  // Its interval is known from here on.
    EXPECT_EQ(newborn.heat(4000), 4000u + 2000u);
}

// Goal: an operator and the ones that it calls are one use. Method: uses close together give no
// interval, so the heat is the last use.
TEST(StorageTest, UsesCloseTogetherAreOneUse) {
    Storage storage = storage_in(Residency::kResident);
    for (uint64_t now = 100; now < 200; now += 10) {
        storage.touch(now);
        EXPECT_EQ(storage.heat(now + kNewbornTicks), now);
    }
    storage.touch(1190);
    EXPECT_EQ(storage.last_use(), 1190u);
    EXPECT_EQ(storage.heat(1190), 1190u + 1000u);
}

// Goal: a thread that waited in the middle of its use does not turn time back. Method: a tick older
// than the last use, as the thread took it before others went on.
TEST(StorageTest, TouchWithAnOlderTickChangesNothing) {
    Storage storage = storage_in(Residency::kResident);
    storage.touch(1000);
    storage.touch(2000);

    storage.touch(1500);

    EXPECT_EQ(storage.last_use(), 2000u);
    EXPECT_EQ(storage.heat(2000), 3000u);
}

}  // namespace
}  // namespace trainstream
