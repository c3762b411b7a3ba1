#include "binding/cuda_adamw_step.h"

#include <mutex>

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "allocator/current_stream.h"
#include "allocator/host_memory.h"
#include "binding/cuda_step_run.h"
#include "optim/square_sums_cuda.h"
#include "optim/update.h"

namespace trainstream {

namespace {

CudaStepTuning g_tuning;

size_t elements_of(std::span<const optim::SliceUpdate> updates) {
    size_t elements = 0;
    for (const optim::SliceUpdate& update : updates) {
        elements += update.slice.count;
    }
    return elements;
}

/// The first updates that have so many elements.
std::span<const optim::SliceUpdate> first_of(std::span<const optim::SliceUpdate> updates,
                                             size_t elements) {
    size_t count = 0;
    for (size_t found = 0; count < updates.size() && found < elements; ++count) {
        found += updates[count].slice.count;
    }
    return updates.first(count);
}

/// Whether the model has nothing under way, as far as its usual stream knows.
bool is_idle(c10::Device device) { return c10::cuda::getDefaultCUDAStream(device.index()).query(); }

/// Both at once; on an idle device the cores alone, where that was found faster.
void run_hybrid(CudaStepRun& run, CudaStaging& staging, c10::Device device,
                std::span<const optim::SliceUpdate> updates, optim::PipelineShare* share) {
    while (!updates.empty()) {
        if (!g_tuning.tries_splits || !is_idle(device)) {
            run.run(updates, StepEngine::kHybrid, share);
            return;
        }
        const optim::Formats& formats = updates.front().formats;
        optim::SplitTrials& trials = staging.trials[{formats.param, formats.grad, formats.moments}];
        const optim::SplitTrials::Turn turn = trials.next(elements_of(updates));
        const StepEngine engine =
            turn.split == optim::Split::kBoth ? StepEngine::kHybrid : StepEngine::kHost;
        if (!turn.timed) {
            run.run(updates, engine, share);
            return;
        }
        const auto first = first_of(updates, optim::SplitTrials::kElements);
        trials.note(turn.split, elements_of(first), run.time(first, engine, share));
        updates = updates.subspan(first.size());
    }
}

}  // namespace

const CudaStepTuning& cuda_step_tuning() { return g_tuning; }
void set_cuda_step_tuning(const CudaStepTuning& wanted) { g_tuning = wanted; }

optim::PipelineShare cuda_adamw_step(c10::Device device,
                                     std::span<const optim::SliceUpdate> updates, StepEngine engine,
                                     StreamId after) {
    const c10::cuda::CUDAGuard guard(device);
    CudaStaging& staging = CudaStaging::of(device);
    std::unique_lock<std::mutex> lock(staging.mutex, std::defer_lock);
    if (engine != StepEngine::kStream) {
        lock.lock();  // A kernel alone uses no staging memory, and waits for no other step.
    }
    CudaStepRun run(device, staging, after);
    optim::PipelineShare share;
    if (engine == StepEngine::kHybrid) {
        run_hybrid(run, staging, device, updates, &share);
    } else {
        run.run(updates, engine, &share);
    }
    return share;
}

double cuda_sum_of_squares(const std::vector<at::Tensor>& grads,
                           std::span<const optim::Gradient> gradients) {
    int64_t tiles = 0;
    for (const optim::Gradient& gradient : gradients) {
        tiles += static_cast<int64_t>(optim::tile_count(gradient.count));
    }
    const at::Tensor sums = host_zeros(grads.front().device(), {tiles}, {1}, at::kDouble);
    auto* next = sums.mutable_data_ptr<double>();
    std::vector<Event> done;
    for (size_t i = 0; i < grads.size(); ++i) {
        const c10::Device device = grads[i].device();
        const c10::cuda::CUDAGuard guard(device);
        optim::tile_square_sums_cuda(gradients[i].format, gradients[i].grad, gradients[i].count,
                                     next, c10::cuda::getCurrentCUDAStream().stream());
        next += optim::tile_count(gradients[i].count);
        if (i + 1 == grads.size() || grads[i + 1].device() != device) {
            done.push_back(host_memory_of(device).device->record(CurrentStream(device).id()));
        }
    }
    for (const Event& event : done) {
        event->wait();
    }
    return optim::sum_in_order(sums.const_data_ptr<double>(), static_cast<size_t>(tiles));
}

}  // namespace trainstream
