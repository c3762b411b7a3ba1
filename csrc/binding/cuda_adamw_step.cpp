#include "binding/cuda_adamw_step.h"

#include <array>
#include <mutex>

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "allocator/current_stream.h"
#include "allocator/host_memory.h"
#include "allocator/pager_registry.h"
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
    std::mutex mutex;
    HostBlock block;
    std::vector<Event> last_use;  // Copies that may still read it, on whatever stream they were.
};

Staging& staging_of(c10::Device device) {
    static auto* all = new std::array<Staging, 64>{};
    return all->at(static_cast<size_t>(device.index()));
}

std::byte* staging_bytes_of(Staging& staging, const HostMemory& memory, size_t size_bytes) {
    HostBlock& block = staging.block;
    if (block.size_bytes < size_bytes) {
        if (block) {
            memory.pool->free(block, staging.last_use);
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

}  // namespace

void set_cuda_step_tuning(const CudaStepTuning& wanted) { tuning() = wanted; }

optim::PipelineShare cuda_adamw_step(c10::Device device,
                                     std::span<const optim::SliceUpdate> updates,
                                     StepEngine engine) {
    const c10::cuda::CUDAGuard guard(device);
    const HostMemory memory = host_memory_of(device);
    const StreamId current = CurrentStream(device).id();
    Staging& shared = staging_of(device);
    const std::lock_guard<std::mutex> lock(shared.mutex);
    for (const Event& event : shared.last_use) {
        memory.device->wait(current, event);
    }
    const Event ready = memory.device->record(current);
    optim::PipelineOptions options = tuning().pipeline;
    options.use_host = engine != StepEngine::kStream;
    options.use_kernel = engine != StepEngine::kHost;
    std::optional<SideStreamKernel> kernel;
    if (options.use_kernel) {
        kernel.emplace(*memory.device, device.index(), ready,
                       options.use_host ? tuning().beside_cores : tuning().alone);
    }
    std::byte* staging = nullptr;
    if (options.use_host) {
        staging = staging_bytes_of(shared, memory, options.staging_bytes());
    }
    std::vector<optim::DeviceUpdate> all;
    all.reserve(updates.size());
    for (const optim::SliceUpdate& update : updates) {
        all.push_back(
            {update, is_cold(device, update.slice.grad), is_cold(device, update.slice.weight)});
    }
    optim::UpdatePipeline pipeline(*memory.device, host_engine(),
                                   kernel.has_value() ? &*kernel : nullptr, staging, options);
    std::vector<Event> finished;
    const optim::PipelineShare share = pipeline.run(all, ready, &finished);
    for (const Event& event : finished) {
        memory.device->wait(current, event);
    }
    shared.last_use = std::move(finished);
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
