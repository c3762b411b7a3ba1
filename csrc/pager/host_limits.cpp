#include "pager/host_limits.h"

#include <unistd.h>

#include <algorithm>
#include <optional>

#include "base/bytes.h"
#include "base/text_file.h"
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
    const std::optional<std::string> text = read_text_file(path);
    const std::optional<int64_t> number = text ? leading_number(*text) : std::nullopt;
    return number && *number >= 0 ? std::optional<uint64_t>(*number) : std::nullopt;
}

/// The number after `key` in a file of lines "key number ...".
std::optional<uint64_t> read_keyed_number(const std::string& path, const std::string& key) {
    const std::string text = read_text_file(path).value_or("");
    for (const std::string_view line : lines_of(text)) {
        const bool found = line.size() > key.size() && line.substr(0, key.size()) == key &&
                           (line[key.size()] == ' ' || line[key.size()] == '\t');
        const auto number = found ? leading_number(line.substr(key.size())) : std::nullopt;
        if (number && *number >= 0) {
            return static_cast<uint64_t>(*number);
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
    const std::string text = read_text_file(root + "/proc/self/cgroup").value_or("");
    // "hierarchy:controllers:path"; hierarchy 0 is version 2.
    for (const std::string_view view : lines_of(text)) {
        const std::string line(view);
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
