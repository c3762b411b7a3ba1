#include "device/cuda_events.h"

#include "base/assert.h"
#include "base/error.h"

namespace trainstream {

CudaEvent::~CudaEvent() { pool_.give(handle_, timing_); }

bool CudaEvent::is_done() const {
    if (done_.load(std::memory_order_acquire)) {
        return true;
    }
    const CudaContext::Scope scope(pool_.context_);
    const cudaError_t code = cudaEventQuery(handle_);
    if (code == cudaErrorNotReady) {
        static_cast<void>(cudaGetLastError());  // An answer, but the runtime notes it as an error.
        return false;
    }
    check_cuda("cudaEventQuery", code);
    done_.store(true, std::memory_order_release);
    return true;
}

void CudaEvent::wait() const {
    TS_ASSERT(holds_no_lock());
    if (!done_.load(std::memory_order_acquire)) {
        const CudaContext::Scope scope(pool_.context_);
        check_cuda("cudaEventSynchronize", cudaEventSynchronize(handle_));
        done_.store(true, std::memory_order_release);
    }
}

CudaEventPool::CudaEventPool(const CudaContext& context)
    : context_(context), fork_guard_(mutex_, [] {}) {}

CudaEventPool::~CudaEventPool() {
    const MutexLock lock(mutex_);
    for (const Handles& handles : idle_) {
        for (const cudaEvent_t handle : handles) {
            cudaEventDestroy(handle);
        }
    }
}

std::shared_ptr<CudaEvent> CudaEventPool::take(EventTiming timing) {
    cudaEvent_t handle = nullptr;
    {
        const MutexLock lock(mutex_);
        Handles& idle = idle_.at(static_cast<size_t>(timing));
        if (!idle.empty()) {
            handle = idle.back();
            idle.pop_back();
        }
    }
    if (handle == nullptr) {
        const CudaContext::Scope scope(context_);
        const unsigned flags =
            timing == EventTiming::kOn ? cudaEventDefault : cudaEventDisableTiming;
        check_cuda("cudaEventCreateWithFlags", cudaEventCreateWithFlags(&handle, flags));
        created_.fetch_add(1, std::memory_order_relaxed);
    }
    return std::make_shared<CudaEvent>(*this, handle, timing);
}

void CudaEventPool::give(cudaEvent_t handle, EventTiming timing) noexcept {
    const MutexLock lock(mutex_);
    idle_.at(static_cast<size_t>(timing)).push_back(handle);
}

}  // namespace trainstream
