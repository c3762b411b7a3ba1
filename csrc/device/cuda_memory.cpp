#include "device/cuda_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/error.h"

namespace trainstream {

CudaMemory::~CudaMemory() {
    const MutexLock lock(mutex_);
    for (const auto& [address, size_bytes] : blocks_) {
        cudaFree(address);
    }
    static_cast<void>(cudaGetLastError());
}

void* CudaMemory::allocate(size_t size_bytes, StreamId /*stream*/) {
    if (size_bytes > budget_bytes_) {
        return nullptr;
    }
    const size_t block_bytes = align_up(std::max(size_bytes, size_t{1}), kBlockAlignment);
    {
        const MutexLock lock(mutex_);
        if (used_bytes_ + block_bytes > budget_bytes_) {
            return nullptr;
        }
        used_bytes_ += block_bytes;
        peak_bytes_ = std::max(peak_bytes_, used_bytes_);
    }
    const CudaContext::Scope scope(context_);
    void* address = nullptr;
    const cudaError_t code = cudaMalloc(&address, block_bytes);
    const MutexLock lock(mutex_);
    if (code != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        used_bytes_ -= block_bytes;
        return nullptr;
    }
    TS_ASSERT_EQ(reinterpret_cast<uintptr_t>(address) % kBlockAlignment, uintptr_t{0});
    blocks_.emplace(address, block_bytes);
    return address;
}

void CudaMemory::free(void* address) noexcept {
    {
        const MutexLock lock(mutex_);
        const auto block = blocks_.find(address);
        TS_ASSERT(block != blocks_.end());
        if (block == blocks_.end()) {
            return;
        }
        used_bytes_ -= block->second;
        blocks_.erase(block);
    }
    try {
        const CudaContext::Scope scope(context_);
        check_cuda("cudaFree", cudaFree(address));
    } catch (const Error&) {
        // The driver was shut down first, and its memory with it.
    }
}

uint64_t CudaMemory::peak_bytes() const {
    const MutexLock lock(mutex_);
    return peak_bytes_;
}

}  // namespace trainstream
