// csrc/allocator/evicting_allocator.h: torch's CUDA allocator with a budget and somewhere to go.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "allocator/native_forwarder.h"
#include "allocator/native_memory.h"
#include "allocator/sim_allocator.h"
#include "device/cuda_device.h"
#include "pager/host_pool.h"
#include "pager/pager.h"

namespace trainstream {

/// Limits as configured: see allocator/limits.h.
struct CudaOptions {
    int64_t vram_setting = 0;
    int64_t ram_setting = 0;
    size_t min_storage_bytes = 0;
    PagerOptions pager = {};
};

/// Passes everything to torch's allocator, and looks after storages of min_storage bytes and more:
/// they may move, and an allocation that does not fit moves others or is born in host memory.
///
/// Owner: the process; never destroyed, since tensors may outlive every static object.
/// Lock:  `devices_mutex_` for the making of a device's parts, `pools_mutex_` for the open pools;
/// no
///        allocator is called under either.
class EvictingAllocator final : public NativeForwarder {
public:
    EvictingAllocator(cca::CUDAAllocator* native, const CudaOptions& options);

    c10::DataPtr allocate(size_t size_bytes) override;
    c10::DeleterFnPtr raw_deleter() const override;
    bool is_simple_data_ptr(const c10::DataPtr& pointer) const override;
    void* raw_alloc(size_t size_bytes) override;
    void* raw_alloc_with_stream(size_t size_bytes, cudaStream_t stream) override;
    void raw_delete(void* address) override;

    void emptyCache(c10::MempoolId_t pool) override;
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
    void resetPeakStats(c10::DeviceIndex device) override;
    double getMemoryFraction(c10::DeviceIndex device) override;
    void setMemoryFraction(double fraction, c10::DeviceIndex device) override;

    using NativeForwarder::recordStream;
    void recordStream(const c10::DataPtr& pointer, c10::cuda::CUDAStream stream) override;
    void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                             std::function<bool(cudaStream_t)> filter) override;
    void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
    void* getBaseAllocation(void* address, size_t* size_bytes) override;
    cca::ShareableHandle shareIpcHandle(void* address) override;
    cudaError_t memcpyAsync(void* target, int target_device, const void* source, int source_device,
                            size_t size_bytes, cudaStream_t stream, bool p2p) override;

private:
    /// All that one device needs.
    struct PerDevice {
        PerDevice(cca::CUDAAllocator* native, c10::DeviceIndex device, const CudaOptions& options);
        CudaDevice device;
        NativeMemory memory;
        HostPool host;
        Pager pager;
    };
    struct OpenPool {
        c10::DeviceIndex device;
        c10::MempoolId_t pool;
        std::function<bool(cudaStream_t)> filter;
    };

    PerDevice& parts(c10::DeviceIndex device);
    PerDevice* parts_if_made(c10::DeviceIndex device) const;
    bool goes_to_pool(c10::DeviceIndex device, cudaStream_t stream);
    void* managed(size_t size_bytes, c10::DeviceIndex device, cudaStream_t stream);
    c10::DataPtr unmanaged(size_t size_bytes, c10::DeviceIndex device, bool may_move);
    void check_on_device(const void* address, const char* call) const;

    const CudaOptions options_;
    std::mutex devices_mutex_;
    std::array<std::atomic<PerDevice*>, 64> devices_{};
    std::mutex pools_mutex_;
    std::vector<OpenPool> pools_;
};

}  // namespace trainstream
