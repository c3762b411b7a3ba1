// csrc/allocator/native_forwarder.h: a CUDAAllocator that passes every call to torch's own.
//
// The interface grew between torch 2.11 and 2.15. This file alone absorbs that: members that some
// minor lacks are declared without `override` and call the inner allocator only where it has them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>

namespace trainstream {

namespace cca = c10::cuda::CUDACachingAllocator;

/// Owner: EvictingAllocator. Lock: none; torch's allocator has its own.
class NativeForwarder : public cca::CUDAAllocator {
public:
    explicit NativeForwarder(cca::CUDAAllocator* native) : native_(native) {}

    // c10::Allocator
    c10::DataPtr allocate(size_t size_bytes) override { return native_->allocate(size_bytes); }
    c10::DeleterFnPtr raw_deleter() const override { return native_->raw_deleter(); }
    void copy_data(void* target, const void* source, std::size_t size_bytes) const override {
        native_->copy_data(target, source, size_bytes);
    }
    bool is_simple_data_ptr(const c10::DataPtr& pointer) const override {
        return native_->is_simple_data_ptr(pointer);
    }

    // c10::DeviceAllocator
    bool initialized() override { return native_->initialized(); }
    void emptyCache(c10::MempoolId_t pool) override { native_->emptyCache(pool); }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        return native_->getDeviceStats(device);
    }
    void resetAccumulatedStats(c10::DeviceIndex device) override {
        native_->resetAccumulatedStats(device);
    }
    void resetPeakStats(c10::DeviceIndex device) override { native_->resetPeakStats(device); }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
        return native_->getMemoryInfo(device);
    }

    // CUDAAllocator, every minor
    void* raw_alloc(size_t size_bytes) override { return native_->raw_alloc(size_bytes); }
    void* raw_alloc_with_stream(size_t size_bytes, cudaStream_t stream) override {
        return native_->raw_alloc_with_stream(size_bytes, stream);
    }
    void raw_delete(void* address) override { native_->raw_delete(address); }
    void init(int device_count) override { native_->init(device_count); }
    double getMemoryFraction(c10::DeviceIndex device) override {
        return native_->getMemoryFraction(device);
    }
    void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
        native_->setMemoryFraction(fraction, device);
    }
    std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(
        c10::DeviceIndex device) override {
        return native_->getExpandableSegmentSizes(device);
    }
    void enable(bool value) override { native_->enable(value); }
    bool isEnabled() const override { return native_->isEnabled(); }
    void cacheInfo(c10::DeviceIndex device, size_t* largest) override {
        native_->cacheInfo(device, largest);
    }
    void* getBaseAllocation(void* address, size_t* size_bytes) override {
        return native_->getBaseAllocation(address, size_bytes);
    }
    using cca::CUDAAllocator::recordStream;
    void recordStream(const c10::DataPtr& pointer, c10::cuda::CUDAStream stream) override {
        native_->recordStream(pointer, stream);
    }
    cca::SnapshotInfo snapshot(c10::MempoolId_t pool, bool include_traces) override {
        return native_->snapshot(pool, include_traces);
    }
    void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                             std::function<bool(cudaStream_t)> filter) override {
        native_->beginAllocateToPool(device, pool, std::move(filter));
    }
    void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
        native_->endAllocateToPool(device, pool);
    }
    void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
        native_->releasePool(device, pool);
    }
    int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override {
        return native_->getPoolUseCount(device, pool);
    }
    void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                            std::shared_ptr<cca::CUDAAllocator> allocator) override {
        native_->createOrIncrefPool(device, pool, std::move(allocator));
    }
    void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) override {
        native_->setUseOnOOM(device, pool, use_on_oom);
    }
    void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override {
        native_->setNoSplit(device, pool);
    }
    bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                  const std::unordered_set<void*>& expected) override {
        return native_->checkPoolLiveAllocations(device, pool, expected);
    }
    cca::ShareableHandle shareIpcHandle(void* address) override {
        return native_->shareIpcHandle(address);
    }
    std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
        return native_->getIpcDevPtr(std::move(handle));
    }
    bool isHistoryEnabled() override { return native_->isHistoryEnabled(); }
    void recordHistory(bool enabled, cca::CreateContextFn context, size_t max_entries,
                       cca::RecordContext when, bool clear,
                       const std::vector<std::string>& skip_actions) override {
        native_->recordHistory(enabled, context, max_entries, when, clear, skip_actions);
    }
    void recordAnnotation(
        const std::vector<std::pair<std::string, std::string>>& annotation) override {
        native_->recordAnnotation(annotation);
    }
    void pushCompileContext(std::string& context) override { native_->pushCompileContext(context); }
    void popCompileContext() override { native_->popCompileContext(); }
    void setUserMetadata(const std::string& metadata) override {
        native_->setUserMetadata(metadata);
    }
    std::string getUserMetadata() override { return native_->getUserMetadata(); }
    void attachOutOfMemoryObserver(cca::OutOfMemoryObserver observer) override {
        native_->attachOutOfMemoryObserver(std::move(observer));
    }
    void attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) override {
        native_->attachAllocatorTraceTracker(std::move(tracker));
    }
    void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override {
        native_->enablePeerAccess(device, peer);
    }
    cudaError_t memcpyAsync(void* target, int target_device, const void* source, int source_device,
                            size_t size_bytes, cudaStream_t stream, bool p2p) override {
        return native_->memcpyAsync(target, target_device, source, source_device, size_bytes,
                                    stream, p2p);
    }
    std::shared_ptr<cca::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                            c10::MempoolId_t pool) override {
        return native_->getCheckpointState(device, pool);
    }
    cca::CheckpointDelta setCheckpointPoolState(
        c10::DeviceIndex device, std::shared_ptr<cca::AllocatorState> state) override {
        return native_->setCheckpointPoolState(device, std::move(state));
    }
    // torch asserts that the backend named in its configuration is this one's.
    std::string name() override { return native_->name(); }

    // Since 2.12. The observer's type is that of OutOfMemoryObserver: a function of four numbers.
    using RejectionObserver = std::function<void(int64_t, size_t, size_t, size_t)>;
    virtual void attachOomRejectionObserver(RejectionObserver observer) {
        forward_rejection_observer(*native_, std::move(observer));
    }
    virtual std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* address) {
        return forward_context(*native_, address);
    }
    // Since 2.14 or 2.15.
    virtual bool supportsUserMetadata() { return forward_metadata_support(*native_); }
    virtual void annotateMemory(const void* address, const std::string& metadata) {
        forward_annotation(*native_, address, metadata);
    }
    virtual void markCaptureBegin(c10::DeviceIndex device) { forward_begin(*native_, device); }
    virtual void markCaptureEnd(c10::DeviceIndex device) { forward_end(*native_, device); }
    virtual c10::DataPtr allocateWithAddress(size_t size_bytes, void* address) {
        return forward_allocate_at(*native_, size_bytes, address);
    }

