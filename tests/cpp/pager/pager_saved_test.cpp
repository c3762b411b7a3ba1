// Which storages that are saved for backward leave, when, and what is counted.
#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

#include "support/pager_world.h"

namespace trainstream {
namespace {

using testing::FakeOwner;
using testing::PagerWorld;
using testing::WorldOptions;

constexpr size_t kActivation = 16 * kKiB;

WorldOptions room_for(size_t activations) {
    WorldOptions options;
    options.budget_bytes = activations * kActivation;
    return options;
}

/// Owner: the test. Every tensor made is saved and let go of, unless it is kept.
struct SavedWorld : PagerWorld {
    explicit SavedWorld(size_t activations) : PagerWorld(room_for(activations)) {}

    StoragePtr save(FakeOwner* owner, bool by_need = false) {
        owner->strong.fetch_add(1);
        const Save result = pager.save(owner);
        if (result.may_spill) {
            pager.spill(result.storage, by_need);
        }
        return result.storage;
    }
    void unsave(FakeOwner* owner, const StoragePtr& storage) {
        pager.unsave(storage);
        port.drop(owner);
    }
    void boundaries(int count) {
        for (int i = 0; i < count; ++i) {
            pager.boundary();
            finish_copies();
        }
    }
    void finish_copies() {
        while (device.copy_stats().to_host_bytes < pager.stats().evicted_bytes) {
            std::this_thread::yield();
        }
    }
};

TEST(PagerSavedTest, LeavesOnceNothingElseHoldsIt) {
    SavedWorld t(8);
    FakeOwner* x = t.make(kActivation, 1);
    const StoragePtr storage = t.save(x);
    const StoragePtr view = t.save(x);  // Of the same storage.
    EXPECT_EQ(storage, view);
    t.boundaries(20);
    EXPECT_TRUE(t.is_resident(x)) << "the script holds it, and may write to it";
    EXPECT_EQ(t.pager.stats().spilled_bytes, 0u);
    t.port.drop(x);
    t.boundaries(2);
    EXPECT_TRUE(t.is_cold(x));
    EXPECT_EQ(t.pager.stats().spilled_bytes, kActivation);
    EXPECT_EQ(t.pager.stats().evicted_bytes, kActivation);
    t.pager.unpack(storage, 0, {storage});
    EXPECT_TRUE(t.is_resident(x));
    EXPECT_EQ(t.pager.stats().returned_bytes, kActivation);
    EXPECT_TRUE(t.reads(x, 1));
    t.boundaries(20);
    EXPECT_TRUE(t.is_resident(x)) << "backward is at it";
    t.unsave(x, storage);
    t.unsave(x, view);
    t.expect_nothing_left();
}

TEST(PagerSavedTest, WhatIsKeptIsGivenUpAndStillLeavesForWantOfRoom) {
    SavedWorld t(2);
    FakeOwner* x = t.make(kActivation, 1);
    const StoragePtr storage = t.save(x);
    t.boundaries(300);
    EXPECT_EQ(storage->spill, Spill::kNo);
    FakeOwner* others[] = {t.make(kActivation, 2), t.make(kActivation, 3)};
    EXPECT_TRUE(t.is_cold(x));
    EXPECT_EQ(t.pager.stats().spilled_bytes, 0u);
    EXPECT_TRUE(t.reads(x, 1));
    t.unsave(x, storage);
    t.port.drop(x);
    for (FakeOwner* other : others) {
        t.port.drop(other);
    }
    t.expect_nothing_left();
}

TEST(PagerSavedTest, WeightsOfEarlierStepsAndWhatIsPinnedStay) {
    SavedWorld t(8);
    FakeOwner* weight = t.make(kActivation, 1);
    t.pager.step_done();
    FakeOwner* pinned = t.make(kActivation, 2);
    t.pager.pin_for_good(pinned, 0);
    for (FakeOwner* owner : {weight, pinned}) {
        owner->strong.fetch_add(1);
        const Save result = t.pager.save(owner);
        EXPECT_NE(result.storage, nullptr);
        EXPECT_FALSE(result.may_spill);
        t.unsave(owner, result.storage);
        t.port.drop(owner);
    }
    t.expect_nothing_left();
}

TEST(PagerSavedTest, ByNeedTakesWhatTheLastStepHadTooMuchAndNothingBefore) {
    SavedWorld t(8);  // Of which 6 are for what a step makes that does not fit.
    const auto step = [&t](int activations) {
        const uint64_t before = t.pager.stats().spilled_bytes;
        std::vector<std::pair<FakeOwner*, StoragePtr>> saved;
        for (int i = 0; i < activations; ++i) {
            FakeOwner* x = t.make(kActivation, i);
            saved.emplace_back(x, t.save(x, /*by_need=*/true));
            t.port.drop(x);
            t.boundaries(2);
        }
        for (; !saved.empty(); saved.pop_back()) {
            t.pager.unpack(saved.back().second, 0, {});
            t.unsave(saved.back().first, saved.back().second);
        }
        t.pager.step_done();
        return (t.pager.stats().spilled_bytes - before) / kActivation;
    };
    EXPECT_EQ(step(7), 0u);
    EXPECT_EQ(step(8), 0u) << "the step before fitted";
    EXPECT_EQ(step(8), 2u);
    EXPECT_EQ(step(5), 2u);
    EXPECT_EQ(step(5), 0u);
    t.expect_nothing_left();
}

TEST(PagerSavedTest, ARunThatFitsGoesOnSpillingWhatItIsToldTo) {
    SavedWorld t(16);
    FakeOwner* weight = t.make(kActivation, 100);
    for (int i = 0; i < 6; ++i) {
        FakeOwner* x = t.make(kActivation, i);
        const StoragePtr storage = t.save(x);
        t.port.drop(x);
        t.boundaries(2);
        EXPECT_TRUE(t.is_cold(x)) << i;
        EXPECT_TRUE(t.reads(x, i, UseKind::kBringIn));
        t.unsave(x, storage);
        EXPECT_TRUE(t.reads(weight, 100, UseKind::kBringIn));
        t.pager.step_done();
    }
    EXPECT_EQ(t.port.watchers(), 1);
    EXPECT_EQ(t.pager.stats().plans, 0u) << "nothing left for want of room";
    t.port.drop(weight);
    t.expect_nothing_left();
}

TEST(PagerSavedTest, ARunThatIsNotWatchedIsAgainOnceItSpills) {
    SavedWorld t(16);
    for (int i = 0; i < 3; ++i) {
        t.pager.step_done();
    }
    ASSERT_EQ(t.port.watchers(), 0);
    FakeOwner* x = t.make(kActivation, 1);
    const StoragePtr storage = t.save(x);
    t.port.drop(x);
    EXPECT_EQ(t.port.watchers(), 1);
    t.boundaries(1);
    EXPECT_TRUE(t.is_resident(x)) << "operators may be in flight that nobody announced";
    t.boundaries(300);
    EXPECT_TRUE(t.is_cold(x));
    t.unsave(x, storage);
    t.expect_nothing_left();
}

TEST(PagerSavedTest, FailuresLeaveItWhereItIs) {
    SavedWorld t(8);
    FakeOwner* x = t.make(kActivation, 1);
    const StoragePtr storage = t.save(x);
    t.port.drop(x);
    t.door.refuse_copy_one_in = 1;
    t.boundaries(3);
    EXPECT_TRUE(t.is_resident(x));
    EXPECT_EQ(t.pager.stats().failures, 1u);
    EXPECT_EQ(t.host.stats().in_use_bytes, 0u);
    t.door.refuse_copy_one_in = 0;
    EXPECT_EQ(t.pager.evict_all(), kActivation);
    t.door.refuse_copy_one_in = 1;
    t.pager.unpack(storage, 0, {storage});
    EXPECT_TRUE(t.is_cold(x));
    EXPECT_EQ(t.pager.stats().failures, 2u);
    t.door.refuse_copy_one_in = 0;
    EXPECT_TRUE(t.reads(x, 1, UseKind::kBringIn));
    t.unsave(x, storage);
    t.expect_nothing_left();
}

TEST(PagerSavedTest, WhatBackwardAsksForNextNoLongerLeaves) {
    SavedWorld t(8);
    FakeOwner* x = t.make(kActivation, 1);
    FakeOwner* last = t.make(kActivation, 2);
    const StoragePtr storage = t.save(x);
    const StoragePtr last_storage = t.save(last);
    t.pager.unpack(last_storage, 0, {storage});
    t.port.drop(x);
    t.port.drop(last);
    t.boundaries(3);
    EXPECT_TRUE(t.is_resident(x));
    EXPECT_TRUE(t.is_resident(last));
    EXPECT_EQ(t.pager.stats().spilled_bytes, 0u);
    t.unsave(x, storage);
    t.unsave(last, last_storage);
    t.expect_nothing_left();
}

TEST(PagerSavedTest, WhatOthersHoldComesBackOnDemandOnly) {
    SavedWorld t(8);
    FakeOwner* x = t.make(kActivation, 1);
    const StoragePtr storage = t.save(x);
    t.port.drop(x);
    t.boundaries(2);
    ASSERT_TRUE(t.is_cold(x));
    x->strong.fetch_add(1);  // A kernel that nobody announces may be given what this one holds.
    t.pager.unpack(storage, 0, {storage});
    EXPECT_TRUE(t.is_cold(x));
    t.port.drop(x);
    t.pager.unpack(storage, 0, {storage});
    EXPECT_TRUE(t.is_resident(x));
    t.unsave(x, storage);
    t.expect_nothing_left();
}

TEST(PagerSavedTest, WithoutPageLocksNothingIsCopiedAhead) {
    SavedWorld t(8);
    t.door.refuse_page_lock = true;
    FakeOwner* x = t.make(kActivation, 1);
    const StoragePtr storage = t.save(x);
    t.port.drop(x);
    t.boundaries(3);
    EXPECT_TRUE(t.is_resident(x)) << "the host would have waited";
    EXPECT_EQ(t.pager.evict_all(), kActivation);
    t.pager.unpack(storage, 0, {storage});
    EXPECT_TRUE(t.is_cold(x));
    EXPECT_TRUE(t.reads(x, 1, UseKind::kBringIn));
    EXPECT_EQ(t.pager.stats().spilled_bytes + t.pager.stats().returned_bytes, 0u);
    t.unsave(x, storage);
    t.expect_nothing_left();
}

TEST(PagerSavedTest, ComesBackIntoFreeRoomOnlyAndInTheOrderAsked) {
    SavedWorld t(4);
    std::vector<std::pair<FakeOwner*, StoragePtr>> saved;
    for (int i = 0; i < 4; ++i) {
        FakeOwner* x = t.make(kActivation, i);
        saved.emplace_back(x, t.save(x));
        t.port.drop(x);
        t.boundaries(2);
    }
    FakeOwner* others[] = {t.make(kActivation, 10), t.make(kActivation, 11)};
    t.pager.unpack(saved[3].second, 0, {saved[2].second, saved[1].second, saved[0].second});
    EXPECT_TRUE(t.is_resident(saved[2].first));
    EXPECT_TRUE(t.is_resident(saved[1].first));
    EXPECT_TRUE(t.is_cold(saved[0].first));
    for (FakeOwner* other : others) {
        EXPECT_TRUE(t.is_resident(other));
        t.port.drop(other);
    }
    for (const auto& [owner, storage] : saved) {
        t.unsave(owner, storage);
    }
    t.expect_nothing_left();
}

TEST(PagerSavedTest, OwnersThatHandTheirBytesOnAreLeftAlone) {
    SavedWorld t(8);
    FakeOwner* x = t.make(kActivation, 1);
    const StoragePtr storage = t.save(x);
    FakeOwner* heir = t.port.adopt(std::exchange(x->address, nullptr), kActivation);
    t.port.drop(x);
    t.boundaries(3);
    EXPECT_TRUE(SavedWorld::has(heir, 1));
    t.unsave(x, storage);
    t.port.drop(heir);
    t.expect_nothing_left();
}

}  // namespace
}  // namespace trainstream
