#include "optim/usable_cores.h"

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <thread>

#include "base/text_file.h"

namespace trainstream::optim {
namespace {

size_t cores_for(std::optional<int64_t> quota_us, std::optional<int64_t> period_us) {
    if (!quota_us || !period_us || *quota_us <= 0 || *period_us <= 0) {
        return SIZE_MAX;  // "max" in version 2, -1 in version 1.
    }
    return static_cast<size_t>((*quota_us + *period_us - 1) / *period_us);
}

size_t version2_cores(const std::string& directory) {
    const std::string text = read_text_file(directory + "/cpu.max").value_or("");  // "quota period"
    const size_t blank = std::min(text.find(' '), text.size());
    return cores_for(leading_number(text), leading_number(text.substr(blank)));
}

size_t version1_cores(const std::string& directory) {
    const auto number_in = [&](const char* name) {
        return leading_number(read_text_file(directory + name).value_or(""));
    };
    return cores_for(number_in("/cpu.cfs_quota_us"), number_in("/cpu.cfs_period_us"));
}

/// The least that any cgroup from `path` up to the root allows.
size_t hierarchy_cores(const std::string& mount, std::string path,
                       size_t (*cores_of)(const std::string&)) {
    size_t cores = SIZE_MAX;
    for (;;) {
        cores = std::min(cores, cores_of(mount + path));
        const size_t slash = path.rfind('/');
        if (path.empty() || slash == std::string::npos) {
            return cores;
        }
        path.resize(slash);  // A path that a container does not see only fails to open.
    }
}

size_t affinity_cores() {
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) != 0) {  // More than 1024 cores.
        return std::max(1U, std::thread::hardware_concurrency());
    }
    return static_cast<size_t>(CPU_COUNT(&mask));
}

}  // namespace

size_t cgroup_cores_under(const std::string& root) {
    size_t cores = SIZE_MAX;
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
            const std::string mount = root + "/sys/fs/cgroup";
            cores = std::min(cores, hierarchy_cores(mount, path, &version2_cores));
        } else if (controllers.find(",cpu,") != std::string::npos) {
            const std::string mount = root + "/sys/fs/cgroup/cpu";
            cores = std::min(cores, hierarchy_cores(mount, path, &version1_cores));
        }
    }
    return cores;
}

size_t usable_cores() {
    return std::max(size_t{1}, std::min(affinity_cores(), cgroup_cores_under("")));
}

}  // namespace trainstream::optim