protected:
    cca::CUDAAllocator* native() const { return native_; }

private:
    // Templates, so that a member that this torch lacks is never looked up.
    template <typename Native>
    static void forward_rejection_observer(Native& native, RejectionObserver observer) {
        if constexpr (requires { native.attachOomRejectionObserver(observer); }) {
            native.attachOomRejectionObserver(std::move(observer));
        }
    }
    template <typename Native>
    static std::shared_ptr<c10::GatheredContext> forward_context(Native& native,
                                                                 const void* address) {
        if constexpr (requires { native.getContextForPointer(address); }) {
            return native.getContextForPointer(address);
        } else {
            return nullptr;
        }
    }
    template <typename Native>
    static bool forward_metadata_support(Native& native) {
        if constexpr (requires { native.supportsUserMetadata(); }) {
            return native.supportsUserMetadata();
        } else {
            return false;
        }
    }
    template <typename Native>
    static void forward_annotation(Native& native, const void* address,
                                   const std::string& metadata) {
        if constexpr (requires { native.annotateMemory(address, metadata); }) {
            native.annotateMemory(address, metadata);
        }
    }
    template <typename Native>
    static void forward_begin(Native& native, c10::DeviceIndex device) {
        if constexpr (requires { native.markCaptureBegin(device); }) {
            native.markCaptureBegin(device);
        }
    }
    template <typename Native>
    static void forward_end(Native& native, c10::DeviceIndex device) {
        if constexpr (requires { native.markCaptureEnd(device); }) {
            native.markCaptureEnd(device);
        }
    }
    template <typename Native>
    static c10::DataPtr forward_allocate_at(Native& native, size_t size_bytes, void* address) {
        if constexpr (requires { native.allocateWithAddress(size_bytes, address); }) {
            return native.allocateWithAddress(size_bytes, address);
        } else {
            TORCH_CHECK(false, "allocateWithAddress: this torch has no such call");
        }
    }

    cca::CUDAAllocator* const native_;
};

}  // namespace trainstream
