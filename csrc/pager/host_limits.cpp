#include "pager/host_limits.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/bytes.h"
#include "pager/host_pool.h"

namespace trainstream {
namespace {

constexpr uint64_t kNoLimit = UINT64_MAX;

/// Where the numbers of one cgroup version are.
struct CgroupFiles {
    const char* mount;
    const char* limit;
    const char* usage;
    const char* idle_cache;  // The key in memory.stat.
};

constexpr CgroupFiles kVersion1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                   "memory.usage_in_bytes", "total_inactive_file"};
constexpr CgroupFiles kVersion2 = {"/sys/fs/cgroup", "memory.max", "memory.current",
                                   "inactive_file"};

/// The first number of a file. Nothing: no such file, or a word ("max").
std::optional<uint64_t> read_number(const std::string& path) {
    std::ifstream file(path);
    uint64_t number = 0;
    if (file >> number) {
        return number;
    }
    return std::nullopt;
}

/// The number after `key` in a file of lines "key number ...".
std::optional<uint64_t> read_keyed_number(const std::string& path, const std::string& key) {
    std::ifstream file(path);
    std::string line;
    while (std::getline(file, line)) {
        std::istringstream words(line);
        std::string word;
        uint64_t number = 0;
        if (words >> word >> number && word == key) {
            return number;
        }
    }
    return std::nullopt;
}

uint64_t left_in_cgroup(const std::string& directory, const CgroupFiles& files) {
    const auto limit = read_number(directory + "/" + files.limit);
    const auto usage = read_number(directory + "/" + files.usage);
    if (!limit || !usage) {
        return kNoLimit;
    }
    const uint64_t idle_cache =
        read_keyed_number(directory + "/memory.stat", files.idle_cache).value_or(0);
    const uint64_t used = *usage - std::min(*usage, idle_cache);
    return *limit - std::min(*limit, used);
}

/// The least that any cgroup from `path` up to the root leaves.
uint64_t left_in_hierarchy(const std::string& root, std::string path, const CgroupFiles& files) {
    uint64_t left = kNoLimit;
    for (;;) {
        left = std::min(left, left_in_cgroup(root + files.mount + path, files));
        const size_t slash = path.rfind('/');
        if (path.empty() || slash == std::string::npos) {
            return left;
        }
        path.resize(slash);  // A path that a container does not see only fails to open.
    }
}

uint64_t left_in_cgroups(const std::string& root) {
    uint64_t left = kNoLimit;
    std::ifstream file(root + "/proc/self/cgroup");
    std::string line;  // "hierarchy:controllers:path"; hierarchy 0 is version 2.
    while (std::getline(file, line)) {
        const size_t first = line.find(':');
        const size_t second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) {
            continue;
        }
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const std::string path = line.substr(second + 1);
        if (line.substr(0, first) == "0") {
            left = std::min(left, left_in_hierarchy(root, path, kVersion2));
        } else if (controllers.find(",memory,") != std::string::npos) {
            left = std::min(left, left_in_hierarchy(root, path, kVersion1));
        }
    }
    return left;
}

uint64_t left_in_system(const std::string& root) {
    if (const auto available = read_keyed_number(root + "/proc/meminfo", "MemAvailable:")) {
        return *available * kKiB;
    }
    return static_cast<uint64_t>(sysconf(_SC_AVPHYS_PAGES)) *
           static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

uint64_t available_host_bytes_under(const std::string& root) {
    const uint64_t left = std::min(left_in_cgroups(root), left_in_system(root));
    return left - left / 16;
}

uint64_t available_host_bytes() { return available_host_bytes_under(""); }

}  // namespace trainstream
