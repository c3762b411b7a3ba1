#include "pager/host_limits.h"

#include <gtest/gtest.h>

#include "base/bytes.h"
#include "pager/host_pool.h"
#include "support/made_up_system.h"

namespace trainstream {
namespace {

class HostLimitsTest : public testing::MadeUpSystem {
protected:
    void SetUp() override { write("/proc/meminfo", "MemTotal: 4096 kB\nMemAvailable: 1600 kB\n"); }

    uint64_t available() const { return available_host_bytes_under(root()); }
};

// Goal: with no cgroup the system's own figure counts, less 1/16.
TEST_F(HostLimitsTest, WithoutCgroupsMemAvailableCounts) { EXPECT_EQ(available(), 1500 * kKiB); }

// Goal: the tightest cgroup above the process counts. Method: the parent is tighter than its child.
TEST_F(HostLimitsTest, ParentCgroupOfVersion2Limits) {
    write("/proc/self/cgroup", "0::/job/worker\n");
    write("/sys/fs/cgroup/job/worker/memory.max", "max\n");
    write("/sys/fs/cgroup/job/worker/memory.current", "1000\n");
    write("/sys/fs/cgroup/job/memory.max", "100000\n");
    write("/sys/fs/cgroup/job/memory.current", "40000\n");
    EXPECT_EQ(available(), 60000u - 60000 / 16);
}

// Goal: file cache that nobody uses is not counted as usage.
TEST_F(HostLimitsTest, IdleFileCacheIsNotUsage) {
    write("/proc/self/cgroup", "0::/\n");
    write("/sys/fs/cgroup/memory.max", "100000\n");
    write("/sys/fs/cgroup/memory.current", "90000\n");
    write("/sys/fs/cgroup/memory.stat", "anon 5\ninactive_file 70000\nactive_file 1\n");
    EXPECT_EQ(available(), 80000u - 80000 / 16);
}

// Goal: version 1 counts too, also where the path is the host's and the container sees only the
// root of its own.
TEST_F(HostLimitsTest, CgroupOfVersion1LimitsThroughAPathNotSeenHere) {
    write("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/12ab\n0::/\n");
    write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "50000\n");
    write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "20000\n");
    write("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file 10000\n");
    EXPECT_EQ(available(), 40000u - 40000 / 16);
}

TEST_F(HostLimitsTest, UsageBeyondTheLimitLeavesNothing) {
    write("/proc/self/cgroup", "0::/\n");
    write("/sys/fs/cgroup/memory.max", "1000\n");
    write("/sys/fs/cgroup/memory.current", "5000\n");
    EXPECT_EQ(available(), 0u);
}

TEST(AvailableHostBytesTest, ThisSystemHasSome) { EXPECT_GT(available_host_bytes(), kMiB); }

}  // namespace
}  // namespace trainstream
