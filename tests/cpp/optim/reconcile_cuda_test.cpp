// Host state after weights were changed on the device. Skipped where no GPU answers.
#include "optim/reconcile_cuda.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "support/cuda_state.h"

namespace trainstream::optim {
namespace {

using testing::CudaBytes;
using testing::CudaPlace;
using testing::kBf16;
using testing::kF32;
using testing::OptimState;

constexpr uint64_t kSeed = 20264;

class ReconcileCudaTest : public ::testing::Test {
protected:
    void SetUp() override {
        const std::string reason = testing::no_cuda_reason();
        if (!reason.empty()) {
            GTEST_SKIP() << reason;
        }
    }
};

/// Weights on the device, changed there, and the state on the host that does not know yet.
struct Changed {
    Changed(size_t count, size_t offset, const std::vector<size_t>& places)
        : state({kBf16, kF32, kF32}, count, kSeed),
          before(state),
          device(CudaPlace::kDevice, (count + offset) * 2),
          host(CudaPlace::kHostAlloc, (count + offset) * 2),
          remainder(CudaPlace::kHostAlloc, (count + offset) * 2),
          checksums(CudaPlace::kHostAlloc, tile_count(count) * 4),
          first(offset) {
        std::memcpy(host_weights(), before.weight.data(), count * 2);
        std::memcpy(remainders(), before.remainder.data(), count * 2);
        std::memcpy(checksums.data(), before.checksums.data(), tile_count(count) * 4);
        for (const size_t place : places) {
            state.weight.set_bits(place, state.weight.bits(place) ^ 1U);
        }
        check_cuda("cudaMemcpy",
                   cudaMemcpy(device_weights(), state.weight.data(), count * 2, cudaMemcpyDefault));
    }

    void reconcile(bool with_host_weights = true) {
        reconcile_cuda(device_weights(), state.count, reinterpret_cast<uint32_t*>(checksums.data()),
                       with_host_weights ? host_weights() : nullptr, remainders(), nullptr);
        check_cuda("cudaDeviceSynchronize", cudaDeviceSynchronize());
    }

    uint16_t* device_weights() { return reinterpret_cast<uint16_t*>(device.data()) + first; }
    uint16_t* host_weights() { return reinterpret_cast<uint16_t*>(host.data()) + first; }
    int16_t* remainders() { return reinterpret_cast<int16_t*>(remainder.data()) + first; }

    OptimState state;
    OptimState before;
    CudaBytes device;
    CudaBytes host;
    CudaBytes remainder;
    CudaBytes checksums;
    size_t first;
};

void expect_followed(Changed& changed, const std::vector<size_t>& places) {
    std::vector<bool> is_changed(tile_count(changed.state.count));
    for (const size_t place : places) {
        is_changed[place / kTile] = true;
    }
    for (size_t i = 0; i < changed.state.count; ++i) {
        const auto old = static_cast<int16_t>(changed.before.remainder.bits(i));
        ASSERT_EQ(changed.host_weights()[i], changed.state.weight.bits(i)) << i;
        ASSERT_EQ(changed.remainders()[i], is_changed[i / kTile] ? 0 : old) << i;
    }
    changed.state.write_checksums();
    EXPECT_EQ(std::memcmp(changed.checksums.data(), changed.state.checksums.data(),
                          is_changed.size() * 4),
              0);
}

// Goal: host weights, remainders and table follow, in changed tiles only. Method: one weight
// changed by one bit in a first, an inner and the last element; aligned and not.
TEST_F(ReconcileCudaTest, ChangedTilesAreFollowed) {
    for (const size_t count :
         {size_t{1}, size_t{2047}, size_t{2049}, 100 * kTile, size_t{500003}}) {
        for (const size_t offset : {size_t{0}, size_t{1}}) {
            const std::vector<size_t> places = {0, count / 2, count - 1};
            Changed changed(count, offset, places);
            changed.reconcile();
            expect_followed(changed, places);
        }
    }
}

// Goal: nothing is written where nothing changed. Method: host weights that differ from the
// device's, which a write would repair.
TEST_F(ReconcileCudaTest, UnchangedTilesAreLeftAlone) {
    Changed changed(20 * kTile + 7, 0, {});
    std::memset(changed.host_weights(), 0x11, changed.state.count * 2);
    changed.reconcile();
    for (size_t i = 0; i < changed.state.count; ++i) {
        ASSERT_EQ(changed.host_weights()[i], 0x1111U);
        ASSERT_EQ(static_cast<uint16_t>(changed.remainders()[i]), changed.before.remainder.bits(i));
    }
}

// Goal: weights that live on the device alone have no host copy to write.
TEST_F(ReconcileCudaTest, HostWeightsAreOptional) {
    const std::vector<size_t> places = {5, 3 * kTile};
    Changed changed(4 * kTile, 0, places);
    changed.reconcile(/*with_host_weights=*/false);
    EXPECT_EQ(
        std::memcmp(changed.host_weights(), changed.before.weight.data(), changed.state.count * 2),
        0);
    std::memcpy(changed.host_weights(), changed.state.weight.data(), changed.state.count * 2);
    expect_followed(changed, places);
}

}  // namespace
}  // namespace trainstream::optim
