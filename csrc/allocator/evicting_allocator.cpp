#include "allocator/evicting_allocator.h"

#include <algorithm>

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "allocator/limits.h"
#include "allocator/pager_registry.h"
#include "allocator/storage_owner.h"
#include "base/bytes.h"
#include "base/error.h"

namespace trainstream {

namespace {

StreamId as_id(cudaStream_t stream) { return reinterpret_cast<StreamId>(stream); }

MemoryInfo memory_info_of(c10::DeviceIndex device) {
    const c10::cuda::CUDAGuard guard(device);
    MemoryInfo info;
    C10_CUDA_CHECK(cudaMemGetInfo(&info.free_bytes, &info.total_bytes));
    return info;
}

uint64_t vram_limit(c10::DeviceIndex device, int64_t setting) {
    const MemoryInfo info = memory_info_of(device);
    return device_limit_bytes(setting, info.free_bytes, info.total_bytes);
}

HostPoolOptions host_options(int64_t ram_setting) {
    HostPoolOptions options;
    options.limit_bytes = host_limit_bytes(ram_setting);
    return options;
}

// Small blocks never move, unless there are so many that they take more than is kept free for
// them (the adapters of a large model, and their moments). Less than this is torch's in any case: a
// block of its own takes 1 MiB of the device.
constexpr size_t kLeastMovableBytes = 64 * kKiB;

/// raw_alloc() hands out bare pointers, managed or torch's.
void raw_evicting_deleter(void* address) { cca::get()->raw_delete(address); }

}  // namespace

EvictingAllocator::PerDevice::PerDevice(cca::CUDAAllocator* native, c10::DeviceIndex index,
                                        const CudaOptions& options)
    : device(index),
      memory(native, index, vram_limit(index, options.vram_setting),
             memory_info_of(index).total_bytes),
      host(device, host_options(options.ram_setting)),
      pager(device, memory, host, StorageOwnerPort::instance(), options.pager) {}

EvictingAllocator::EvictingAllocator(cca::CUDAAllocator* native, const CudaOptions& options)
    : NativeForwarder(native), options_(options) {}

EvictingAllocator::PerDevice& EvictingAllocator::parts(c10::DeviceIndex device) {
    auto& slot = devices_.at(static_cast<size_t>(device));
    if (PerDevice* made = slot.load(std::memory_order_acquire)) {
        return *made;
    }
    std::lock_guard<std::mutex> lock(devices_mutex_);
    if (slot.load() == nullptr) {
        auto* made = new PerDevice(native(), device, options_);
        PagerRegistry::instance().add(c10::Device(c10::kCUDA, device), &made->pager);
        slot.store(made, std::memory_order_release);
        // Uses are announced from the first storage on; a run that fits turns that off again.
        StorageOwnerPort::instance().watch(true);
    }
    return *slot.load();
}

EvictingAllocator::PerDevice* EvictingAllocator::parts_if_made(c10::DeviceIndex device) const {
    const auto slot = static_cast<size_t>(device);
    return slot < devices_.size() ? devices_[slot].load(std::memory_order_acquire) : nullptr;
}

c10::DataPtr EvictingAllocator::allocate(size_t size_bytes) {
    const c10::DeviceIndex device = c10::cuda::current_device();
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
    const bool small = size_bytes < options_.min_storage_bytes;
    const bool pool = goes_to_pool(device, stream);
    if (small || pool) {
        c10::DataPtr fixed = unmanaged(size_bytes, device, /*may_move=*/!pool);
        if (fixed.get() != nullptr || size_bytes == 0) {
            return fixed;
        }
        size_bytes = std::max<size_t>(size_bytes, NativeMemory::kLeastInRegionBytes);
    }
    void* address = managed(size_bytes, device, stream);
    return {address, address, &managed_deleter, c10::Device(c10::kCUDA, device)};
}

/// A block of torch's that never moves. Null: there is no room for it within the budget, but it may
/// be managed like what is larger. What may not goes a little past the budget.
c10::DataPtr EvictingAllocator::unmanaged(size_t size_bytes, c10::DeviceIndex device,
                                          bool may_move) {
    PerDevice* made = parts_if_made(device);
    const bool movable = may_move && made != nullptr && size_bytes >= kLeastMovableBytes;
    if (movable && !made->memory.has_small_room(size_bytes)) {
        return {};
    }
    try {
        return native()->allocate(size_bytes);
    } catch (const c10::OutOfMemoryError&) {
        if (made == nullptr) {
            throw;
        }
        made->memory.note_answered_refusal();
    }
    if (movable) {
        made->memory.note_small_refusal();
        return {};
    }
    return made->memory.past_the_limit([&] { return native()->allocate(size_bytes); });
}

void* EvictingAllocator::managed(size_t size_bytes, c10::DeviceIndex device, cudaStream_t stream) {
    try {
        return parts(device).pager.allocate(size_bytes, as_id(stream));
    } catch (const Error& error) {
        TORCH_CHECK_WITH(OutOfMemoryError, error.kind() != ErrorKind::kOutOfMemory, error.what());
        throw;
    }
}

c10::DeleterFnPtr EvictingAllocator::raw_deleter() const { return &raw_evicting_deleter; }

bool EvictingAllocator::is_simple_data_ptr(const c10::DataPtr& pointer) const {
    return pointer.get() == pointer.get_context();
}

void* EvictingAllocator::raw_alloc(size_t size_bytes) {
    return raw_alloc_with_stream(
        size_bytes, c10::cuda::getCurrentCUDAStream(c10::cuda::current_device()).stream());
}

void* EvictingAllocator::raw_alloc_with_stream(size_t size_bytes, cudaStream_t stream) {
    const c10::DeviceIndex device = c10::cuda::current_device();
    if (size_bytes < options_.min_storage_bytes || goes_to_pool(device, stream)) {
        return native()->raw_alloc_with_stream(size_bytes, stream);
    }
    return managed(size_bytes, device, stream);
}

void EvictingAllocator::raw_delete(void* address) {
    if (address == nullptr || PagerRegistry::instance().forked()) {
        return;
    }
    bool freed = false;
    PagerRegistry::instance().for_each([&](Pager& pager) { freed = freed || pager.free(address); });
    if (!freed) {
        native()->raw_delete(address);
    }
}

void EvictingAllocator::emptyCache(c10::MempoolId_t pool) {
    native()->emptyCache(pool);
    for (const auto& slot : devices_) {
        if (PerDevice* made = slot.load(std::memory_order_acquire)) {
            made->memory.forget_freed_regions();
        }
    }
}

c10::CachingDeviceAllocator::DeviceStats EvictingAllocator::getDeviceStats(
    c10::DeviceIndex device) {
    PerDevice* made = parts_if_made(device);
    return made != nullptr ? made->memory.stats() : native()->getDeviceStats(device);
}

void EvictingAllocator::resetPeakStats(c10::DeviceIndex device) {
    if (PerDevice* made = parts_if_made(device)) {
        made->memory.reset_peaks();
    } else {
        native()->resetPeakStats(device);
    }
}

double EvictingAllocator::getMemoryFraction(c10::DeviceIndex device) {
    PerDevice* made = parts_if_made(device);
    return made != nullptr ? made->memory.user_fraction() : native()->getMemoryFraction(device);
}

void EvictingAllocator::setMemoryFraction(double fraction, c10::DeviceIndex device) {
    TORCH_CHECK(fraction >= 0.0 && fraction <= 1.0, "invalid fraction:", std::to_string(fraction),
                ". Please set within [0, 1].");
    parts(device).memory.set_user_fraction(fraction);
}

void EvictingAllocator::recordStream(const c10::DataPtr& pointer, c10::cuda::CUDAStream stream) {
    bool managed = false;
    if (pointer.get_deleter() == &managed_deleter) {
        PagerRegistry::instance().for_each([&](Pager& pager) {
            managed = managed || pager.record_stream(pointer.get(), as_id(stream.stream()));
        });
    }
    if (!managed) {
        native()->recordStream(pointer, stream);
    }
}

bool EvictingAllocator::goes_to_pool(c10::DeviceIndex device, cudaStream_t stream) {
    if (!PagerRegistry::instance().pools_open()) {
        return false;
    }
    std::lock_guard<std::mutex> lock(pools_mutex_);
    return std::any_of(pools_.begin(), pools_.end(), [&](const OpenPool& open) {
        return open.device == device && open.filter(stream);
    });
}

void EvictingAllocator::beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                                            std::function<bool(cudaStream_t)> filter) {
    if (PerDevice* made = parts_if_made(device)) {
        made->pager.wait_for_all_writes();
    }
    {
        std::lock_guard<std::mutex> lock(pools_mutex_);
        pools_.push_back({device, pool, filter});
    }
    PagerRegistry::instance().pool_opened();
    // A capture may begin: what it touches must be announced, whether or not anything moves now.
    StorageOwnerPort::instance().watch(true);
    native()->beginAllocateToPool(device, pool, std::move(filter));
}

