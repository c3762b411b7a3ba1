// bench/host_pool_bench.cpp: how fast page-locked memory is made, and how much more than asked.
//
// Blocks have the sizes of a 7.62 B Qwen2 layer in bfloat16. Beside it the runtime's own
// page-locked allocation, in the same run. Every block is written and read back.
#include <benchmark/benchmark.h>

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "device/sim_device.h"
#include "pager/host_pool.h"

#ifdef TS_WITH_CUDA
#include <cuda_runtime_api.h>

#include "device/cuda_device.h"
#endif

namespace trainstream {
namespace {

// gate, up, down: 18944 x 3584; q, o: 3584 x 3584; k, v: 512 x 3584; two bytes a number.
constexpr std::array<size_t, 7> kLayerBytes = {
    18944UL * 3584 * 2, 18944UL * 3584 * 2, 18944UL * 3584 * 2, 3584UL * 3584 * 2,
    3584UL * 3584 * 2,  512UL * 3584 * 2,   512UL * 3584 * 2};

bool holds_pattern(const HostBlock& block, unsigned char pattern) {
    auto* bytes = static_cast<unsigned char*>(block.address);
    std::memset(bytes, pattern, 64);
    bytes[block.size_bytes - 1] = pattern;
    return bytes[63] == pattern && bytes[block.size_bytes - 1] == pattern;
}

void make_blocks(benchmark::State& state, Device& device) {
    const auto asked_max = static_cast<uint64_t>(state.range(0)) * kGiB;
    double ratio = 0;
    double asked_total = 0;
    for (auto _ : state) {
        HostPoolOptions options;
        options.limit_bytes = asked_max + asked_max / 16 + 64 * kMiB;
        auto pool = std::make_unique<HostPool>(device, options);
        std::vector<HostBlock> blocks;
        uint64_t asked = 0;
        for (size_t i = 0; asked + kLayerBytes[i % 7] <= asked_max; ++i) {
            const std::optional<HostBlock> block = pool->allocate(kLayerBytes[i % 7]);
            if (!block || !block->device_visible || !holds_pattern(*block, 0xA5)) {
                state.SkipWithError("a block was refused, not locked, or lost its bytes");
                return;
            }
            asked += block->size_bytes;
            blocks.push_back(*block);
        }
        const HostPoolStats stats = pool->stats();
        ratio = static_cast<double>(stats.locked_bytes) / static_cast<double>(asked);
        asked_total += static_cast<double>(asked);
        state.PauseTiming();
        for (const HostBlock& block : blocks) {
            pool->free(block, {});
        }
        pool.reset();
        state.ResumeTiming();
    }
    state.counters["locked_over_asked"] = ratio;
    state.counters["bytes_per_second"] =
        benchmark::Counter(asked_total, benchmark::Counter::kIsRate);
}

#ifdef TS_WITH_CUDA
void BM_HostPoolOnCuda(benchmark::State& state) {
    std::string reason;
    if (CudaDevice::count(&reason) == 0) {
        state.SkipWithError(reason.c_str());
        return;
    }
    CudaDevice device(0);
    make_blocks(state, device);
}
BENCHMARK(BM_HostPoolOnCuda)->Arg(4)->Arg(16)->Iterations(1)->UseRealTime();

/// The reference: cudaHostAlloc of the same bytes in blocks of one layer.
void BM_CudaHostAlloc(benchmark::State& state) {
    const size_t size_bytes = kLayerBytes[0];
    double asked = 0;
    for (auto _ : state) {
        std::vector<void*> blocks;
        for (int i = 0; i < 16; ++i) {
            void* block = nullptr;
            if (cudaHostAlloc(&block, size_bytes, cudaHostAllocPortable) != cudaSuccess) {
                state.SkipWithError("cudaHostAlloc refused");
                return;
            }
            blocks.push_back(block);
            asked += static_cast<double>(size_bytes);
        }
        state.PauseTiming();
        for (void* block : blocks) {
            cudaFreeHost(block);
        }
        state.ResumeTiming();
    }
    state.counters["bytes_per_second"] = benchmark::Counter(asked, benchmark::Counter::kIsRate);
}
BENCHMARK(BM_CudaHostAlloc)->Iterations(1)->UseRealTime();
#endif

void BM_HostPoolOnSim(benchmark::State& state) {
    SimDevice device;
    make_blocks(state, device);
}
BENCHMARK(BM_HostPoolOnSim)->Arg(1)->Iterations(1)->UseRealTime();

}  // namespace
}  // namespace trainstream
