#include "pager/host_caches.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/bytes.h"
#include "support/made_up_system.h"

namespace trainstream {
namespace {

struct Cache {
    std::string level;
    std::string type;
    std::string size;
    std::string sharers;
};

class HostCachesTest : public testing::MadeUpSystem {
protected:
    /// A CPU's caches, index0 on. What is "" is no file.
    void add_cpu(size_t cpu, const std::vector<Cache>& caches) {
        for (size_t index = 0; index < caches.size(); ++index) {
            const std::string directory = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                                          "/cache/index" + std::to_string(index) + "/";
            write_line(directory + "level", caches[index].level);
            write_line(directory + "type", caches[index].type);
            write_line(directory + "size", caches[index].size);
            write_line(directory + "shared_cpu_list", caches[index].sharers);
        }
    }
    uint64_t bytes(const std::vector<size_t>& cpus) const {
        return last_level_cache_bytes_under(root(), cpus);
    }

private:
    void write_line(const std::string& path, const std::string& text) {
        if (!text.empty()) {
            write(path, text + "\n");
        }
    }
};

const Cache kLevel1 = {"1", "Data", "48K", "0"};
const Cache kLevel1Code = {"1", "Instruction", "64K", "0"};
const Cache kLevel2 = {"2", "Unified", "2048K", "0"};

TEST_F(HostCachesTest, CacheThatCpusShareCountsOnce) {
    const Cache shared = {"3", "Unified", "491520K", "0-1"};
    add_cpu(0, {kLevel1, kLevel1Code, kLevel2, shared});
    add_cpu(1, {kLevel1, kLevel1Code, kLevel2, shared});
    EXPECT_EQ(bytes({0, 1}), 480 * kMiB);
}

// Goal: caches apart are added, those of CPUs that may not be used are not. Method: two pairs.
TEST_F(HostCachesTest, CachesOfTheGivenCpusAreAdded) {
    for (size_t cpu = 0; cpu < 4; ++cpu) {
        add_cpu(cpu, {kLevel1, {"3", "Unified", "32768K", cpu < 2 ? "0-1" : "2-3"}});
    }
    EXPECT_EQ(bytes({0, 1, 2, 3}), 64 * kMiB);
    EXPECT_EQ(bytes({0, 3}), 64 * kMiB);
    EXPECT_EQ(bytes({0, 1}), 32 * kMiB);
}

// Goal: the highest level counts, wherever it stands, and no cache of instructions.
TEST_F(HostCachesTest, LastLevelIsTheHighestOfData) {
    add_cpu(0, {{"2", "Unified", "1M", "0"}, kLevel1, {"3", "Instruction", "8M", "0"}});
    EXPECT_EQ(bytes({0}), kMiB);
}

TEST_F(HostCachesTest, SizesHaveUnits) {
    add_cpu(0, {{"3", "Unified", "4096", "0"}});
    add_cpu(1, {{"3", "Unified", "8K", "1"}});
    add_cpu(2, {{"3", "Unified", "2M", "2"}});
    EXPECT_EQ(bytes({0, 1, 2}), 12 * kKiB + 2 * kMiB);
}

TEST_F(HostCachesTest, MissingFilesAreUnknown) {
    EXPECT_EQ(bytes({0, 1}), 0u);
    EXPECT_EQ(bytes({}), 0u);
    add_cpu(0, {{"3", "Unified", "", "0"}});
    add_cpu(1, {{"3", "Unified", "8K", ""}});
    add_cpu(2, {{"", "Unified", "8K", "2"}});
    EXPECT_EQ(bytes({0, 1, 2}), 0u);
}

// Goal: a CPU whose last level says nothing counts nothing: not its second level, which is not the
// last, and not what would overflow.
TEST_F(HostCachesTest, StrangeFilesAreUnknown) {
    size_t cpu = 0;
    for (const char* const size : {"many", "-8K", "0K", "8T", "8KB", "99999999999999999999K",
                                   "9223372036854775807", "1099511627776M"}) {
        add_cpu(cpu, {kLevel2, {"3", "Unified", size, std::to_string(cpu)}});
        EXPECT_EQ(bytes({cpu}), 0u) << size;
        ++cpu;
    }
    add_cpu(cpu, {{"third", "Unified", "8K", "0"}});
    EXPECT_EQ(bytes({cpu}), 0u);
}

// Goal: one strange CPU does not hide the others' caches.
TEST_F(HostCachesTest, WhatIsKnownIsAdded) {
    add_cpu(0, {{"3", "Unified", "?", "0"}});
    add_cpu(1, {{"3", "Unified", "8K", "1"}});
    EXPECT_EQ(bytes({0, 1}), 8 * kKiB);
}

}  // namespace
}  // namespace trainstream
