#include "pager/profile_buffers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "base/bytes.h"
#include "device/sim_device.h"
#include "device/sim_memory.h"

namespace trainstream {
namespace {

constexpr CopyDirection kBoth[] = {CopyDirection::kToDevice, CopyDirection::kToHost};

class ProfileBuffersTest : public ::testing::Test {
protected:
    void take(const ProfileBufferSizes& sizes, uint64_t budget_bytes = 64 * kMiB) {
        buffers_.reset();  // It gives back to the memory that is replaced.
        memory_ = std::make_unique<SimMemory>(SimMemoryOptions{budget_bytes});
        buffers_.emplace(device_, *memory_, StreamId{0}, sizes);
    }
    void TearDown() override {
        buffers_.reset();
        EXPECT_EQ(device_.locked_bytes(), 0u);
        EXPECT_EQ(memory_->used_bytes(), 0u);
    }
    /// Whether the device accepts a copy of all that a direction has.
    bool copies(CopyDirection direction) {
        const CopyPlaces places = buffers_->places(direction);
        const size_t bytes = std::min(places.host_bytes, places.device_bytes);
        const bool to_host = direction == CopyDirection::kToHost;
        std::byte* const target = to_host ? places.host : places.device;
        device_.copy(direction, target, to_host ? places.device : places.host, bytes, {})->wait();
        return bytes > 0;
    }