void EvictingAllocator::endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) {
    native()->endAllocateToPool(device, pool);
    bool closed = false;
    {
        std::lock_guard<std::mutex> lock(pools_mutex_);
        const auto found = std::find_if(pools_.begin(), pools_.end(), [&](const OpenPool& open) {
            return open.device == device && open.pool == pool;
        });
        if (found != pools_.end()) {
            pools_.erase(found);
            closed = true;
        }
    }
    if (closed) {
        PagerRegistry::instance().pool_closed();
        StorageOwnerPort::instance().watch(false);
        PagerRegistry::instance().for_each([](Pager& pager) { pager.set_capturing(false); });
    }
}

void EvictingAllocator::check_on_device(const void* address, const char* call) const {
    PagerRegistry::instance().for_each([&](Pager& pager) {
        Residency residency = Residency::kResident;
        TORCH_CHECK(
            !pager.residency(address, &residency) || residency == Residency::kResident,
            "trainstream: ", call,
            ": this storage is in host memory now. Call trainstream.pin(tensor) first: it is "
            "brought in and stays.");
    });
}

void* EvictingAllocator::getBaseAllocation(void* address, size_t* size_bytes) {
    check_on_device(address, "getBaseAllocation");
    return native()->getBaseAllocation(address, size_bytes);
}

cca::ShareableHandle EvictingAllocator::shareIpcHandle(void* address) {
    check_on_device(address, "shareIpcHandle");
    return native()->shareIpcHandle(address);
}

cudaError_t EvictingAllocator::memcpyAsync(void* target, int target_device, const void* source,
                                           int source_device, size_t size_bytes,
                                           cudaStream_t stream, bool p2p) {
    if (target_device != source_device) {
        // Either side may be in host memory, which a peer copy refuses.
        return cudaMemcpyAsync(target, source, size_bytes, cudaMemcpyDefault, stream);
    }
    return native()->memcpyAsync(target, target_device, source, source_device, size_bytes, stream,
                                 p2p);
}

}  // namespace trainstream
