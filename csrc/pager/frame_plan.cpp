#include "pager/frame_plan.h"

#include <algorithm>

namespace trainstream {

namespace {

// Frames that are too few to hide a load are of no use: a quarter for what is on its way.
size_t lead_of(size_t arena_bytes, size_t lead_bytes) {
    return std::min(lead_bytes, arena_bytes / 4);
}

}  // namespace

void FramePlan::lay(void* block, size_t size_bytes, size_t lead_bytes) {
    arena = std::make_unique<FrameArena>(block, size_bytes);
    schedule = std::make_unique<FrameSchedule>(period, size_bytes, lead_of(size_bytes, lead_bytes));
}

std::vector<bool> FramePlan::who_leaves(size_t lead_bytes) const {
    std::vector<bool> leaves(items.size(), false);
    FrameSchedule trial(period, wanted_bytes, lead_of(wanted_bytes, lead_bytes));
    constexpr int kPeriods = 3;
    for (int i = 0; i < kPeriods; ++i) {
        for (const ItemList& used : period.operations) {
            for (const uint32_t item : used) {
                trial.begun(item);
            }
            trial.ended();
            while (const auto load = trial.due()) {
                for (const uint32_t item : load->leave) {
                    trial.left(item);
                    leaves[item] = true;
                }
                trial.entered(load->item, load->offset);
            }
        }
        trial.period_ended();
    }
    for (size_t item = 0; item < items.size(); ++item) {
        // What finds no frame at all stays in host memory.
        leaves[item] = leaves[item] || !trial.has_frame(static_cast<uint32_t>(item));
    }
    return leaves;
}

}  // namespace trainstream
