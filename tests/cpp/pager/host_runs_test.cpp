#include "pager/host_runs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace trainstream {
namespace {

/// The heat of the coldest copy and the bytes of the best run, from all runs there are.
std::pair<uint64_t, size_t> plainly(const std::vector<HostPart>& parts, size_t size_bytes) {
    std::pair<uint64_t, size_t> best{0, 0};
    for (size_t first = 0; first < parts.size(); ++first) {
        uint64_t heat = HostPart::kFree;
        size_t bytes = 0;
        for (size_t i = first; i < parts.size(); ++i) {
            const bool joined = i == first || (parts[i].begin == parts[first].begin + bytes &&
                                               !parts[i].after_border);
            if (!joined) {
                break;
            }
            heat = std::min(heat, parts[i].heat);
            bytes += parts[i].size_bytes;
            const bool is_better = heat > best.first || (heat == best.first && bytes < best.second);
            if (bytes >= size_bytes && (best.second == 0 || is_better)) {
                best = {heat, bytes};
            }
        }
    }
    return best;
}

// Goal: the choice is the best of all. Method: random parts with gaps, borders and few heats, so
// that ties are common, against every run.
TEST(HostRunsTest, BestOfAllRunsIsChosen) {
    std::minstd_rand random(7);
    for (int round = 0; round < 3000; ++round) {
        std::vector<HostPart> parts;
        uintptr_t begin = 1000;
        for (size_t count = random() % 12; count > 0; --count) {
            begin += random() % 4 == 0 ? 5 : 0;
            const uint64_t heat = random() % 3 == 0 ? HostPart::kFree : 1 + random() % 4;
            parts.push_back({begin, 1 + random() % 9, heat, random() % 6 == 0});
            begin += parts.back().size_bytes;
        }
        const size_t size_bytes = 1 + random() % 30;
        const auto [heat, bytes] = plainly(parts, size_bytes);

        const std::optional<HostRun> run = best_run(parts, size_bytes);

        ASSERT_EQ(run.has_value(), bytes > 0);
        if (run.has_value()) {
            uint64_t coldest = HostPart::kFree;
            for (const HostPart& part : parts) {
                coldest = run->has(part.begin) ? std::min(coldest, part.heat) : coldest;
            }
            ASSERT_EQ(run->size_bytes, bytes);
            ASSERT_EQ(coldest, heat);
        }
    }
}

}  // namespace
}  // namespace trainstream
