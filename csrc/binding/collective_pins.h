// csrc/binding/collective_pins.h: what collectives under way use stays where it is until they end.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>

#include "pager/pager.h"

namespace trainstream {

/// A collective goes on in other threads and streams after the operator that began it has ended.
/// The Work that it returned tells when it is done. One of NCCL's that says so at once may belong
/// to a group whose kernels only start when the group ends: its memory is held until an optimizer's
/// step has ended, too.
///
/// Owner: the process, which never ends it: a Work may outlive all. Lock: `mutex_`, a leaf but for
/// what isCompleted() of a Work takes, which is none of ours. Pins are ended with it open.
class CollectivePins {
public:
    using Held = std::vector<std::pair<Pager*, Pins>>;

    static CollectivePins& instance();

    /// `outputs`: of the operator; where no Work of a known kind is among them `held` is pinned for
    /// good. An operator that failed has none.
    void add(const std::vector<c10::IValue>& outputs, Held held);
    /// Whether a look may be worth its price, which is a question to the driver.
    bool any() const { return count_.load(std::memory_order_relaxed) > 0; }
    /// Ends the pins of those that are done. Called at boundaries, with nothing held.
    void release_done();

private:
    struct Collective {
        c10::IValue work;
        Held held;
        bool at_once = false;
        uint64_t steps = 0;  // Optimizer steps that had ended when it began.
    };
    static bool is_done(const Collective& collective);

    std::mutex mutex_;
    std::vector<Collective> under_way_;
    std::atomic<size_t> count_{0};
};

}  // namespace trainstream
