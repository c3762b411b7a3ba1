// What every Device and its DeviceMemory promise (csrc/device/device.h, device_memory.h).
//
// The simulation always runs it; CUDA when it is compiled in (TS_WITH_CUDA) and a GPU answers.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "device/device_memory.h"
#include "device/sim_device.h"
#include "device/sim_memory.h"
#include "support/manual_event.h"
#ifdef TS_WITH_CUDA
#include "device/cuda_device.h"
#include "device/cuda_memory.h"
#endif

namespace trainstream {
namespace {

using testing::ManualEvent;
using Bytes = std::vector<unsigned char>;

constexpr uint64_t kBudget = 64 * kMiB;
constexpr size_t kSize = 3 * kMiB + 512;

struct DeviceUnderTest {
    std::unique_ptr<Device> device;
    std::unique_ptr<DeviceMemory> memory;
    std::string missing;  // Why there is none here.
};

struct DeviceKind {
    const char* name;
    std::function<DeviceUnderTest()> open;
};

DeviceUnderTest open_sim() {
    return {
        std::make_unique<SimDevice>(SimDeviceOptions{.seed = 11, .copy_latency_ns_max = 100'000}),
        std::make_unique<SimMemory>(SimMemoryOptions{.budget_bytes = kBudget}), ""};
}

DeviceUnderTest open_cuda() {
#ifdef TS_WITH_CUDA
    std::string reason;
    if (CudaDevice::count(&reason) == 0) {
        return {nullptr, nullptr, reason};
    }
    return {std::make_unique<CudaDevice>(0), std::make_unique<CudaMemory>(0, kBudget), ""};
#else
    return {nullptr, nullptr, "built without CUDA"};
#endif
}

class DeviceContractTest : public ::testing::TestWithParam<DeviceKind> {
protected:
    void SetUp() override {
        open_ = GetParam().open();
        if (!open_.device) {
            GTEST_SKIP() << GetParam().name << ": " << open_.missing;
        }
    }

    Device& device() { return *open_.device; }
    DeviceMemory& memory() { return *open_.memory; }

    void* make_block(size_t size_bytes) {
        void* const block = memory().allocate(size_bytes, 0);
        EXPECT_NE(block, nullptr);
        return block;
    }

    Event to_device(void* target, const Bytes& source, const std::vector<Event>& after = {}) {
        return device().copy(CopyDirection::kToDevice, target, source.data(), source.size(), after);
    }

    Event to_host(Bytes& target, const void* source, const std::vector<Event>& after = {}) {
        return device().copy(CopyDirection::kToHost, target.data(), source, target.size(), after);
    }

private:
    DeviceUnderTest open_;
};

Bytes pattern(size_t size_bytes, unsigned seed) {
    Bytes bytes(size_bytes);
    for (size_t i = 0; i < size_bytes; ++i) {
        bytes[i] = static_cast<unsigned char>((i * 31 + i / 257 + seed) & 0xFF);
    }
    return bytes;
}

TEST_P(DeviceContractTest, MarksKnowTheTimeBetweenThem) {
    const Event before = device().mark(0);
    const Bytes source(8 * kMiB, 1);
    void* const block = make_block(source.size());
    device().wait(0, to_device(block, source));
    const Event after = device().mark(0);
    after->wait();
    ASSERT_TRUE(before->is_done());
    EXPECT_GT(device().ns_between(before, after), 0u);
    EXPECT_EQ(device().ns_between(after, before), 0u);
    EXPECT_EQ(device().ns_between(before, before), 0u);
    memory().free(block);
}

TEST_P(DeviceContractTest, CopyThereAndBackKeepsEveryByte) {
    const Bytes from = pattern(kSize, 1);
    Bytes back(kSize);
    void* const block = make_block(kSize);

    const Event there = to_device(block, from);
    to_host(back, block, {there})->wait();

    EXPECT_EQ(back, from);
    EXPECT_TRUE(there->is_done());
    memory().free(block);
}

// Goal: copies of one direction keep their order. Method: many to one block; the last must stay.
TEST_P(DeviceContractTest, CopiesOfOneDirectionRunInOrder) {
    void* const block = make_block(kSize);
    std::vector<Bytes> sources;
    for (unsigned i = 0; i < 8; ++i) {
        sources.push_back(pattern(kSize, i));
    }
    Event last;
    for (const Bytes& source : sources) {
        last = to_device(block, source);
    }
    Bytes back(kSize);
    to_host(back, block, {last})->wait();

    EXPECT_EQ(back, sources.back());
    memory().free(block);
}

// Goal: a copy starts after every event it was given, of whatever kind; null counts as done.
// Method: the source gets its bytes just before the event, from another thread.
TEST_P(DeviceContractTest, CopyStartsAfterAForeignEvent) {
    const Bytes right = pattern(kSize, 5);
    Bytes from(kSize, 0);
    void* const block = make_block(kSize);
    const auto gate = std::make_shared<ManualEvent>();
    std::thread writer([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        std::memcpy(from.data(), right.data(), kSize);
        gate->finish();
    });

    const Event there = to_device(block, from, {nullptr, gate});
    Bytes back(kSize);
    to_host(back, block, {there, nullptr})->wait();

    writer.join();
    EXPECT_EQ(back, right);
    memory().free(block);
}

// Goal: work given to a stream after wait() comes after the event.
TEST_P(DeviceContractTest, StreamReachesARecordedPointOnlyAfterWhatItWaitedFor) {
    const Bytes from = pattern(kSize, 6);
    void* const block = make_block(kSize);
    const Event there = to_device(block, from);

    device().wait(0, there);
    device().wait(0, nullptr);
    if (const Event point = device().record(0)) {
        point->wait();
    }

    EXPECT_TRUE(there->is_done());
    memory().free(block);
}

TEST_P(DeviceContractTest, EventOnceDoneStaysDone) {
    const Bytes from = pattern(512, 7);
    void* const block = make_block(512);
    const Event there = to_device(block, from);
    there->wait();
    EXPECT_TRUE(there->is_done());
    for (int i = 0; i < 100; ++i) {  // Any reuse of the runtime's events shows here.
        to_device(block, from);
    }
    EXPECT_TRUE(there->is_done());
    to_device(block, from)->wait();
    memory().free(block);
}

// Goal: a refusal is only an answer. Method: lock a range twice; then use it and the device.
TEST_P(DeviceContractTest, RefusedPageLockLeavesNoErrorBehind) {
    constexpr size_t kRange = 4 * kMiB;
    auto* const range = static_cast<unsigned char*>(std::aligned_alloc(4 * kKiB, kRange));
    std::memset(range, 0x3C, kRange);
    std::string reason;
    ASSERT_TRUE(device().page_lock(range, kRange, &reason)) << reason;

    EXPECT_FALSE(device().page_lock(range, kRange, &reason));
    EXPECT_FALSE(reason.empty());

    void* const block = make_block(kRange);
    device().copy(CopyDirection::kToDevice, block, range, kRange, {})->wait();
    Bytes back(kRange);
    to_host(back, block)->wait();
    EXPECT_EQ(back, Bytes(kRange, 0x3C));
    device().page_unlock(range);
    EXPECT_TRUE(device().page_lock(range, kRange, &reason)) << reason;
    device().page_unlock(range);
    memory().free(block);
    std::free(range);
}

// Goal: the totals are those of the copies that are done. Method: known sizes both ways.
TEST_P(DeviceContractTest, CopyStatsCountWhatWasCopied) {
    const Bytes from = pattern(kSize, 9);
    Bytes back(512);
    void* const block = make_block(kSize);
    const CopyStats before = device().copy_stats();
    const Event there = to_device(block, from);
    to_host(back, block, {there})->wait();

    const CopyStats after = device().copy_stats();

    EXPECT_EQ(after.to_device_bytes - before.to_device_bytes, kSize);
    EXPECT_EQ(after.to_host_bytes - before.to_host_bytes, 512u);
    EXPECT_GT(after.busy_ns, before.busy_ns);
    memory().free(block);
}

TEST_P(DeviceContractTest, MemoryInfoIsOfARealSize) {
    const MemoryInfo info = device().memory_info();
    EXPECT_GT(info.free_bytes, 0u);
    EXPECT_GE(info.total_bytes, info.free_bytes);
    EXPECT_FALSE(device().is_capturing(0));
    EXPECT_GE(device().numa_node(), -1);
}

// Goal: every call may come from every thread. Method: each has its own block and bytes.
TEST_P(DeviceContractTest, ThreadsCopyAtOnce) {
    const auto walk = [this](unsigned seed) {
        constexpr size_t kBlock = 64 * kKiB;
        void* const block = make_block(kBlock);
        for (unsigned round = 0; round < 20; ++round) {
            const Bytes from = pattern(kBlock, seed * 100 + round);
            Bytes back(kBlock);
            const Event there = to_device(block, from, {device().record(0)});
            to_host(back, block, {there})->wait();
            EXPECT_EQ(back, from);
        }
        memory().free(block);
    };
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
        threads.emplace_back(walk, seed);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}

TEST_P(DeviceContractTest, BlocksAreAlignedAndWithinTheBudget) {
    EXPECT_EQ(memory().budget_bytes(), kBudget);
    EXPECT_EQ(memory().allocate(kBudget + 1, 0), nullptr);
    void* const small = make_block(1);
    void* const large = make_block(kBudget / 2);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(small) % kBlockAlignment, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(large) % kBlockAlignment, 0u);
    EXPECT_EQ(memory().allocate(kBudget / 2, 0), nullptr);
    EXPECT_GT(memory().peak_bytes(), kBudget / 2);
    EXPECT_LE(memory().peak_bytes(), kBudget);
    memory().free(small);
    memory().free(large);
    void* const all = make_block(kBudget);
    memory().free(all);
}

TEST_P(DeviceContractTest, BlocksAtTheHighEndAreBlocksLikeOthers) {
    void* const low = make_block(kBudget / 4);
    const std::vector<Region> regions = memory().regions(0);
    const Region gap = regions.empty() ? Region{} : regions.front();
    void* const high = memory().allocate_high(kBudget / 4, 0, gap);
    ASSERT_NE(high, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(high) % kBlockAlignment, 0u);
    EXPECT_EQ(memory().allocate_high(kBudget, 0, gap), nullptr);
    void* const middle = make_block(kBudget / 2);
    if (!regions.empty()) {
        EXPECT_EQ(reinterpret_cast<uintptr_t>(high) + kBudget / 4, regions.front().end);
        EXPECT_GT(high, middle);
    }
    for (void* block : {low, middle, high}) {
        memory().free(block);
    }
    memory().free(make_block(kBudget));
}

INSTANTIATE_TEST_SUITE_P(AllDevices, DeviceContractTest,
                         ::testing::Values(DeviceKind{"sim", open_sim},
                                           DeviceKind{"cuda", open_cuda}),
                         [](const auto& kind) { return kind.param.name; });

}  // namespace
}  // namespace trainstream
