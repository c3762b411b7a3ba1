#include "optim/usable_cores.h"

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <thread>

#include "base/cgroups.h"
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
    for_each_cgroup(root, "cpu", [&](int version, const std::string& directory) {
        cores =
            std::min(cores, version == 2 ? version2_cores(directory) : version1_cores(directory));
    });
    return cores;
}

size_t usable_cores() {
    return std::max(size_t{1}, std::min(affinity_cores(), cgroup_cores_under("")));
}

}  // namespace trainstream::optim
