#include "allocator/pager_registry.h"

#include <pthread.h>

namespace trainstream {

PagerRegistry& PagerRegistry::instance() {
    static auto* registry = new PagerRegistry;
    return *registry;
}

PagerRegistry::PagerRegistry() {
    pthread_atfork(nullptr, nullptr, [] { instance().forked_.store(true); });
}

void PagerRegistry::add(c10::Device device, Pager* pager) {
    const size_t slot = device.is_cpu() ? 0 : 1 + static_cast<size_t>(device.index());
    slots_.at(slot).store(pager, std::memory_order_release);
    size_t used = slots_used_.load();
    while (used <= slot && !slots_used_.compare_exchange_weak(used, slot + 1)) {
    }
}

Pager* PagerRegistry::find(c10::Device device) const {
    if (device.is_cpu()) {
        return slots_[0].load(std::memory_order_acquire);
    }
    const auto slot = 1 + static_cast<size_t>(device.index());
    const bool known = device.is_cuda() && device.index() >= 0 && slot < slots_.size();
    return known ? slots_[slot].load(std::memory_order_acquire) : nullptr;
}

std::optional<c10::Device> PagerRegistry::device_of(const Pager& pager) const {
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
        if (slots_[slot].load(std::memory_order_acquire) == &pager) {
            return slot == 0 ? c10::Device(c10::kCPU)
                             : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(slot - 1));
        }
    }
    return std::nullopt;
}

void managed_deleter(void* address) {
    const PagerRegistry& registry = PagerRegistry::instance();
    if (address == nullptr || registry.forked()) {
        return;
    }
    bool freed = false;
    registry.for_each([&](Pager& pager) { freed = freed || pager.free(address); });
}

}  // namespace trainstream
