// No test here asks how long something took or how fast it was: only that there is a rate.
#include "pager/hardware_profile.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>

#include "base/bytes.h"
#include "base/error.h"
#include "device/sim_device.h"
#include "device/sim_memory.h"
#include "pager/host_pool.h"
#include "support/in_child.h"

namespace trainstream {
namespace {

using testing::holds_in_child;
using Rates = std::map<std::string, double>;

ProfileOptions small_options() {
    return {.cores = 2,
            .time_budget_ns = 60'000'000,
            .host_copy_bytes_max = 8 * kMiB,
            .host_core_bytes_max = 8 * kMiB,
            .device_bytes_max = 8 * kMiB};
}

Rates copy_rates_of(const HardwareProfile& p) {
    Rates rates;
    const std::map<std::string, CopyRates> pairs = {{"alone", p.alone},
                                                    {"both", p.both},
                                                    {"beside_cores", p.beside_cores},
                                                    {"everything", p.everything},
                                                    {"copies_64_kib", p.copies_64_kib},
                                                    {"copies_1_mib", p.copies_1_mib}};
    for (const auto& [name, pair] : pairs) {
        rates[name + " to device"] = pair.to_device;
        rates[name + " to host"] = pair.to_host;
    }
    return rates;
}

Rates rates_of(const HardwareProfile& p) {
    Rates rates = copy_rates_of(p);
    rates["update"] = p.update_bytes_per_second;
    rates["update beside copies"] = p.update_beside_copies_bytes_per_second;
    rates["host memory"] = p.host_memory_bytes_per_second;
    rates["page lock"] = p.page_lock_bytes_per_second;
    return rates;
}

/// A simulated device; after each test all that was taken is back.
class HardwareProfileTest : public ::testing::Test {
protected:
    HardwareProfile measure(const ProfileOptions& options = small_options()) {
        return measure_hardware(device_, memory(), options);
    }
    SimMemory& memory() {
        if (!memory_) {
            memory_ = std::make_unique<SimMemory>(SimMemoryOptions{budget_bytes_});
        }
        return *memory_;
    }
    void TearDown() override {
        EXPECT_EQ(device_.locked_bytes(), 0u);
        EXPECT_EQ(memory().used_bytes(), 0u);
    }

