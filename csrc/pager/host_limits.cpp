#include "pager/host_limits.h"

#include <unistd.h>

#include <algorithm>
#include <optional>

#include "base/bytes.h"
#include "base/cgroups.h"
#include "base/text_file.h"
#include "pager/host_pool.h"

namespace trainstream {
namespace {

constexpr uint64_t kNoLimit = UINT64_MAX;

/// Where the numbers of one cgroup version are.
struct CgroupFiles {
    const char* limit;
    const char* usage;
    const char* idle_cache;  // The key in memory.stat.
};

constexpr CgroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                                   "total_inactive_file"};
constexpr CgroupFiles kVersion2 = {"memory.max", "memory.current", "inactive_file"};

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

uint64_t left_in_cgroups(const std::string& root) {
    uint64_t left = kNoLimit;
    for_each_cgroup(root, "memory", [&](int version, const std::string& directory) {
        left = std::min(left, left_in_cgroup(directory, version == 2 ? kVersion2 : kVersion1));
    });
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
