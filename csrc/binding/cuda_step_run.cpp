#include "binding/cuda_step_run.h"

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include <c10/cuda/CUDAStream.h>

#include "allocator/current_stream.h"
#include "allocator/pager_registry.h"
#include "binding/cuda_adamw_step.h"
#include "optim/update_cuda.h"

namespace trainstream {

namespace {

StreamId as_id(const c10::cuda::CUDAStream& stream) {
    return reinterpret_cast<StreamId>(stream.stream());
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

bool is_cold(c10::Device device, const void* address) {
    const Pager* pager = PagerRegistry::instance().find(device);
    Residency residency = Residency::kResident;
    return pager != nullptr && pager->residency(address, &residency) &&
           residency == Residency::kCold;
}

}  // namespace

CudaStaging& CudaStaging::of(c10::Device device) {
    static auto* mutex = new std::mutex;
    static auto* all = new std::array<std::unique_ptr<CudaStaging>, 64>;
    const std::lock_guard<std::mutex> lock(*mutex);
    auto& slot = all->at(static_cast<size_t>(device.index()));
    if (slot == nullptr) {
        slot = std::make_unique<CudaStaging>(device.index());
    }
    return *slot;
}

std::byte* CudaStaging::bytes(const HostMemory& memory, size_t size_bytes) {
    if (block.size_bytes < size_bytes) {
        if (block) {
            memory.pool->free(block, slot_free);
            slot_free.clear();
            block = {};
        }
        block = allocate_host_block(memory, size_bytes);
    }
    return static_cast<std::byte*>(block.address);
}

CudaStepRun::CudaStepRun(c10::Device device, CudaStaging& staging, StreamId after)
    : device_(device),
      staging_(staging),
      memory_(host_memory_of(device)),
      after_(after),
      ready_(staging.device.record(CurrentStream(device).id())) {}

std::vector<Event> CudaStepRun::run(std::span<const optim::SliceUpdate> updates, StepEngine engine,
                                    optim::PipelineShare* share) {
    const CudaStepTuning& tuning = cuda_step_tuning();
    optim::PipelineOptions options = tuning.pipeline;
    options.use_host = engine != StepEngine::kStream;
    options.use_kernel = engine != StepEngine::kHost;
    std::optional<SideStreamKernel> kernel;
    if (options.use_kernel) {
        kernel.emplace(staging_.device, device_.index(), ready_,
                       options.use_host ? tuning.beside_cores : tuning.alone);
    }
    std::byte* const bytes =
        options.use_host ? staging_.bytes(memory_, options.staging_bytes()) : nullptr;
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

uint64_t CudaStepRun::time(std::span<const optim::SliceUpdate> updates, StepEngine engine,
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

std::vector<optim::DeviceUpdate> CudaStepRun::placed(
    std::span<const optim::SliceUpdate> updates) const {
    std::vector<optim::DeviceUpdate> all;
    all.reserve(updates.size());
    for (const optim::SliceUpdate& update : updates) {
        all.push_back(
            {update, is_cold(device_, update.slice.grad), is_cold(device_, update.slice.weight)});
    }
    return all;
}

}  // namespace trainstream
