#include "pager/host_runs.h"

#include <algorithm>

namespace trainstream {

namespace {

bool make_a_run(const HostPart& part, const HostPart& next) {
    return part.begin + part.size_bytes == next.begin && !next.after_border;
}

}  // namespace

std::optional<HostRun> best_run(const std::vector<HostPart>& parts, size_t size_bytes) {
    std::optional<HostRun> best;
    uint64_t best_heat = 0;
    auto first = parts.begin();  // No shorter run that ends at `last` is enough.
    size_t run_bytes = 0;
    for (auto last = parts.begin(); last != parts.end(); ++last) {
        if (last != first && !make_a_run(*(last - 1), *last)) {
            first = last;
            run_bytes = 0;
        }
        run_bytes += last->size_bytes;
        while (run_bytes - first->size_bytes >= size_bytes) {
            run_bytes -= first->size_bytes;
            ++first;
        }
        if (run_bytes < size_bytes) {
            continue;
        }
        const auto colder = [](const HostPart& a, const HostPart& b) { return a.heat < b.heat; };
        const uint64_t heat = std::min_element(first, last + 1, colder)->heat;
        const bool is_smaller = !best.has_value() || run_bytes < best->size_bytes;
        if (!best.has_value() || heat > best_heat || (heat == best_heat && is_smaller)) {
            best = HostRun{first->begin, run_bytes};
            best_heat = heat;
        }
    }
    return best;
}

}  // namespace trainstream