    uint64_t budget_bytes_ = 64 * kMiB;
    SimDevice device_;

private:
    std::unique_ptr<SimMemory> memory_;
};

TEST_F(HardwareProfileTest, EveryRateIsPositiveAndFinite) {
    const HardwareProfile profile = measure();
    for (const auto& [name, rate] : rates_of(profile)) {
        EXPECT_TRUE(std::isfinite(rate)) << name;
        EXPECT_GT(rate, 0.0) << name;
    }
    EXPECT_TRUE(profile.notes.empty()) << profile.notes.front();
    EXPECT_EQ(profile.cores, 2u);
    EXPECT_GE(profile.large_copy_bytes, 64 * kKiB);
    EXPECT_LE(profile.large_copy_bytes, 4 * kMiB);
}

// Goal: host memory's rate is the sum of all that uses it at once.
TEST_F(HardwareProfileTest, HostMemoryCountsTheBytesOfCoresAndCopies) {
    const HardwareProfile p = measure();
    EXPECT_DOUBLE_EQ(p.host_memory_bytes_per_second, p.everything.to_device + p.everything.to_host +
                                                         p.update_beside_copies_bytes_per_second);
}

TEST_F(HardwareProfileTest, MemoryIsThatOfTheDeviceAndTheHost) {
    const HardwareProfile profile = measure();
    EXPECT_EQ(profile.available.device_free_bytes, device_.memory_info().free_bytes);
    EXPECT_EQ(profile.available.device_total_bytes, device_.memory_info().total_bytes);
    EXPECT_GT(profile.available.host_bytes, 0u);
    EXPECT_EQ(profile.page_locked_bytes, 8 * kMiB);
    EXPECT_EQ(profile.page_lock_limit_bytes(), profile.available.host_bytes);
}

// Goal: a pool beside the profile keeps what it has. Method: one block is in use all the while.
TEST_F(HardwareProfileTest, HostPoolOfTheDeviceIsLeftAlone) {
    HostPool pool(device_, {.limit_bytes = 32 * kMiB, .grow_in_background = false});
    const std::optional<HostBlock> block = pool.allocate(3 * kMiB);
    ASSERT_TRUE(block.has_value());
    const HostPoolStats before = pool.stats();
    const uint64_t locked_bytes = device_.locked_bytes();

    measure();

    EXPECT_EQ(pool.stats().in_use_bytes, before.in_use_bytes);
    EXPECT_EQ(pool.stats().locked_bytes, before.locked_bytes);
    EXPECT_EQ(device_.locked_bytes(), locked_bytes);
    pool.free(*block, {});
}

TEST_F(HardwareProfileTest, RefusedPageLocksAreTheLimit) {
    device_.set_faults({.page_lock_limit_bytes = 5 * kMiB});
    const HardwareProfile profile = measure();
    EXPECT_EQ(profile.page_locked_bytes, 5 * kMiB);
    EXPECT_EQ(profile.page_lock_limit_bytes(), 5 * kMiB);
    EXPECT_NE(profile.page_lock_refusal, "");
    EXPECT_EQ(profile.notes.size(), 1u);
    EXPECT_GT(profile.alone.to_device, 0.0);
}

TEST_F(HardwareProfileTest, WithoutPageLocksPageableCopiesAreMeasured) {
    device_.set_faults({.page_lock_limit_bytes = 0});
    const HardwareProfile profile = measure();
    EXPECT_EQ(profile.page_lock_limit_bytes(), 0u);
    EXPECT_EQ(profile.page_lock_bytes_per_second, 0.0);
    for (const auto& [name, rate] : copy_rates_of(profile)) {
        EXPECT_GT(rate, 0.0) << name;
    }
}

// Goal: a full device is measured as far as it goes. Method: room for 128 KiB a direction, so that
// copies of 1 MiB have none; a note says so.
TEST_F(HardwareProfileTest, LittleDeviceMemoryMeasuresWhatFits) {
    budget_bytes_ = 300 * kKiB;
    const HardwareProfile profile = measure();
    EXPECT_LE(profile.large_copy_bytes, 128 * kKiB);
    EXPECT_GE(profile.large_copy_bytes, 64 * kKiB);
    EXPECT_GT(profile.alone.to_host, 0.0);
    EXPECT_GT(profile.copies_64_kib.to_device, 0.0);
    EXPECT_EQ(profile.copies_1_mib.to_device, 0.0);
    EXPECT_FALSE(profile.notes.empty());
}

TEST_F(HardwareProfileTest, WithoutDeviceMemoryTheCoresAreMeasured) {
    budget_bytes_ = 4 * kKiB;
    const HardwareProfile profile = measure();
    for (const auto& [name, rate] : copy_rates_of(profile)) {
        EXPECT_EQ(rate, 0.0) << name;
    }
    EXPECT_GT(profile.update_bytes_per_second, 0.0);
    EXPECT_GT(profile.page_lock_bytes_per_second, 0.0);
    EXPECT_FALSE(profile.notes.empty());
}

// Goal: copies that fail cost the numbers that need them, nothing else. Method: all fail.
TEST_F(HardwareProfileTest, FailedCopiesAreNotedAndTheRestIsMeasured) {
    device_.set_faults({.fail_copy_one_in = 1});
    const HardwareProfile profile = measure();
    for (const auto& [name, rate] : copy_rates_of(profile)) {
        EXPECT_EQ(rate, 0.0) << name;
    }
    EXPECT_GT(profile.update_bytes_per_second, 0.0);
    ASSERT_FALSE(profile.notes.empty());
    EXPECT_NE(profile.notes.front().find("a fault was asked for"), std::string::npos);
}

// Goal: a copy that fails amid others leaves nothing under way. Method: some fail, and copies take
// a while; the memory is gone right after (ASan).
TEST_F(HardwareProfileTest, SomeFailedCopiesLeaveNothingUnderWay) {
    device_.set_faults({.fail_copy_one_in = 40});
    const HardwareProfile profile = measure();
    for (const auto& [name, rate] : rates_of(profile)) {
        EXPECT_TRUE(std::isfinite(rate)) << name;
        EXPECT_GE(rate, 0.0) << name;
    }
}

// Goal: a slow link is measured with copies that it can do in the time.
TEST_F(HardwareProfileTest, SlowLinkHasSmallerLargeCopies) {
    SimDevice slow(
        {.to_host_bytes_per_second = 200 * kMiB, .to_device_bytes_per_second = 200 * kMiB});
    const HardwareProfile profile = measure_hardware(slow, memory(), small_options());
    EXPECT_LT(profile.large_copy_bytes, 4 * kMiB);
    EXPECT_GT(profile.alone.to_device, 0.0);
    EXPECT_TRUE(profile.notes.empty());
}

// Goal: a rate that may be a cache's is said to be so. Method: caches larger than the memory.
TEST_F(HardwareProfileTest, LargeCachesAreNoted) {
    ProfileOptions options = small_options();
    options.cache_bytes = options.host_core_bytes_max + 1;
    const HardwareProfile profile = measure(options);
    ASSERT_EQ(profile.notes.size(), 1u);
    EXPECT_NE(profile.notes.front().find("caches"), std::string::npos);
    EXPECT_GT(profile.update_bytes_per_second, 0.0);
}

TEST_F(HardwareProfileTest, CaptureIsRefused) {
    device_.set_capturing(true);
    EXPECT_THROW(measure(), Error);
    device_.set_capturing(false);
}

// Goal: a forked child can measure too. Method: the parent has used the device before.
TEST_F(HardwareProfileTest, MeasuresInAForkedChild) {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "ThreadSanitizer allows no threads in a child";
#endif
    measure();
    EXPECT_TRUE(holds_in_child([&] { return measure().alone.to_device > 0; }));
}

}  // namespace
}  // namespace trainstream
