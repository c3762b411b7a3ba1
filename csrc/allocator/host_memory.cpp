#include "allocator/host_memory.h"

#include <atomic>
#include <cstdio>
#include <exception>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "allocator/current_stream.h"
#include "allocator/pager_registry.h"
#include "base/error.h"

#ifdef TS_WITH_CUDA
#include <array>
#include <mutex>

#include "device/cuda_device.h"
#endif

namespace trainstream {

namespace {

#ifdef TS_WITH_CUDA
/// A device whose storages nobody manages.
struct PlainDevice {
    explicit PlainDevice(int index) : device(index), pool(device, {}) {}
    CudaDevice device;
    HostPool pool;
};

HostMemory plain_memory_of(c10::DeviceIndex index) {
    static std::mutex mutex;
    static auto* devices = new std::array<PlainDevice*, 64>{};  // Tensors may outlive all else.
    const std::lock_guard<std::mutex> lock(mutex);
    PlainDevice*& made = devices->at(static_cast<size_t>(index));
    if (made == nullptr) {
        made = new PlainDevice(index);
    }
    return {&made->device, &made->pool};
}
#endif

std::atomic<uint64_t> g_bytes{0};

/// A block of a pool, as the deleter of a tensor.
class BlockOwner {
public:
    BlockOwner(HostMemory memory, c10::Device device, const HostBlock& block)
        : memory_(memory), device_(device), block_(block) {}

    void operator()(void* /*address*/) const {
        if (PagerRegistry::instance().forked()) {
            return;  // The pool is the parent's.
        }
        g_bytes.fetch_sub(block_.size_bytes);
        std::vector<Event> after;
        try {
            after.push_back(memory_.device->record(CurrentStream(device_).id()));
        } catch (const std::exception& error) {
            std::fprintf(stderr, "%s\n", error.what());
            return;  // A broken device may still use the block: it is lost.
        }
        memory_.pool->free(block_, std::move(after));
    }

private:
    HostMemory memory_;
    c10::Device device_;
    HostBlock block_;
};

}  // namespace

HostBlock allocate_host_block(const HostMemory& memory, size_t size_bytes) {
    if (const std::optional<HostBlock> block = memory.pool->allocate(size_bytes)) {
        return *block;
    }
    const HostPoolStats stats = memory.pool->stats();
    throw errors::host_memory_exhausted(size_bytes, stats.in_use_bytes, stats.limit_bytes);
}

uint64_t host_zeros_bytes() { return g_bytes.load(); }

HostMemory host_memory_of(c10::Device device) {
    if (Pager* pager = PagerRegistry::instance().find(device)) {
        return {&pager->device(), &pager->host()};
    }
#ifdef TS_WITH_CUDA
    if (device.is_cuda()) {
        return plain_memory_of(device.index());
    }
#endif
    return {};
}

at::Tensor host_zeros(c10::Device device, at::IntArrayRef sizes, at::IntArrayRef strides,
                      at::ScalarType type) {
    const at::TensorOptions options = at::TensorOptions().dtype(type).device(at::kCPU);
    const HostMemory memory = host_memory_of(device);
    const auto count = static_cast<size_t>(c10::multiply_integers(sizes));
    if (memory.pool == nullptr || count == 0) {
        return at::empty_strided(sizes, strides, options).zero_();
    }
    const HostBlock block = allocate_host_block(memory, count * c10::elementSize(type));
    g_bytes.fetch_add(block.size_bytes);
    return at::from_blob(block.address, sizes, strides, BlockOwner(memory, device, block), options)
        .zero_();
}

}  // namespace trainstream