    SimDevice device_;
    std::unique_ptr<SimMemory> memory_;
    std::optional<ProfileBuffers> buffers_;
};

TEST_F(ProfileBuffersTest, TakesWhatWasAskedFor) {
    take({.copy_bytes = 16 * kMiB, .core_bytes = 16 * kMiB, .device_bytes = 8 * kMiB});
    for (const CopyDirection direction : kBoth) {
        EXPECT_EQ(buffers_->places(direction).host_bytes, 8 * kMiB);
        EXPECT_EQ(buffers_->places(direction).device_bytes, 4 * kMiB);
        EXPECT_TRUE(copies(direction));
    }
    EXPECT_EQ(buffers_->for_cores().size(), 16 * kMiB);
    EXPECT_EQ(buffers_->page_locked_bytes(), 16 * kMiB);
    EXPECT_EQ(device_.locked_bytes(), 16 * kMiB);
    EXPECT_GT(buffers_->page_lock_bytes_per_second(), 0.0);
    EXPECT_EQ(buffers_->page_lock_refusal(), "");
    EXPECT_TRUE(buffers_->notes().empty());
}

// Goal: nothing overlaps. Method: each part is written with a number of its own, then read.
TEST_F(ProfileBuffersTest, PartsDoNotOverlap) {
    take({.copy_bytes = 8 * kMiB, .core_bytes = 8 * kMiB, .device_bytes = 4 * kMiB});
    const CopyPlaces to_device = buffers_->places(CopyDirection::kToDevice);
    const CopyPlaces to_host = buffers_->places(CopyDirection::kToHost);
    const std::span<std::byte> parts[] = {{to_device.host, to_device.host_bytes},
                                          {to_device.device, to_device.device_bytes},
                                          {to_host.host, to_host.host_bytes},
                                          {to_host.device, to_host.device_bytes},
                                          buffers_->for_cores()};
    unsigned char number = 0;
    for (const std::span<std::byte>& part : parts) {
        std::fill(part.begin(), part.end(), std::byte{++number});
    }
    number = 0;
    for (const std::span<std::byte>& part : parts) {
        ++number;
        EXPECT_TRUE(std::all_of(part.begin(), part.end(),
                                [&](std::byte value) { return value == std::byte{number}; }));
    }
}

// Goal: a limit on page locks is found, to a MiB, and copies stay within one locked range.
TEST_F(ProfileBuffersTest, LimitOfPageLocksIsFound) {
    device_.set_faults({.page_lock_limit_bytes = 11 * kMiB + 5});
    take({.copy_bytes = 16 * kMiB, .core_bytes = 16 * kMiB, .device_bytes = 8 * kMiB});
    EXPECT_EQ(buffers_->page_locked_bytes(), 11 * kMiB);
    EXPECT_NE(buffers_->page_lock_refusal().find("simulated limit"), std::string::npos);
    EXPECT_EQ(buffers_->places(CopyDirection::kToHost).host_bytes, 4 * kMiB);
    EXPECT_TRUE(copies(CopyDirection::kToDevice));
    EXPECT_TRUE(copies(CopyDirection::kToHost));
    EXPECT_GT(buffers_->page_lock_bytes_per_second(), 0.0);
    EXPECT_EQ(buffers_->notes().size(), 1u);
}

TEST_F(ProfileBuffersTest, WithoutAnyPageLockMemoryIsPageable) {
    device_.set_faults({.page_lock_limit_bytes = 0});
    take({.copy_bytes = 16 * kMiB, .core_bytes = 16 * kMiB, .device_bytes = 8 * kMiB});
    EXPECT_EQ(buffers_->page_locked_bytes(), 0u);
    EXPECT_EQ(buffers_->page_lock_bytes_per_second(), 0.0);
    EXPECT_EQ(buffers_->places(CopyDirection::kToDevice).host_bytes, 8 * kMiB);
    EXPECT_TRUE(copies(CopyDirection::kToDevice));
    EXPECT_TRUE(copies(CopyDirection::kToHost));
    ASSERT_EQ(buffers_->notes().size(), 1u);
    EXPECT_NE(buffers_->notes().front().find("pageable"), std::string::npos);
}

// Goal: a device that is nearly full is used as far as it goes. Method: 3 MiB are free of 64.
TEST_F(ProfileBuffersTest, LittleDeviceMemoryGivesSmallerBlocks) {
    take({.copy_bytes = 16 * kMiB, .core_bytes = 16 * kMiB, .device_bytes = 64 * kMiB}, 3 * kMiB);
    EXPECT_EQ(buffers_->places(CopyDirection::kToDevice).device_bytes, kMiB);
    EXPECT_EQ(buffers_->places(CopyDirection::kToHost).device_bytes, kMiB);
    EXPECT_TRUE(copies(CopyDirection::kToHost));
    EXPECT_EQ(buffers_->notes().size(), 1u);
}

TEST_F(ProfileBuffersTest, WithoutDeviceMemoryThereAreNoPlaces) {
    take({.copy_bytes = 8 * kMiB, .core_bytes = 8 * kMiB, .device_bytes = 16 * kMiB}, 64 * kKiB);
    for (const CopyDirection direction : kBoth) {
        EXPECT_EQ(buffers_->places(direction).device_bytes, 0u);
    }
    EXPECT_EQ(buffers_->for_cores().size(), 8 * kMiB);
    EXPECT_EQ(buffers_->notes().size(), 1u);
}

// Goal: a machine that has little memory left keeps most of it. Method: 64 MiB are said to be
// there.
TEST_F(ProfileBuffersTest, HostMemoryIsAShareOfWhatIsThere) {
    take({.copy_bytes = 16 * kMiB,
          .core_bytes = 16 * kMiB,
          .device_bytes = 4 * kMiB,
          .available_host_bytes = 64 * kMiB + 3});
    EXPECT_EQ(buffers_->page_locked_bytes(), 4 * kMiB);
    EXPECT_EQ(buffers_->for_cores().size(), 4 * kMiB);
    EXPECT_EQ(buffers_->notes().size(), 1u);
}

// Goal: the cores' memory has a size of its own, and all of it can be written.
TEST_F(ProfileBuffersTest, CoresHaveASizeOfTheirOwn) {
    take({.copy_bytes = 4 * kMiB, .core_bytes = 70 * kMiB, .device_bytes = 4 * kMiB});
    EXPECT_EQ(buffers_->page_locked_bytes(), 4 * kMiB);
    ASSERT_EQ(buffers_->for_cores().size(), 70 * kMiB);
    buffers_->for_cores().front() = buffers_->for_cores().back() = std::byte{1};
    EXPECT_TRUE(buffers_->notes().empty());
}

// Goal: what copies do not need of the share is the cores'. Method: 16 MiB are the share.
TEST_F(ProfileBuffersTest, CoresHaveTheRestOfTheShare) {
    take({.copy_bytes = 2 * kMiB,
          .core_bytes = 32 * kMiB,
          .device_bytes = 4 * kMiB,
          .available_host_bytes = 128 * kMiB});
    EXPECT_EQ(buffers_->page_locked_bytes(), 2 * kMiB);
    EXPECT_EQ(buffers_->for_cores().size(), 14 * kMiB);
    ASSERT_EQ(buffers_->notes().size(), 1u);
    EXPECT_NE(buffers_->notes().front().find("16.00 MiB of it was used instead of 34.00 MiB"),
              std::string::npos);
}

// Goal: the cores are measured without memory for copies, and the other way round.
TEST_F(ProfileBuffersTest, EitherKindDoesWithoutTheOther) {
    take({.copy_bytes = 0, .core_bytes = 4 * kMiB, .device_bytes = 4 * kMiB});
    EXPECT_EQ(buffers_->for_cores().size(), 4 * kMiB);
    EXPECT_EQ(buffers_->places(CopyDirection::kToHost).host_bytes, 0u);
    take({.copy_bytes = 4 * kMiB, .core_bytes = 0, .device_bytes = 4 * kMiB});
    EXPECT_TRUE(buffers_->for_cores().empty());
    EXPECT_TRUE(copies(CopyDirection::kToHost));
}

// Goal: memory that caches hold is said to be so, and memory as large as they are is not.
TEST_F(ProfileBuffersTest, LessMemoryThanCachesIsNoted) {
    ProfileBufferSizes sizes = {
        .copy_bytes = 4 * kMiB, .core_bytes = 8 * kMiB, .device_bytes = 4 * kMiB};
    sizes.cache_bytes = 8 * kMiB;
    take(sizes);
    EXPECT_TRUE(buffers_->notes().empty());
    sizes.cache_bytes = 9 * kMiB;
    take(sizes);
    ASSERT_EQ(buffers_->notes().size(), 1u);
    EXPECT_NE(buffers_->notes().front().find("9.00 MiB of caches"), std::string::npos);
}

// Goal: slow memory does not take the measurements' time. Method: there is none left at all, so
// that only the first step is taken.
TEST_F(ProfileBuffersTest, SlowMemoryIsTakenInPart) {
    take({.copy_bytes = 4 * kMiB,
          .core_bytes = 70 * kMiB,
          .device_bytes = 4 * kMiB,
          .touch_until = std::chrono::steady_clock::time_point::min()});
    EXPECT_EQ(buffers_->for_cores().size(), 64 * kMiB);
    ASSERT_EQ(buffers_->notes().size(), 1u);
    EXPECT_NE(buffers_->notes().front().find("64.00 MiB instead of 70.00 MiB"), std::string::npos);
}

TEST(CoreBytesTest, IsThreeTimesTheCachesWithinBounds) {
    EXPECT_EQ(core_bytes_for(0), 256 * kMiB);
    EXPECT_EQ(core_bytes_for(32 * kMiB), 256 * kMiB);
    EXPECT_EQ(core_bytes_for(105 * kMiB), 315 * kMiB);
    EXPECT_EQ(core_bytes_for(480 * kMiB), kGiB);
    EXPECT_EQ(core_bytes_for(UINT64_MAX), kGiB);
}

TEST_F(ProfileBuffersTest, WithoutHostMemoryThereIsNothing) {
    take({.copy_bytes = 16 * kMiB,
          .core_bytes = 16 * kMiB,
          .device_bytes = 4 * kMiB,
          .available_host_bytes = 4 * kMiB});
    EXPECT_EQ(buffers_->places(CopyDirection::kToHost).host_bytes, 0u);
    EXPECT_TRUE(buffers_->for_cores().empty());
    EXPECT_EQ(buffers_->notes().size(), 1u);
}

}  // namespace
}  // namespace trainstream
