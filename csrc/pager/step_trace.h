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
        bool writes = false;
    };

    /// A run without optimizer steps never ends its first: it is not recorded beyond this.
    static constexpr size_t kMostUses = size_t{1} << 20;

    /// `last_operation`: the last of the step before.
    explicit StepTrace(uint64_t last_operation = 0) : last_operation_(last_operation) {}

    void add(const Use& use) {
        if (uses_.size() < kMostUses) {
            uses_.push_back(use);
        }
    }
    /// The operation that used `storage` last, which is the last one so far, writes it too.
    void add_write(uint64_t storage) {
        for (auto use = uses_.rbegin(); use != uses_.rend(); ++use) {
            if (use->operation != uses_.back().operation) {
                return;
            }
            use->writes = use->writes || use->storage == storage;
        }
    }
    /// How many operations of the step had begun before this one.
    uint64_t place_of(uint64_t operation) const { return operation - last_operation_ - 1; }
    const std::vector<Use>& uses() const { return uses_; }
    /// Nothing follows; `live_bytes`: as of a use, since the last one.
    void end(uint64_t live_bytes) { tail_bytes_ = live_bytes; }
    uint64_t tail_bytes() const { return tail_bytes_; }
    bool is_whole() const { return uses_.size() < kMostUses; }

private:
    uint64_t last_operation_;
    std::vector<Use> uses_;
    uint64_t tail_bytes_ = 0;
};

}  // namespace trainstream
