#include "allocator/sim_allocator.h"

#include <algorithm>
#include <cstring>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include "allocator/pager_registry.h"
#include "allocator/storage_owner.h"
#include "base/error.h"

namespace trainstream {

namespace {

std::atomic<SimAllocator*> g_sim_allocator{nullptr};

bool is_in_arena(Pager& pager, const void* address) {
    const std::vector<Region> regions = pager.memory().regions(StreamId{0});
    return std::any_of(regions.begin(), regions.end(), [&](const Region& region) {
        return region.contains(reinterpret_cast<uintptr_t>(address));
    });
}

/// raw_allocate() hands out bare pointers of either allocator.
void raw_sim_deleter(void* address) {
    const PagerRegistry& registry = PagerRegistry::instance();
    Pager* pager = registry.find(c10::Device(c10::kCPU));
    const bool ours = registry.forked() ? is_in_arena(*pager, address) : pager->free(address);
    if (!ours) {
        c10::GetDefaultCPUAllocator()->raw_deallocate(address);
    }
}

}  // namespace

SimAllocator::SimAllocator(const ManagedOptions& options)
    : options_(options), plain_(c10::GetDefaultCPUAllocator()) {
    SimDeviceOptions device_options;
    device_options.seed = options.seed;
    device_options.memory_bytes = options.vram_bytes;
    device_ = std::make_unique<SimDevice>(device_options);
    memory_ = std::make_unique<SimMemory>(SimMemoryOptions{options.vram_bytes});
    HostPoolOptions host_options;
    host_options.limit_bytes = options.ram_bytes;
    host_ = std::make_unique<HostPool>(*device_, host_options);
    pager_ = std::make_unique<Pager>(*device_, *memory_, *host_, StorageOwnerPort::instance(),
                                     options.pager);
}

c10::DataPtr SimAllocator::allocate(size_t size_bytes) {
    if (size_bytes < options_.min_storage_bytes || PagerRegistry::instance().forked()) {
        return plain_->allocate(size_bytes);
    }
    try {
        void* address = pager_->allocate(size_bytes, StreamId{0});
        return {address, address, &managed_deleter, c10::Device(c10::kCPU)};
    } catch (const Error& error) {
        TORCH_CHECK_WITH(OutOfMemoryError, error.kind() != ErrorKind::kOutOfMemory, error.what());
        throw;
    }
}

c10::DeleterFnPtr SimAllocator::raw_deleter() const { return &raw_sim_deleter; }

bool SimAllocator::is_simple_data_ptr(const c10::DataPtr& pointer) const {
    return pointer.get() == pointer.get_context();
}

void SimAllocator::copy_data(void* target, const void* source, std::size_t size_bytes) const {
    std::memcpy(target, source, size_bytes);
}

SimAllocator& start_sim_allocator(const ManagedOptions& options) {
    if (g_sim_allocator.load() != nullptr) {
        throw errors::invalid_argument("the simulated device runs already.");
    }
    auto* allocator = new SimAllocator(options);
    PagerRegistry::instance().add(c10::Device(c10::kCPU), &allocator->pager());
    g_sim_allocator.store(allocator);
    c10::SetCPUAllocator(allocator, /*priority=*/255);
    return *allocator;
}

SimAllocator* sim_allocator() { return g_sim_allocator.load(); }

}  // namespace trainstream
