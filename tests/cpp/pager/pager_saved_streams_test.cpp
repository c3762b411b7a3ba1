// What is saved for backward, on a device that computes asynchronously: its copies overlap with
// kernels, so a missing wait gives wrong bytes.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "support/async_world.h"

namespace trainstream {
namespace {

using testing::AsyncTensor;
using testing::AsyncWorld;
using testing::AsyncWorldOptions;
using testing::Content;
using testing::ManualEvent;
using testing::random_content;

constexpr size_t kActivation = 16 * kKiB;

/// A tensor that backward will read, and the reference that its graph holds.
struct SavedTensor {
    AsyncTensor tensor;
    StoragePtr storage;
};

/// Plays forward and backward on stream 1, whose pool has room for so many activations.
class SavedWorld {
public:
    explicit SavedWorld(size_t activations, AsyncWorldOptions options = {})
        : world(with_room(activations, options)) {}
    ~SavedWorld() {
        while (!saved.empty()) {
            drop_last();
        }
        world.expect_nothing_left();
    }
    SavedWorld(const SavedWorld&) = delete;
    SavedWorld& operator=(const SavedWorld&) = delete;

    AsyncTensor make(StreamId stream = 1) { return world.make(kActivation, stream, ++state_); }
    Content fresh() { return random_content(kActivation, ++state_); }

    /// The graph takes the script's reference over, as when a layer's frame ends.
    SavedTensor& save(const AsyncTensor& tensor) {
        const Save result = pager().save(tensor.owner);
        EXPECT_TRUE(result.may_spill);
        pager().spill(result.storage, /*by_need=*/false);
        saved.push_back({tensor, result.storage});
        return saved.back();
    }
    void drop_last() {
        pager().unsave(saved.back().storage);
        world.port.drop(saved.back().tensor.owner);
        saved.pop_back();
    }
    /// The copy has ended, and an operator ends after it.
    void let_leave() {
        world.finish_all();
        pager().boundary();
    }
    /// A kernel on stream 2 that runs once the gate is open, so that a copy has to wait for it too.
    std::shared_ptr<ManualEvent> use_late(AsyncTensor* tensor, Content after = nullptr) {
        world.device.wait(2, world.device.record(1));  // As a script orders what it wrote on 1.
        std::shared_ptr<ManualEvent> gate = world.hold_back(2);
        world.operate(tensor, 2, UseKind::kInPlace, std::move(after));
        return gate;
    }
    /// A cold activation whose load, once one begins, waits for the gate.
    std::shared_ptr<ManualEvent> gate_loads_of(SavedTensor& one) {
        std::shared_ptr<ManualEvent> gate = world.hold_back(2);
        world.operate(&one.tensor, 2, UseKind::kInPlace);
        EXPECT_FALSE(world.is_resident(one.tensor));
        return gate;
    }
    Pager& pager() { return world.pager; }

