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
        uint64_t live_bytes = 0;  // Most that lived since the use before, planned or not.
    };

    /// A run without optimizer steps never ends its first: it is not recorded beyond this.
    static constexpr size_t kMostUses = size_t{1} << 20;

    void add(const Use& use) {
        if (uses_.size() < kMostUses) {
            uses_.push_back(use);
        }
    }
    const std::vector<Use>& uses() const { return uses_; }
    /// Nothing follows; `live_bytes`: as of a use, since the last one.
    void end(uint64_t live_bytes) { tail_bytes_ = live_bytes; }
    uint64_t tail_bytes() const { return tail_bytes_; }
    bool is_whole() const { return uses_.size() < kMostUses; }

private:
    std::vector<Use> uses_;
    uint64_t tail_bytes_ = 0;
};

}  // namespace trainstream
