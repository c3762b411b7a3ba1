#include "device/cuda_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include "base/assert.h"
#include "base/error.h"
#include "base/text_file.h"

namespace trainstream {
namespace {

// Copies whose events are kept until they are asked about: a question each would cost a fifth of
// what it takes to enqueue one.
constexpr size_t kCopiesBetweenCounts = 32;

cudaStream_t handle_of(StreamId stream) { return reinterpret_cast<cudaStream_t>(stream); }

/// Null: an event of another kind, or none.
const CudaEvent* as_cuda_event(const Event& event) {
    return dynamic_cast<const CudaEvent*>(event.get());
}

int numa_node_of(int index) {
    std::array<char, 32> id{};
    if (cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), index) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        return -1;
    }
    std::string name = id.data();
    std::transform(name.begin(), name.end(), name.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    const auto text = read_text_file("/sys/bus/pci/devices/" + name + "/numa_node");
    // One node only: the kernel says -1 too.
    return static_cast<int>(leading_number(text.value_or("")).value_or(-1));
}

}  // namespace

int CudaDevice::count(std::string* reason) {
    int driver_version = 0;
    if (cudaDriverGetVersion(&driver_version) == cudaSuccess && driver_version == 0) {
        // Else the runtime would call a missing driver an insufficient one.
        *reason = "no CUDA driver is installed";
        return 0;
    }
    int count = 0;
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess) {
        *reason = take_cuda_error(code);
        return 0;
    }
    if (count == 0) {
        *reason = "no CUDA device is visible";
    }
    return count;
}

CudaDevice::CudaDevice(int index)
    : context_(index), numa_node_(numa_node_of(index)), events_(context_) {
    const CudaContext::Scope scope(context_);
    int pageable = 0;
    check_cuda("cudaDeviceGetAttribute",
               cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, index));
    reads_pageable_memory_ = pageable != 0;
    for (const CopyDirection direction : {CopyDirection::kToHost, CopyDirection::kToDevice}) {
        std::unique_ptr<Lane>& lane = lanes_.at(static_cast<size_t>(direction));
        lane = std::make_unique<Lane>(direction);
        // Non-blocking: the default stream, which is torch's, must not wait for copies.
        check_cuda("cudaStreamCreateWithFlags",
                   cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking));
    }
}

CudaDevice::~CudaDevice() {
    try {
        const CudaContext::Scope scope(context_);
        for (const std::unique_ptr<Lane>& lane : lanes_) {
            cudaStreamSynchronize(lane->stream);
            cudaStreamDestroy(lane->stream);
        }
        static_cast<void>(cudaGetLastError());
    } catch (const Error&) {
        // The driver was shut down first, and the streams with it.
    }
}

MemoryInfo CudaDevice::memory_info() const {
    const CudaContext::Scope scope(context_);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    check_cuda("cudaMemGetInfo", cudaMemGetInfo(&free_bytes, &total_bytes));
    return {free_bytes, total_bytes};
}

