// csrc/device/cuda_device.h: the door to a CUDA device. The runtime only: no libcuda, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "device/cuda_context.h"
#include "device/cuda_events.h"
#include "device/device.h"

namespace trainstream {

/// Two copy streams, one a direction, made once. Every call leaves the calling thread's current
/// device as it was.
///
/// Owner: the allocator that opened it; it outlives every event.
/// Lock:  one for each direction, of rank kDevice: the calls that enqueue one copy stay together.
///        A copy from or to pageable memory holds it while the runtime stages the bytes.
///
/// Invariants:
///   1. In the steady state nothing is created: events come from a pool, copies use two streams.
///   2. Of each direction, `running` holds the copies whose time is not counted yet, oldest first.
class CudaDevice final : public Device {
public:
    /// How many devices there are; 0 with the reason when there is none. Starts the driver: a
    /// process that forks later cannot use CUDA in its children.
    static int count(std::string* reason);

    explicit CudaDevice(int index);
    ~CudaDevice() override;
    CudaDevice(const CudaDevice&) = delete;
    CudaDevice& operator=(const CudaDevice&) = delete;

    const char* name() const override { return "cuda"; }
    MemoryInfo memory_info() const override;
    int numa_node() const override { return numa_node_; }

    /// A forked child does not inherit the range: it could not use it, and the kernel would copy
    /// every locked page for it at once.
    bool page_lock(void* address, size_t size_bytes, std::string* reason) override;
    void page_unlock(void* address) noexcept override;
    bool reads_pageable_memory() const override { return reads_pageable_memory_; }

    Event record(StreamId stream) override;
    Event mark(StreamId stream) override;
    uint64_t ns_between(const Event& from, const Event& to) const override;
    void wait(StreamId stream, const Event& event) override;
    Event copy(CopyDirection direction, void* target, const void* source, size_t size_bytes,
               const std::vector<Event>& after) override;

    bool is_capturing(StreamId stream) const override;
    CopyStats copy_stats() const override;

    /// Events taken from the driver so far.
    uint64_t events_created() const { return events_.created(); }

private:
    Event record(StreamId stream, EventTiming timing);
    static uint64_t ns_between(const CudaEvent& from, const CudaEvent& to);

    /// The copies of one direction.
    struct Lane {
        struct Timing {
            std::shared_ptr<CudaEvent> start;
            std::shared_ptr<CudaEvent> end;
        };

        explicit Lane(CopyDirection its_direction) : direction(its_direction) {}

        const CopyDirection direction;
        Mutex mutex{LockRank::kDevice};
        cudaStream_t stream = nullptr;
        std::deque<Timing> running TS_GUARDED_BY(mutex);
        uint64_t bytes TS_GUARDED_BY(mutex) = 0;
        uint64_t busy_ns TS_GUARDED_BY(mutex) = 0;

        void enqueue(void* target, const void* source, size_t size_bytes,
                     const std::vector<Event>& after, const Timing& timing) TS_REQUIRES(mutex);
        /// Counts what is done. The events go to `finished`: they may not be given back to the pool
        /// under this lock, whose rank is the pool's own.
        void count_finished(std::vector<Timing>* finished) TS_REQUIRES(mutex);
    };

    Lane& lane(CopyDirection direction) const { return *lanes_.at(static_cast<size_t>(direction)); }

    const CudaContext context_;
    int numa_node_ = -1;
    bool reads_pageable_memory_ = false;
    CudaEventPool events_;
    std::array<std::unique_ptr<Lane>, 2> lanes_;  // By direction.

    // Where each locked range ends, to make it inheritable again.
    Mutex ranges_mutex_{LockRank::kDevice};
    std::vector<std::pair<void*, size_t>> locked_ranges_ TS_GUARDED_BY(ranges_mutex_);
};

}  // namespace trainstream
