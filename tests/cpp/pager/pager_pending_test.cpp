// tests/cpp/pager/pager_pending_test.cpp: writes that another thread makes later.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
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

std::vector<StoragePtr> announce(PagerWorld& world, const std::vector<FakeOwner*>& owners) {
    std::vector<StoragePtr> writes;
    for (FakeOwner* owner : owners) {
        writes.push_back(world.pager.announce_write(owner));
        EXPECT_NE(writes.back(), nullptr);
    }
    return writes;
}

void drop_all(PagerWorld& world, const std::vector<FakeOwner*>& owners) {
    for (FakeOwner* owner : owners) {
        world.port.drop(owner);
    }
    world.expect_nothing_left();
}

/// An optimizer's thread: writes to its storages where they are, one after the other.
std::thread writer_of(PagerWorld& world, std::vector<FakeOwner*> owners,
                      std::vector<StoragePtr> writes, std::atomic<size_t>* done) {
    return std::thread([&world, owners = std::move(owners), writes = std::move(writes), done] {
        Pager::make_pending_writes();
        for (size_t i = 0; i < owners.size(); ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            world.write(owners[i], static_cast<unsigned>(100 + i));
            done->fetch_add(1);
            world.pager.end_write(writes[i], std::nullopt);
        }
    });
}

// Goal: whoever uses a storage sees every write announced before, and waits for no other storage's.
// Method: six storages where four fit, each to be written by another thread, in order; each is read
// as soon as it may be, by every kind of use.
TEST(PagerPendingTest, UseWaitsForTheWriteToItsOwnStorage) {
    PagerWorld world;
    std::vector<FakeOwner*> owners;
    for (unsigned mark = 0; mark < 6; ++mark) {
        owners.push_back(world.make(kBlock, mark));
    }
    const std::vector<StoragePtr> writes = announce(world, owners);
    std::atomic<size_t> done{0};
    std::thread writer = writer_of(world, owners, writes, &done);
    const std::array kinds{UseKind::kInPlace, UseKind::kOnce, UseKind::kBringInIfRoom,
                           UseKind::kBringIn};
    for (unsigned i = 0; i < owners.size(); ++i) {
        EXPECT_TRUE(world.reads(owners[i], 100 + i, kinds[i % kinds.size()])) << "storage " << i;
        EXPECT_GT(done.load(), i);
    }
    writer.join();
    drop_all(world, owners);
}

// Goal: what only looks at shapes, and what nobody is to write, waits for nothing; what writes
// without a named kernel waits.
TEST(PagerPendingTest, OnlyUsesOfBytesWait) {
    PagerWorld world;
    FakeOwner* written = world.make(kBlock, 1);
    FakeOwner* other = world.make(kBlock, 2);
    const StoragePtr write = world.pager.announce_write(written);
    world.use(written, UseKind::kMetadata);
    EXPECT_TRUE(world.reads(other, 2, UseKind::kBringIn));
    std::atomic<size_t> done{0};
    std::thread writer = writer_of(world, {written}, {write}, &done);
    world.use(written, UseKind::kMetadata, /*writes=*/true);
    EXPECT_EQ(done.load(), 1u);
    writer.join();
    world.port.drop(written);
    world.port.drop(other);
    world.expect_nothing_left();
}

// Goal: a storage that waits to be written may leave and come back, and loses nothing. Method: it
// is evicted before and after, and in between its write is made where it is.
TEST(PagerPendingTest, PendingStorageMayMove) {
    PagerWorld world;
    FakeOwner* owner = world.make(kBlock, 1);
    const StoragePtr write = world.pager.announce_write(owner);
    EXPECT_EQ(world.pager.evict_all(), kBlock);
    EXPECT_TRUE(world.is_cold(owner));
    std::atomic<size_t> done{0};
    std::thread writer = writer_of(world, {owner}, {write}, &done);
    EXPECT_TRUE(world.reads(owner, 100, UseKind::kBringIn));
    EXPECT_TRUE(world.is_resident(owner));
    writer.join();
    world.port.drop(owner);
    world.expect_nothing_left();
}

// Goal: several writes may be announced, and memory given away in the meantime does no harm.
TEST(PagerPendingTest, StorageIsFreedWhileWritesArePending) {
    PagerWorld world;
    FakeOwner* owner = world.make(kBlock, 1);
    const StoragePtr first = world.pager.announce_write(owner);
    const StoragePtr second = world.pager.announce_write(owner);
    world.port.drop(owner);
    world.pager.end_write(first, std::nullopt);
    world.pager.end_write(second, std::nullopt);
    world.expect_nothing_left();
}

// Goal: a capture begins with nothing pending.
TEST(PagerPendingTest, AllWritesAreWaitedForAtOnce) {
    PagerWorld world;
    const std::vector<FakeOwner*> owners{world.make(kBlock, 1), world.make(kBlock, 2)};
    const std::vector<StoragePtr> writes = announce(world, owners);
    std::atomic<size_t> done{0};
    std::thread writer = writer_of(world, owners, writes, &done);
    world.pager.wait_for_all_writes();
    EXPECT_EQ(done.load(), owners.size());
    writer.join();
    drop_all(world, owners);
}

// Goal: nothing may be left pending before a plan is in force.
TEST(PagerPendingTest, WithoutAPlanNothingIsLeftPending) {
    PagerWorld world;
    EXPECT_FALSE(world.pager.may_leave_pending());
}

// Goal: an update may wait only where its next use is sure to be seen.
TEST(PagerPendingTest, AnUpdateMayWaitOnlyWhereStoragesMoveAndNobodyHasAnAddress) {
    PagerWorld world;
    std::vector<FakeOwner*> owners{world.make(kBlock, 0), world.make(kBlock, 1)};
    EXPECT_FALSE(world.pager.may_defer({owners[0]})) << "nothing has moved yet";
    for (unsigned mark = 2; mark < 6; ++mark) {
        owners.push_back(world.make(kBlock, mark));
    }
    ASSERT_GT(world.pager.stats().evictions, 0u);
    EXPECT_TRUE(world.pager.may_defer({owners[0], owners[1]}));

    world.pager.pin_for_good(owners[1], 0);
    EXPECT_TRUE(world.pager.may_defer({owners[0]}));
    EXPECT_FALSE(world.pager.may_defer({owners[0], owners[1]})) << "an address was given out";

    world.pager.begin_unseen_step(0);
    EXPECT_FALSE(world.pager.may_defer({owners[0]})) << "kernels run that nobody announces";
    world.pager.end_unseen_step();
    EXPECT_TRUE(world.pager.may_defer({owners[0]}));

    world.pager.set_capturing(true);
    world.pager.set_capturing(false);
    EXPECT_FALSE(world.pager.may_defer({owners[0]})) << "a graph may be replayed at any time";
    drop_all(world, owners);
}

TEST(PagerPendingTest, AFailedUpdateRefusesAllThatIsAskedForAfterIt) {
    PagerWorld world;
    FakeOwner* owner = world.make(kBlock, 7);
    world.pager.stop_with(std::make_exception_ptr(errors::late_update_failed("the first")));
    world.pager.stop_with(std::make_exception_ptr(errors::late_update_failed("the second")));
    try {
        world.pager.allocate(kBlock, 0);
        ADD_FAILURE() << "it went on";
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("the first"), std::string::npos) << error.what();
    }
    EXPECT_TRUE(world.reads(owner, 7, UseKind::kInPlace));
    drop_all(world, {owner});
}

}  // namespace
}  // namespace trainstream
