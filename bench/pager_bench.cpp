// bench/pager_bench.cpp: what managing a storage costs the program where everything fits.
//
// A storage is made and another one ends, as in a training step, with so many alive; beside it, the
// same with the memory alone. A script's own operator takes 5,000 to 20,000 ns to launch.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <map>
#include <vector>

#include "base/bytes.h"
#include "device/device_memory.h"
#include "device/sim_device.h"
#include "pager/host_pool.h"
#include "pager/owner_port.h"
#include "pager/pager.h"

namespace trainstream {
namespace {

/// Memory whose blocks cost next to nothing: addresses of freed ones of the same size, or new ones.
/// Nobody reads or writes there.
class Addresses final : public DeviceMemory {
public:
    void* allocate(size_t size_bytes, StreamId /*stream*/) override {
        const auto address = free_.empty() ? next_ += size_bytes : free_.back();
        if (!free_.empty()) {
            free_.pop_back();
        }
        return reinterpret_cast<void*>(address);
    }
    void free(void* address) noexcept override {
        free_.push_back(reinterpret_cast<uintptr_t>(address));
    }
    std::vector<Region> regions(StreamId /*stream*/) const override { return {}; }
    bool rebuild(StreamId /*stream*/) override { return false; }
    uint64_t budget_bytes() const override { return kTiB; }
    uint64_t peak_bytes() const override { return 0; }

private:
    static constexpr uint64_t kTiB = 1024 * kGiB;
    uintptr_t next_ = kTiB;
    std::vector<uintptr_t> free_;
};

/// Nobody owns anything: no storage ever moves.
class Nobody final : public OwnerPort {
public:
    void* address_of(const void* /*owner*/) const override { return nullptr; }
    size_t holders(const void* /*owner*/) const override { return 1; }
    void remember(void* /*owner*/) override {}
    void forget(void* /*owner*/) noexcept override {}
    bool hold(void* /*owner*/) override { return false; }
    void release(void* /*owner*/) noexcept override {}
    bool repoint(void* /*owner*/, void* /*from*/, void* /*to*/) override { return false; }
};

constexpr size_t kStorageBytes = 32 * kMiB;
constexpr StreamId kStream = 0;

/// `make` and `end` in turn, with state.range(0) storages alive; the one that ends is not the last.
template <typename Make, typename End>
void take_turns(benchmark::State& state, Make make, End end) {
    std::vector<void*> alive(static_cast<size_t>(state.range(0)));
    for (void*& one : alive) {
        one = make();
    }
    size_t turn = 0;
    for (auto _ : state) {
        turn = (turn + 7) % alive.size();
        void* const made = make();
        end(alive[turn]);
        alive[turn] = made;
    }
    for (void* const one : alive) {
        end(one);
    }
}

void memory_alone(benchmark::State& state) {
    Addresses memory;
    take_turns(
        state, [&] { return memory.allocate(kStorageBytes, kStream); },
        [&](void* address) { memory.free(address); });
}
BENCHMARK(memory_alone)->Arg(600);

void managed_where_all_fits(benchmark::State& state) {
    SimDevice device;
    Addresses memory;
    Nobody nobody;
    HostPool host(device, {.limit_bytes = kGiB, .grow_in_background = false});
    Pager pager(device, memory, host, nobody, {});
    for (int step = 0; step < 4; ++step) {
        pager.step_done();  // Uses are no longer announced.
    }
    uint64_t unknown = 0;
    take_turns(
        state, [&] { return pager.allocate(kStorageBytes, kStream); },
        [&](void* address) { unknown += pager.free(address) ? 0 : 1; });
    if (unknown != 0 || pager.stats().resident_bytes != 0) {
        state.SkipWithError("storages were lost");
    }
}
BENCHMARK(managed_where_all_fits)->Arg(600);

}  // namespace
}  // namespace trainstream
