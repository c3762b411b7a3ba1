#include "optim/usable_cores.h"

#include <sched.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>

#include "optim/worker_threads.h"
#include "support/in_child.h"
#include "support/made_up_system.h"

namespace trainstream::optim {
namespace {

class UsableCoresTest : public trainstream::testing::MadeUpSystem {
protected:
    size_t cores() const { return cgroup_cores_under(root()); }
};

TEST_F(UsableCoresTest, WithoutCgroupsThereIsNoQuota) { EXPECT_EQ(cores(), SIZE_MAX); }

// Goal: the tightest cgroup above the process counts, rounded up. Method: 2.5 cores in the parent.
TEST_F(UsableCoresTest, ParentCgroupOfVersion2Limits) {
    write("/proc/self/cgroup", "0::/job/worker\n");
    write("/sys/fs/cgroup/job/worker/cpu.max", "max 100000\n");
    write("/sys/fs/cgroup/job/cpu.max", "250000 100000\n");
    EXPECT_EQ(cores(), 3U);
}

TEST_F(UsableCoresTest, CgroupOfVersion1LimitsThroughAPathNotSeenHere) {
    write("/proc/self/cgroup", "5:cpuset:/x\n4:cpu,cpuacct:/docker/12ab\n0::/\n");
    write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000\n");
    write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    EXPECT_EQ(cores(), 4U);
    write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    EXPECT_EQ(cores(), SIZE_MAX);
}

TEST_F(UsableCoresTest, NonsenseIsNoQuota) {
    write("/proc/self/cgroup", "nonsense\n0::/\n");
    write("/sys/fs/cgroup/cpu.max", "0 0\n");
    EXPECT_EQ(cores(), SIZE_MAX);
    write("/sys/fs/cgroup/cpu.max", "100000");
    EXPECT_EQ(cores(), SIZE_MAX);
}

// Goal: the affinity mask counts; OMP_NUM_THREADS does not. Method: in a child, so that this
// process keeps its mask. A mask of two cores is tried where there are two.
TEST_F(UsableCoresTest, AffinityMaskCountsAndOmpNumThreadsDoesNot) {
    cpu_set_t mask;
    ASSERT_EQ(sched_getaffinity(0, sizeof mask, &mask), 0);
    const size_t before = usable_cores();
    EXPECT_TRUE(testing::holds_in_child([&] {
        setenv("OMP_NUM_THREADS", "1", 1);
        return usable_cores() == before && WorkerThreads().count() == before;
    }));
    for (int wanted = 1; wanted <= 2 && wanted <= CPU_COUNT(&mask); ++wanted) {
        EXPECT_TRUE(testing::holds_in_child([&] {
            cpu_set_t fewer;
            CPU_ZERO(&fewer);
            for (int core = 0; CPU_COUNT(&fewer) < wanted; ++core) {
                if (CPU_ISSET(core, &mask)) {
                    CPU_SET(core, &fewer);
                }
            }
            sched_setaffinity(0, sizeof fewer, &fewer);
            return WorkerThreads().count() == std::min(before, static_cast<size_t>(wanted));
        })) << wanted;
    }
}

}  // namespace
}  // namespace trainstream::optim
