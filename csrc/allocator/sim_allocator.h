// csrc/allocator/sim_allocator.h: CPU tensors as the simulated device's tensors.
#pragma once

#include <memory>

#include <c10/core/Allocator.h>

#include "device/sim_device.h"
#include "device/sim_memory.h"
#include "pager/host_pool.h"
#include "pager/pager.h"

namespace trainstream {

struct ManagedOptions {
    uint64_t vram_bytes = 0;
    uint64_t ram_bytes = 0;  // 0: what the system can spare.
    size_t min_storage_bytes = 0;
    PagerOptions pager = {};
    uint64_t seed = 0;
};

/// Serves storages of min_storage bytes and more from the simulated device; smaller ones, and all
/// of a forked child's, come from torch's own CPU allocator.
///
/// Owner: the process; never destroyed. Lock: none of its own.
class SimAllocator final : public c10::Allocator {
public:
    explicit SimAllocator(const ManagedOptions& options);

    c10::DataPtr allocate(size_t size_bytes) override;
    c10::DeleterFnPtr raw_deleter() const override;
    bool is_simple_data_ptr(const c10::DataPtr& pointer) const override;
    void copy_data(void* target, const void* source, std::size_t size_bytes) const override;

    SimDevice& device() { return *device_; }
    Pager& pager() { return *pager_; }

private:
    const ManagedOptions options_;
    c10::Allocator* plain_;
    std::unique_ptr<SimDevice> device_;
    std::unique_ptr<SimMemory> memory_;
    std::unique_ptr<HostPool> host_;
    std::unique_ptr<Pager> pager_;
};

/// Puts one in torch's place, once. Throws Error when there is one already.
SimAllocator& start_sim_allocator(const ManagedOptions& options);
/// Null before that.
SimAllocator* sim_allocator();

}  // namespace trainstream
