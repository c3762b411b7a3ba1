// csrc/device/cuda_events.h: CUDA events that are used again and again.
//
// Apart from CudaDevice: an event outlives the call that made it, and creating one takes a lock of
// the driver's, so the steady state creates none.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "base/fork_guard.h"
#include "base/mutex.h"
#include "device/cuda_context.h"
#include "device/device.h"

namespace trainstream {

class CudaEventPool;

enum class EventTiming : uint8_t { kOff, kOn };

/// A recorded event; goes back to its pool when nobody holds it.
///
/// Owner: shared. Lock: none; recorded once, before it is shared.
class CudaEvent final : public EventState {
public:
    CudaEvent(CudaEventPool& pool, cudaEvent_t handle, EventTiming timing)
        : pool_(pool), handle_(handle), timing_(timing) {}
    ~CudaEvent() override;
    CudaEvent(const CudaEvent&) = delete;
    CudaEvent& operator=(const CudaEvent&) = delete;

    bool is_done() const override;
    /// Whether somebody was told so; asks no driver.
    bool known_done() const { return done_.load(std::memory_order_acquire); }
    void wait() const override;
    cudaEvent_t handle() const { return handle_; }

private:
    CudaEventPool& pool_;
    const cudaEvent_t handle_;
    const EventTiming timing_;
    mutable std::atomic<bool> done_{false};
};

/// Owner: CudaDevice. Lock: its own, of rank kDevice.
class CudaEventPool {
public:
    explicit CudaEventPool(const CudaContext& context);
    ~CudaEventPool();
    CudaEventPool(const CudaEventPool&) = delete;
    CudaEventPool& operator=(const CudaEventPool&) = delete;

    /// An event that is not recorded yet.
    std::shared_ptr<CudaEvent> take(EventTiming timing);
    uint64_t created() const { return created_.load(std::memory_order_relaxed); }

private:
    friend class CudaEvent;
    using Handles = std::vector<cudaEvent_t>;

    void give(cudaEvent_t handle, EventTiming timing) noexcept;

    const CudaContext& context_;
    std::atomic<uint64_t> created_{0};
    Mutex mutex_{LockRank::kDevice};
    std::array<Handles, 2> idle_ TS_GUARDED_BY(mutex_);  // By timing.
    ForkGuard fork_guard_;
};

}  // namespace trainstream
