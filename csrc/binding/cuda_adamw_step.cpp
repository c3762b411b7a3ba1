#include "binding/cuda_adamw_step.h"

#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "allocator/current_stream.h"
#include "allocator/host_memory.h"
#include "allocator/pager_registry.h"
#include "device/cuda_device.h"
#include "optim/split_trials.h"
#include "optim/square_sums_cuda.h"
#include "optim/update.h"
#include "optim/update_cuda.h"

namespace trainstream {

namespace {

StreamId as_id(const c10::cuda::CUDAStream& stream) {
    return reinterpret_cast<StreamId>(stream.stream());
}

CudaStepTuning& tuning() {
    static CudaStepTuning tuning;
    return tuning;
}

/// Kernels on a stream of their own, behind what the current stream had.
class SideStreamKernel final : public optim::StreamKernel {
public:
    SideStreamKernel(Device& device, c10::DeviceIndex index, const Event& ready,
                     const optim::CudaLaunch& launch)
        : device_(device),
          launch_(launch),
          stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, index)) {
        device_.wait(as_id(stream_), ready);
    }

    void launch(const optim::SliceUpdate& update) override {
        optim::update_cuda(update.formats, update.slice, update.scalars, update.key,
                           stream_.stream(), launch_);
    }
    Event record() override { return device_.record(as_id(stream_)); }

private:
    Device& device_;
    const optim::CudaLaunch launch_;
    const c10::cuda::CUDAStream stream_;
};

/// Staging memory of a device, made once: the steady state locks no pages. Whoever uses it holds
/// the mutex: optimizers may step in several threads.
struct Staging {
    explicit Staging(c10::DeviceIndex index) : device(index) {}

    std::mutex mutex;
    // A door of their own: behind the pager's copies, which wait for what comes later in the
    // model's work, an update's would wait for it too (7.62 B on an H200: until the backward pass
    // ended).
    CudaDevice device;
    HostBlock block;
    std::vector<Event> slot_free;  // UpdatePipeline::slot_free() of the last step.
    std::map<std::array<optim::NumberFormat, 3>, optim::SplitTrials> trials;  // By formats.
};

Staging& staging_of(c10::Device device) {
    static auto* mutex = new std::mutex;
    static auto* all = new std::array<std::unique_ptr<Staging>, 64>;
    const std::lock_guard<std::mutex> lock(*mutex);
    auto& slot = all->at(static_cast<size_t>(device.index()));
    if (slot == nullptr) {
        slot = std::make_unique<Staging>(device.index());
    }
    return *slot;
}

std::byte* staging_bytes_of(Staging& staging, const HostMemory& memory, size_t size_bytes) {
    HostBlock& block = staging.block;
    if (block.size_bytes < size_bytes) {
        if (block) {
            memory.pool->free(block, staging.slot_free);
            staging.slot_free.clear();
            block = {};
        }
        block = allocate_host_block(memory, size_bytes);
    }
    return static_cast<std::byte*>(block.address);
}

bool is_cold(c10::Device device, const void* address) {
    const Pager* pager = PagerRegistry::instance().find(device);
    Residency residency = Residency::kResident;
    return pager != nullptr && pager->residency(address, &residency) &&
           residency == Residency::kCold;
}

/// One run of updates of one step. The caller holds the staging memory's mutex where cores take
/// part.
class StepRun {
public:
    StepRun(c10::Device device, Staging& staging, StreamId after)
        : device_(device),
          staging_(staging),
          memory_(host_memory_of(device)),
          after_(after),
          ready_(staging.device.record(CurrentStream(device).id())) {}

    /// Adds to `share` who did how much. Returns what must be done before all of it is.
    std::vector<Event> run(std::span<const optim::SliceUpdate> updates, StepEngine engine,
                           optim::PipelineShare* share) {
        optim::PipelineOptions options = tuning().pipeline;
        options.use_host = engine != StepEngine::kStream;
        options.use_kernel = engine != StepEngine::kHost;
        std::optional<SideStreamKernel> kernel;
        if (options.use_kernel) {
            kernel.emplace(staging_.device, device_.index(), ready_,
                           options.use_host ? tuning().beside_cores : tuning().alone);
        }
        std::byte* const bytes = options.use_host
                                     ? staging_bytes_of(staging_, memory_, options.staging_bytes())
                                     : nullptr;
        optim::UpdatePipeline pipeline(
            staging_.device, host_engine(), kernel.has_value() ? &*kernel : nullptr, bytes, options,
            options.use_host ? std::exchange(staging_.slot_free, {}) : std::vector<Event>());
        std::vector<Event> finished;
        const optim::PipelineShare part = pipeline.run(placed(updates), ready_, &finished);
        share->host += part.host;
        share->kernel += part.kernel;
        for (const Event& event : finished) {
            staging_.device.wait(after_, event);
        }
        if (options.use_host) {
            staging_.slot_free = pipeline.slot_free();
        }
        return finished;
    }

    /// The same from end to end, in nanoseconds.
    uint64_t time(std::span<const optim::SliceUpdate> updates, StepEngine engine,
                  optim::PipelineShare* share) {
        if (ready_ != nullptr) {
            ready_->wait();
        }
        const auto start = std::chrono::steady_clock::now();
        for (const Event& event : run(updates, engine, share)) {
            event->wait();
        }
        const auto taken = std::chrono::steady_clock::now() - start;
        return static_cast<uint64_t>(std::chrono::nanoseconds(taken).count());
    }

private:
    std::vector<optim::DeviceUpdate> placed(std::span<const optim::SliceUpdate> updates) const {
        std::vector<optim::DeviceUpdate> all;
        all.reserve(updates.size());
        for (const optim::SliceUpdate& update : updates) {
            all.push_back({update, is_cold(device_, update.slice.grad),
                           is_cold(device_, update.slice.weight)});
        }
        return all;
    }

    const c10::Device device_;
    Staging& staging_;
    const HostMemory memory_;
    const StreamId after_;
    const Event ready_;
};

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
void run_hybrid(StepRun& run, Staging& staging, c10::Device device,
                std::span<const optim::SliceUpdate> updates, optim::PipelineShare* share) {
    while (!updates.empty()) {
        if (!is_idle(device)) {
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

void set_cuda_step_tuning(const CudaStepTuning& wanted) { tuning() = wanted; }

optim::PipelineShare cuda_adamw_step(c10::Device device,
                                     std::span<const optim::SliceUpdate> updates, StepEngine engine,
                                     StreamId after) {
    const c10::cuda::CUDAGuard guard(device);
    Staging& staging = staging_of(device);
    std::unique_lock<std::mutex> lock(staging.mutex, std::defer_lock);
    if (engine != StepEngine::kStream) {
        lock.lock();  // A kernel alone uses no staging memory, and waits for no other step.
    }
    StepRun run(device, staging, after);
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
