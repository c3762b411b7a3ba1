// csrc/device/cuda_memory.h: device memory straight from the runtime, for tests and benchmarks.
//
// Under torch the blocks are those of its caching allocator (csrc/allocator).
#pragma once

#include <unordered_map>

#include "base/mutex.h"
#include "device/cuda_context.h"
#include "device/device_memory.h"

namespace trainstream {

/// Owner: the test or benchmark. Lock: its own, of rank kMemory; not held while the driver works.
class CudaMemory final : public DeviceMemory {
public:
    CudaMemory(int index, uint64_t budget_bytes) : context_(index), budget_bytes_(budget_bytes) {}
    ~CudaMemory() override;
    CudaMemory(const CudaMemory&) = delete;
    CudaMemory& operator=(const CudaMemory&) = delete;

    void* allocate(size_t size_bytes, StreamId stream) override;
    /// Waits for the device, as cudaFree() does.
    void free(void* address) noexcept override;
    std::vector<Region> regions(StreamId /*stream*/) const override { return {}; }
    bool rebuild(StreamId /*stream*/) override { return false; }
    uint64_t budget_bytes() const override { return budget_bytes_; }
    uint64_t peak_bytes() const override;

private:
    const CudaContext context_;
    const uint64_t budget_bytes_;
    mutable Mutex mutex_{LockRank::kMemory};
    std::unordered_map<void*, size_t> blocks_ TS_GUARDED_BY(mutex_);
    uint64_t used_bytes_ TS_GUARDED_BY(mutex_) = 0;
    uint64_t peak_bytes_ TS_GUARDED_BY(mutex_) = 0;
};

}  // namespace trainstream
