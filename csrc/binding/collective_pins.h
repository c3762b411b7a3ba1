// csrc/binding/collective_pins.h: what collectives under way use stays where it is until they end.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "pager/pager.h"

namespace trainstream {

struct PagerPins {
    Pager* pager = nullptr;
    Pins pins;
};

/// A collective goes on in other threads and streams after the operator that began it has ended.
/// The Work that it returned tells when it is done. One of NCCL's that says so at once may belong
/// to a group whose kernels only start when the group ends: its memory is held until an optimizer's
/// step has ended, too. Others may never say so, as gloo's of a reduction that is scattered: they
/// count as done once nobody is left who could wait for them.
///
/// Owner: the process, which never ends it: a Work may outlive all. Lock: `mutex_`, a leaf but for
/// what isCompleted() of a Work takes, which is none of ours. Pins and Works end with it open.
class CollectivePins {
public:
    /// What it was given of one pager.
    struct Held {
        PagerPins given;
        uint64_t newest_before = 0;  // The serial of the last storage that there was.
    };
    using Helds = std::vector<Held>;

    static CollectivePins& instance();

    /// `outputs`: of the operator; where no Work of a known kind is among them `held` is pinned for
    /// good. An operator that failed has none. Returns a name for keep_made(); 0: there is none.
    uint64_t add(const std::vector<c10::IValue>& outputs, Helds held);
    /// Moves the pins of what these collectives' operators made out of `pins`, those of the
    /// outermost operator that began them: held until all of them are done.
    void keep_made(const std::vector<uint64_t>& names, std::vector<PagerPins>* pins);
    /// Whether a look may be worth its price, which is a question to the driver.
    bool any() const { return count_.load(std::memory_order_relaxed) > 0; }
    /// Ends the pins of those that are done. Called at boundaries, with nothing held.
    void release_done();

private:
    /// Of collectives that began together. The last of them to end ends the pins.
    struct Made {
        std::vector<PagerPins> pins;
        std::atomic<bool> for_good{false};
        ~Made();
    };
    struct Collective {
        uint64_t name = 0;
        c10::intrusive_ptr<c10d::Work> work;
        Helds held;
        std::shared_ptr<Made> made = nullptr;
        bool is_nccl = false;
        bool at_once = false;
        uint64_t steps = 0;  // Optimizer steps that had ended when it began.
    };
    static bool waits_for_step(const Collective& collective);
    static bool says_done(const Collective& collective);
    static bool is_forgotten(const Collective& collective);
    static void end(Collective* collective);

    std::mutex mutex_;
    std::vector<Collective> under_way_;
    uint64_t names_ = 0;
    std::atomic<size_t> count_{0};
};

}  // namespace trainstream