    AsyncWorld world;
    std::vector<SavedTensor> saved;

private:
    static AsyncWorldOptions with_room(size_t activations, AsyncWorldOptions options) {
        options.streams = 3;
        options.arena_bytes = activations * kActivation;
        return options;
    }
    uint64_t state_ = 0;
};

/// What does not wait for the gate has the time to go wrong before it opens.
void open_late(const std::shared_ptr<ManualEvent>& gate) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    gate->finish();
}

TEST(PagerSavedStreamsTest, ACopyWaitsForKernelsBeforeItAndNoStreamForTheCopy) {
    SavedWorld t(4);
    AsyncTensor x = t.make();
    const auto gate = t.use_late(&x, t.fresh());
    SavedTensor& saved = t.save(x);
    t.pager().boundary();
    EXPECT_EQ(t.pager().stats().spilled_bytes, kActivation);
    EXPECT_TRUE(t.world.is_resident(saved.tensor)) << "it left before its copy had ended";
    AsyncTensor other = t.make();
    t.world.launch_on(&other, 1)->wait();  // Forever, if stream 1 waited for the copy.
    t.pager().boundary();
    EXPECT_TRUE(t.world.is_resident(saved.tensor));
    open_late(gate);
    t.let_leave();
    EXPECT_FALSE(t.world.is_resident(saved.tensor));
    t.world.operate(&saved.tensor, 1, UseKind::kBringIn);
    t.world.port.drop(other.owner);
}

TEST(PagerSavedStreamsTest, RoomThatIsNeededBeforeTheCopyHasEndedIsUsedAfterIt) {
    SavedWorld t(3);
    AsyncTensor older = t.make();
    AsyncTensor x = t.make();
    const auto gate = t.use_late(&x);
    SavedTensor& saved = t.save(x);
    t.pager().boundary();
    std::vector<AsyncTensor> others{t.make(), t.make()};
    EXPECT_FALSE(t.world.is_resident(saved.tensor));
    EXPECT_TRUE(t.world.is_resident(older)) << "what is leaving anyway is the coldest";
    others.push_back(older);
    t.world.operate(&saved.tensor, 3, UseKind::kInPlace);
    open_late(gate);
    for (AsyncTensor& other : others) {
        t.world.operate(&other, 1, UseKind::kBringIn);
        t.world.port.drop(other.owner);
    }
}

TEST(PagerSavedStreamsTest, AHostFarAheadHasOnlySoMuchOnItsWay) {
    SavedWorld t(6);
    AsyncTensor x = t.make();
    const auto gate = t.use_late(&x);
    t.save(x);
    for (int i = 0; i < 3; ++i) {
        t.save(t.make());
        t.pager().boundary();
    }
    // Their copies are behind the gate, all of them; the last may still be on its way.
    for (size_t i = 0; i < t.saved.size(); ++i) {
        EXPECT_EQ(t.world.is_resident(t.saved[i].tensor), i + 1 == t.saved.size()) << i;
    }
    std::vector<AsyncTensor> others;
    for (int i = 0; i < 4; ++i) {
        others.push_back(t.make());  // Where they were.
    }
    open_late(gate);
    for (SavedTensor& saved : t.saved) {
        // A script orders stream 3 after what stream 1 wrote last, which never left.
        const bool left = !t.world.is_resident(saved.tensor);
        t.world.operate(&saved.tensor, left ? 3 : 1, UseKind::kInPlace);
    }
    for (AsyncTensor& other : others) {
        t.world.operate(&other, 1, UseKind::kInPlace);
        t.world.port.drop(other.owner);
    }
}

TEST(PagerSavedStreamsTest, BlocksFreedDuringTheCopyAreReusedAfterIt) {
    SavedWorld t(2);
    AsyncTensor x = t.make();
    const auto gate = t.use_late(&x);
    t.save(x);
    t.pager().boundary();
    t.drop_last();  // A graph that nobody needs any more.
    // Its device block goes to one of these; the other one's bytes go to its host block.
    std::vector<AsyncTensor> others{t.make(), t.make()};
    EXPECT_EQ(t.pager().evict_all(), 2 * kActivation);
    open_late(gate);
    t.world.finish_all();
    for (AsyncTensor& other : others) {
        t.world.operate(&other, 1, UseKind::kBringIn);
        t.world.port.drop(other.owner);
    }
}

TEST(PagerSavedStreamsTest, AHostBlockThatTheCopyStillFillsIsNobodyElses) {
    for (const bool freed : {false, true}) {
        SavedWorld t(1);
        AsyncTensor x = t.make();
        AsyncTensor rock = t.make(3);
        t.pager().pin_for_good(rock.owner, 3);
        const auto gate = t.use_late(&x);
        SavedTensor& saved = t.save(x);
        t.pager().boundary();
        if (freed) {
            t.drop_last();
        } else {
            t.pager().unpack(saved.storage, 1, {});
        }
        AsyncTensor born_cold = t.make(3);
        EXPECT_FALSE(t.world.is_resident(born_cold));
        t.world.launch_on(&born_cold, 3)->wait();
        open_late(gate);
        t.world.finish_all();
        t.world.operate(&born_cold, 3, UseKind::kInPlace);
        t.world.port.drop(born_cold.owner);
        t.world.port.drop(rock.owner);
    }
}

TEST(PagerSavedStreamsTest, AKernelThatNobodyAnnouncesFindsTheBytesAfterItsTensorIsUnpacked) {
    SavedWorld t(4);
    t.save(t.make());
    t.save(t.make());
    t.pager().boundary();
    t.let_leave();
    SavedTensor& x = t.saved[0];
    const auto gate = t.gate_loads_of(x);
    t.pager().unpack(t.saved[1].storage, 1, {x.storage});
    EXPECT_TRUE(t.world.is_resident(x.tensor));
    EXPECT_EQ(t.pager().stats().returned_bytes, kActivation);
    AsyncTensor other = t.make();
    t.world.launch_on(&other, 1)->wait();  // Nor does a stream wait for this copy,
    t.pager().unpack(x.storage, 1, {});    // before the tensor is used.
    const Event done = t.world.launch_on(&x.tensor, 1, t.fresh());
    open_late(gate);
    done->wait();
    EXPECT_EQ(t.pager().evict_all(), 2 * kActivation) << "what it wrote is lost";
    t.world.operate(&x.tensor, 1, UseKind::kInPlace);
    t.world.port.drop(other.owner);
}

TEST(PagerSavedStreamsTest, WhatIsOnItsWayInMayLeaveOrBeFreed) {
    for (const bool freed : {false, true}) {
        SavedWorld t(1);
        t.save(t.make());
        t.pager().boundary();
        t.let_leave();
        SavedTensor& x = t.saved[0];
        const auto gate = t.gate_loads_of(x);
        AsyncTensor before = t.make();
        t.world.port.drop(before.owner);
        t.pager().unpack(x.storage, 1, {x.storage});
        ASSERT_TRUE(t.world.is_resident(x.tensor));
        if (freed) {
            t.drop_last();
        } else {
            EXPECT_EQ(t.pager().evict_all(), kActivation);
        }
        AsyncTensor other = t.make();  // Where the load is still to write.
        EXPECT_TRUE(t.world.is_resident(other));
        open_late(gate);
        t.world.finish_all();
        t.world.operate(&other, 1, UseKind::kInPlace);
        t.world.port.drop(other.owner);
    }
}

/// Layers save two activations each; the first is used again by the next layer. Backward unpacks in
/// reverse, and now and then in another order, twice, or not at all.
void forward_and_backward(SavedWorld& t, uint64_t seed, size_t layers) {
    AsyncTensor residual = t.make();
    for (size_t i = 0; i < layers; ++i) {
        const StreamId stream = 1 + (seed + i) % 2;
        AsyncTensor inner = t.make();
        t.world.finish_all();  // As a script that uses several streams would order them.
        t.world.operate(&inner, stream, UseKind::kBringIn, t.fresh());
        t.save(inner);
        t.world.finish_all();
        t.world.operate(&residual, 1, UseKind::kOnce);
        t.save(std::exchange(residual, t.make()));
    }
    t.world.port.drop(residual.owner);
    if (seed % 4 == 3) {
        return;  // An exception: the graph is dropped with no backward pass.
    }
    while (!t.saved.empty()) {
        std::vector<StoragePtr> next;
        for (size_t i = t.saved.size() - 1; i-- > 0 && next.size() < 3;) {
            next.push_back(t.saved[i].storage);
        }
        SavedTensor& last = t.saved.back();
        t.pager().unpack(last.storage, 1, next);
        t.world.operate(&last.tensor, 1, UseKind::kBringIn);
        if (seed % 3 == 0) {
            t.world.operate(&t.saved[t.saved.size() / 2].tensor, 1, UseKind::kOnce);
        }
        t.drop_last();
    }
}

TEST(PagerSavedStreamsTest, EveryKernelOfATrainingLoopFindsItsBytesWhateverFails) {
    for (uint64_t seed = 1; seed <= 6; ++seed) {
        AsyncWorldOptions options;
        options.seed = seed;
        options.delay_ns_max = 50'000;
        SavedWorld t(7, options);
        t.world.door.refuse_copy_one_in = seed % 2 == 0 ? 5 : 0;
        for (int step = 0; step < 3; ++step) {
            forward_and_backward(t, seed + step, 12);
            while (!t.saved.empty()) {
                t.drop_last();
            }
            t.pager().step_done();
        }
        const PagerStats stats = t.pager().stats();
        EXPECT_GT(stats.spilled_bytes, 0u);
        EXPECT_GT(stats.returned_bytes, 0u);
        EXPECT_EQ(stats.failures > 0, seed % 2 == 0);
    }
}

}  // namespace
}  // namespace trainstream
