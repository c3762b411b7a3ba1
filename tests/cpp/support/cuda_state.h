// tests/cpp/support/cuda_state.h: an OptimState where a GPU reaches it.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "device/cuda_context.h"
#include "device/cuda_device.h"
#include "support/optim_state.h"

namespace trainstream::testing {

enum class CudaPlace : uint8_t { kDevice, kHostAlloc, kHostRegister };

/// Memory of one kind, with nothing in it.
class CudaBytes {
public:
    CudaBytes(CudaPlace place, size_t size_bytes)
        : place_(place), size_bytes_(align_up(std::max<size_t>(size_bytes, 1), 4 * kKiB)) {
        if (place_ == CudaPlace::kDevice) {
            check_cuda("cudaMalloc", cudaMalloc(&bytes_, size_bytes_));
        } else if (place_ == CudaPlace::kHostAlloc) {
            check_cuda("cudaHostAlloc", cudaHostAlloc(&bytes_, size_bytes_, cudaHostAllocDefault));
        } else {
            bytes_ = std::aligned_alloc(4 * kKiB, size_bytes_);
            check_cuda("cudaHostRegister",
                       cudaHostRegister(bytes_, size_bytes_, cudaHostRegisterDefault));
        }
    }
    ~CudaBytes() {
        if (place_ == CudaPlace::kDevice) {
            cudaFree(bytes_);
        } else if (place_ == CudaPlace::kHostAlloc) {
            cudaFreeHost(bytes_);
        } else {
            cudaHostUnregister(bytes_);
            std::free(bytes_);
        }
    }
    CudaBytes(const CudaBytes&) = delete;
    CudaBytes& operator=(const CudaBytes&) = delete;

    char* data() const { return static_cast<char*>(bytes_); }

private:
    CudaPlace place_;
    size_t size_bytes_;
    void* bytes_ = nullptr;
};

/// Where each stream of a state lies.
struct CudaPlaces {
    CudaPlace grad;
    CudaPlace weight;
    CudaPlace rest;

    static CudaPlaces all_in(CudaPlace place) { return {place, place, place}; }
};

/// The streams of a state, copied to where a kernel works on them, and copied back.
class CudaState {
public:
    /// `offset`: elements by which each stream is off an aligned address.
    CudaState(OptimState* state, CudaPlaces places, size_t offset) : state_(state) {
        slice_ = state->slice();
        const size_t count = state->count;
        const Formats formats = state->formats;
        const size_t moment_bytes = optim::bytes_of(formats.moments);
        const size_t weight_bytes = optim::bytes_of(formats.param);
        place(&slice_.grad, places.grad, count, optim::bytes_of(formats.grad), offset);
        place(&slice_.weight, places.weight, count, weight_bytes, offset);
        place(&slice_.weight_mirror, places.rest, count, weight_bytes, offset);
        place(&slice_.remainder, places.rest, count, sizeof(int16_t), offset);
        place(&slice_.master, places.rest, count, sizeof(float), offset);
        place(&slice_.exp_avg, places.rest, count, moment_bytes, offset);
        place(&slice_.exp_avg_sq, places.rest, count, moment_bytes, offset);
        place(&slice_.checksums, places.rest, optim::tile_count(count), sizeof(uint32_t), 0);
        write();
    }

    const Slice& slice() const { return slice_; }

    /// From the state to the kernel's copy.
    void write() const {
        for (const Copy& one : copies_) {
            check_cuda("cudaMemcpy",
                       cudaMemcpy(one.there, one.here, one.size_bytes, cudaMemcpyDefault));
        }
    }
    /// Waits for the device, then from the kernel's copy to the state.
    void read() const {
        check_cuda("cudaDeviceSynchronize", cudaDeviceSynchronize());
        for (const Copy& one : copies_) {
            check_cuda("cudaMemcpy",
                       cudaMemcpy(one.here, one.there, one.size_bytes, cudaMemcpyDefault));
        }
    }

private:
    struct Copy {
        void* here;
        void* there;
        size_t size_bytes;
    };

    template <typename T>
    void place(T** stream, CudaPlace place, size_t count, size_t element_bytes, size_t offset) {
        if (*stream == nullptr) {
            return;
        }
        const size_t size_bytes = count * element_bytes;
        memory_.push_back(std::make_unique<CudaBytes>(place, size_bytes + offset * element_bytes));
        void* const there = memory_.back()->data() + offset * element_bytes;
        copies_.push_back(
            {const_cast<void*>(static_cast<const void*>(*stream)), there, size_bytes});
        *stream = static_cast<T*>(there);
    }

    OptimState* state_;
    Slice slice_;
    std::vector<std::unique_ptr<CudaBytes>> memory_;
    std::vector<Copy> copies_;
};

/// Why tests of kernels cannot run here; empty when they can.
inline std::string no_cuda_reason() {
    std::string reason;
    return CudaDevice::count(&reason) == 0 ? reason : "";
}

}  // namespace trainstream::testing
