#include "pager/copy_flow.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "device/sim_device.h"

namespace trainstream {
namespace {

/// Both sides of a link, filled with different bytes.
struct Sides {
    std::vector<std::byte> host = std::vector<std::byte>(kMiB, std::byte{0x11});
    std::vector<std::byte> device = std::vector<std::byte>(256 * kKiB, std::byte{0x22});
    CopyPlaces places() { return {host.data(), host.size(), device.data(), device.size()}; }
};

TEST(CopyFlowTest, CountsWhatIsDoneAndKeepsTheRestUnderWay) {
    SimDevice device({.copy_latency_ns_max = 10'000});
    Sides sides;
    {
        CopyFlow flow(device, CopyDirection::kToDevice, sides.places(), 64 * kKiB, 4);
        EXPECT_EQ(flow.done_bytes(), 0u);
        uint64_t before = 0;
        for (int i = 0; i < 20; ++i) {
            flow.advance();
            EXPECT_GE(flow.done_bytes(), before + 64 * kKiB);
            before = flow.done_bytes();
        }
        EXPECT_EQ(before % (64 * kKiB), 0u);
    }
    const CopyStats stats = device.copy_stats();
    EXPECT_GE(stats.to_device_bytes, 20 * 64 * kKiB);
    EXPECT_EQ(stats.to_host_bytes, 0u);
    EXPECT_EQ(sides.device, std::vector<std::byte>(256 * kKiB, std::byte{0x11}));
}

// Goal: the source is spread over all of the memory. Method: as many copies as it holds.
TEST(CopyFlowTest, ToHostFillsAllOfTheHostsMemory) {
    SimDevice device;
    Sides sides;
    {
        CopyFlow flow(device, CopyDirection::kToHost, sides.places(), 128 * kKiB, 2);
        while (flow.done_bytes() < kMiB) {
            flow.advance();
        }
    }
    EXPECT_EQ(sides.host, std::vector<std::byte>(kMiB, std::byte{0x22}));
}

// Goal: a refused copy is the caller's to handle, and the others are done when the flow is gone.
// Method: of the copies under way every third fails; the memory may be freed afterwards (ASan).
TEST(CopyFlowTest, RefusedCopyThrowsAndTheOthersAreWaitedFor) {
    SimDevice device({.seed = 3, .copy_latency_ns_max = 100'000});
    device.set_faults({.fail_copy_one_in = 3});
    Sides sides;
    CopyFlow flow(device, CopyDirection::kToHost, sides.places(), 64 * kKiB, 8);
    EXPECT_THROW(
        {
            for (int i = 0; i < 100; ++i) {
                flow.advance();
            }
        },
        Error);
}

}  // namespace
}  // namespace trainstream
