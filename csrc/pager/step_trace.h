// csrc/pager/step_trace.h: which storage was used by which operator, in one step.
#pragma once

#include <cstdint>
#include <vector>

namespace trainstream {

/// Owner: the pager. Lock: the pager's mutex.
class StepTrace {
public:
    /// Storages go by their serial numbers, operators by theirs; both rise over the run.
    struct Use {
        uint64_t storage = 0;
        uint64_t operation = 0;
    };

    /// A run without optimizer steps never ends its first: it is not recorded beyond this.
    static constexpr size_t kMostUses = size_t{1} << 20;

    void add(uint64_t storage, uint64_t operation) {
        if (uses_.size() < kMostUses) {
            uses_.push_back({storage, operation});
        }
    }
    const std::vector<Use>& uses() const { return uses_; }
    bool is_whole() const { return uses_.size() < kMostUses; }

private:
    std::vector<Use> uses_;
};

}  // namespace trainstream
