#include "pager/host_caches.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/text_file.h"

namespace trainstream {
namespace {

constexpr size_t kIndicesMax = 16;             // The kernel makes four or five.
constexpr int64_t kCacheBytesMax = 1LL << 40;  // More is no cache but a strange file.

std::string first_line(const std::string& path) {
    const std::string text = read_text_file(path).value_or("");
    return text.substr(0, text.find('\n'));
}

/// "491520K". Nothing: no size.
std::optional<uint64_t> cache_size(std::string_view text) {
    const int64_t number = leading_number(text).value_or(0);
    if (number <= 0 || number > kCacheBytesMax) {
        return std::nullopt;
    }
    const size_t digits = text.find_first_not_of("0123456789");
    const std::string_view unit = digits == std::string_view::npos ? "" : text.substr(digits);
    const size_t scale = unit == "" ? 1 : unit == "K" ? kKiB : unit == "M" ? kMiB : 0;
    const uint64_t size_bytes = static_cast<uint64_t>(number) * scale;
    return size_bytes > 0 && size_bytes <= kCacheBytesMax ? std::optional(size_bytes)
                                                          : std::nullopt;
}

/// Where a CPU's last-level cache is described. "": nowhere.
std::string last_level_directory(const std::string& cpu_directory) {
    std::string last;
    int64_t last_level = 0;
    for (size_t index = 0; index < kIndicesMax; ++index) {
        const std::string directory = cpu_directory + "/cache/index" + std::to_string(index);
        const std::string level_text = first_line(directory + "/level");
        if (level_text.empty()) {
            break;
        }
        const int64_t level = leading_number(level_text).value_or(0);
        if (level > last_level && first_line(directory + "/type") != "Instruction") {
            last = directory;
            last_level = level;
        }
    }
    return last;
}

/// CPUs of this process's affinity; every one that there is where they are too many to tell.
std::vector<size_t> allowed_cpus() {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    const bool known = sched_getaffinity(0, sizeof mask, &mask) == 0;
    const size_t count =
        known ? CPU_SETSIZE : static_cast<size_t>(std::max(sysconf(_SC_NPROCESSORS_CONF), 0L));
    std::vector<size_t> cpus;
    for (size_t cpu = 0; cpu < count; ++cpu) {
        if (!known || CPU_ISSET(cpu, &mask)) {
            cpus.push_back(cpu);
        }
    }
    return cpus;
}

}  // namespace

uint64_t last_level_cache_bytes_under(const std::string& root, std::span<const size_t> cpus) {
    std::map<std::string, uint64_t> caches;  // By the list of CPUs that share one.
    for (const size_t cpu : cpus) {
        const std::string directory =
            last_level_directory(root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu));
        const std::string sharers = first_line(directory + "/shared_cpu_list");
        const std::optional<uint64_t> size_bytes = cache_size(first_line(directory + "/size"));
        if (!directory.empty() && !sharers.empty() && size_bytes) {
            caches.emplace(sharers, *size_bytes);
        }
    }
    uint64_t total_bytes = 0;
    for (const auto& [sharers, size_bytes] : caches) {
        total_bytes += size_bytes;
    }
    return total_bytes;
}

uint64_t last_level_cache_bytes() { return last_level_cache_bytes_under("", allowed_cpus()); }

}  // namespace trainstream