bool CudaDevice::page_lock(void* address, size_t size_bytes, std::string* reason) {
    const CudaContext::Scope scope(context_);
    const cudaError_t code =
        cudaHostRegister(address, size_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (code != cudaSuccess) {
        *reason = take_cuda_error(code);
        return false;
    }
    const MutexLock lock(ranges_mutex_);
    locked_ranges_.emplace_back(address, size_bytes);
    madvise(address, size_bytes, MADV_DONTFORK);  // Whole pages only; else the range is inherited.
    return true;
}

void CudaDevice::page_unlock(void* address) noexcept {
    const MutexLock lock(ranges_mutex_);
    const auto range = std::find_if(locked_ranges_.begin(), locked_ranges_.end(),
                                    [&](const auto& r) { return r.first == address; });
    TS_ASSERT(range != locked_ranges_.end());
    if (range != locked_ranges_.end()) {
        madvise(address, range->second, MADV_DOFORK);
        locked_ranges_.erase(range);
    }
    try {
        const CudaContext::Scope scope(context_);
        check_cuda("cudaHostUnregister", cudaHostUnregister(address));
    } catch (const Error&) {
        // The driver was shut down first, and its locks with it.
    }
}

Event CudaDevice::record(StreamId stream) { return record(stream, EventTiming::kOff); }

Event CudaDevice::mark(StreamId stream) { return record(stream, EventTiming::kOn); }

Event CudaDevice::record(StreamId stream, EventTiming timing) {
    TS_ASSERT(!is_capturing(stream));
    const CudaContext::Scope scope(context_);
    const std::shared_ptr<CudaEvent> event = events_.take(timing);
    check_cuda("cudaEventRecord", cudaEventRecord(event->handle(), handle_of(stream)));
    return event;
}

uint64_t CudaDevice::ns_between(const Event& from, const Event& to) const {
    const CudaContext::Scope scope(context_);
    return ns_between(*as_cuda_event(from), *as_cuda_event(to));
}

uint64_t CudaDevice::ns_between(const CudaEvent& from, const CudaEvent& to) {
    float milliseconds = 0;
    check_cuda("cudaEventElapsedTime",
               cudaEventElapsedTime(&milliseconds, from.handle(), to.handle()));
    return static_cast<uint64_t>(std::max(0.0, static_cast<double>(milliseconds) * 1e6));
}

void CudaDevice::wait(StreamId stream, const Event& event) {
    const CudaEvent* const cuda_event = as_cuda_event(event);
    if (event != nullptr && cuda_event == nullptr) {
        event->wait();
        return;
    }
    // To ask whether it has ended takes as long as to have the stream wait for it.
    if (cuda_event == nullptr || cuda_event->known_done()) {
        return;
    }
    const CudaContext::Scope scope(context_);
    check_cuda("cudaStreamWaitEvent",
               cudaStreamWaitEvent(handle_of(stream), cuda_event->handle(), 0));
}

Event CudaDevice::copy(CopyDirection direction, void* target, const void* source, size_t size_bytes,
                       const std::vector<Event>& after) {
    for (const Event& event : after) {
        if (event && as_cuda_event(event) == nullptr) {
            event->wait();
        }
    }
    const CudaContext::Scope scope(context_);
    // Before the lock, so that they outlive it: giving an event back takes a lock of the same rank.
    std::vector<Lane::Timing> finished;
    const Lane::Timing timing{events_.take(EventTiming::kOn), events_.take(EventTiming::kOn)};
    Lane& lane = this->lane(direction);
    const MutexLock lock(lane.mutex);
    lane.enqueue(target, source, size_bytes, after, timing);
    if (lane.running.size() % kCopiesBetweenCounts == 0) {
        lane.count_finished(&finished);
    }
    return timing.end;
}

void CudaDevice::Lane::enqueue(void* target, const void* source, size_t size_bytes,
                               const std::vector<Event>& after, const Timing& timing) {
    for (const Event& event : after) {
        const CudaEvent* const cuda_event = as_cuda_event(event);
        if (cuda_event != nullptr && !cuda_event->known_done()) {
            check_cuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, cuda_event->handle(), 0));
        }
    }
    check_cuda("cudaEventRecord", cudaEventRecord(timing.start->handle(), stream));
    const cudaError_t code = cudaMemcpyAsync(target, source, size_bytes, cudaMemcpyDefault, stream);
    if (code != cudaSuccess) {
        throw errors::copy_failed(words(direction), size_bytes, take_cuda_error(code));
    }
    check_cuda("cudaEventRecord", cudaEventRecord(timing.end->handle(), stream));
    running.push_back(timing);
    bytes += size_bytes;
}

void CudaDevice::Lane::count_finished(std::vector<Timing>* finished) {
    while (!running.empty() && running.front().end->is_done()) {
        const Timing& timing = running.front();
        busy_ns += ns_between(*timing.start, *timing.end);
        finished->push_back(std::move(running.front()));
        running.pop_front();
    }
}

bool CudaDevice::is_capturing(StreamId stream) const {
    const CudaContext::Scope scope(context_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t code = cudaStreamIsCapturing(handle_of(stream), &status);
    if (code == cudaErrorStreamCaptureImplicit) {
        // The default stream, while another one is captured that waits for it.
        static_cast<void>(cudaGetLastError());
        return true;
    }
    check_cuda("cudaStreamIsCapturing", code);
    return status != cudaStreamCaptureStatusNone;
}

CopyStats CudaDevice::copy_stats() const {
    CopyStats stats;
    for (const CopyDirection direction : {CopyDirection::kToHost, CopyDirection::kToDevice}) {
        const bool to_host = direction == CopyDirection::kToHost;
        std::vector<Lane::Timing> finished;
        Lane& lane = this->lane(direction);
        const MutexLock lock(lane.mutex);
        lane.count_finished(&finished);
        (to_host ? stats.to_host_bytes : stats.to_device_bytes) = lane.bytes;
        stats.busy_ns += lane.busy_ns;
    }
    return stats;
}

}  // namespace trainstream
