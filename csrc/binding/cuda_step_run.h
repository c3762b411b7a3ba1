// csrc/binding/cuda_step_run.h: updates of one optimizer step on a CUDA device, run or timed.
#pragma once

#include <array>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include <c10/core/Device.h>

#include "allocator/host_memory.h"
#include "binding/adamw_step.h"
#include "device/cuda_device.h"
#include "optim/split_trials.h"

namespace trainstream {

/// Staging memory of a device, made once: the steady state locks no pages.
///
/// Owner: the process. Lock: `mutex`, which whoever uses it holds: optimizers may step in several
/// threads.
struct CudaStaging {
    static CudaStaging& of(c10::Device device);
    explicit CudaStaging(c10::DeviceIndex index) : device(index) {}

    /// So many bytes of it.
    std::byte* bytes(const HostMemory& memory, size_t size_bytes);

    std::mutex mutex;
    // A door of their own: behind the pager's copies, which wait for what comes later in the
    // model's work, an update's would wait for it too (7.62 B on an H200: until the backward pass
    // ended).
    CudaDevice device;
    HostBlock block;
    std::vector<Event> slot_free;  // UpdatePipeline::slot_free() of the last step.
    std::map<std::array<optim::NumberFormat, 3>, optim::SplitTrials> trials;  // By formats.
};

/// Owner: one step. Lock: none; the caller holds the staging memory's mutex where cores take part.
class CudaStepRun {
public:
    /// What the current stream has now comes before all updates; `after` waits for them.
    CudaStepRun(c10::Device device, CudaStaging& staging, StreamId after);

    /// Adds to `share` who did how much. Returns what must be done before all of it is.
    std::vector<Event> run(std::span<const optim::SliceUpdate> updates, StepEngine engine,
                           optim::PipelineShare* share);
    /// The same from end to end, in nanoseconds.
    uint64_t time(std::span<const optim::SliceUpdate> updates, StepEngine engine,
                  optim::PipelineShare* share);

private:
    std::vector<optim::DeviceUpdate> placed(std::span<const optim::SliceUpdate> updates) const;

    const c10::Device device_;
    CudaStaging& staging_;
    const HostMemory memory_;
    const StreamId after_;
    const Event ready_;
};

}  // namespace trainstream
