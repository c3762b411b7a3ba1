// The GPU's sums of squares against the host's. Skipped where no GPU answers.
#include "optim/square_sums_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "support/cuda_state.h"

namespace trainstream::optim {
namespace {

using testing::CudaBytes;
using testing::CudaPlace;
using testing::kBf16;
using testing::kF16;
using testing::kF32;
using testing::Numbers;
using testing::OptimState;

constexpr uint64_t kSeed = 20263;
const std::vector<size_t> kCounts = {0, 1, 7, 15, 16, 17, 511, 2047, 2048, 2049, 100003};

class SquareSumsCudaTest : public ::testing::Test {
protected:
    void SetUp() override {
        const std::string reason = testing::no_cuda_reason();
        if (!reason.empty()) {
            GTEST_SKIP() << reason;
        }
    }
};

std::vector<double> host_sums(NumberFormat format, const Numbers& grad, size_t count) {
    std::vector<double> sums(tile_count(count));
    tile_square_sums(InstructionSet::kScalar, format, grad.data(), count, sums.data());
    return sums;
}

/// The tiles' sums, and behind them what they add to 1.5.
std::vector<double> cuda_sums(NumberFormat format, const Numbers& grad, size_t count,
                              CudaPlace place, size_t offset) {
    const size_t tiles = tile_count(count);
    const CudaBytes there(place, (count + offset) * bytes_of(format));
    const CudaBytes sums(CudaPlace::kHostAlloc, (tiles + 1) * sizeof(double));
    void* const from = there.data() + offset * bytes_of(format);
    check_cuda("cudaMemcpy",
               cudaMemcpy(from, grad.data(), count * bytes_of(format), cudaMemcpyDefault));
    auto* const results = reinterpret_cast<double*>(sums.data());
    results[tiles] = 1.5;
    tile_square_sums_cuda(format, from, count, results, nullptr);
    add_in_order_cuda(results, tiles, results + tiles, nullptr);
    check_cuda("cudaDeviceSynchronize", cudaDeviceSynchronize());
    return {results, results + tiles + 1};
}

// Goal: a norm is the same whoever computes it. Method: every format and count, aligned and not,
// on the device and on the host.
TEST_F(SquareSumsCudaTest, AgreeWithTheHostBitForBit) {
    for (const NumberFormat format : {kF32, kBf16, kF16}) {
        for (const size_t count : kCounts) {
            const OptimState state({.grad = format}, count, kSeed);
            std::vector<double> expected = host_sums(format, state.grad, count);
            double total = 1.5;
            for (const double sum : expected) {
                total += sum;
            }
            expected.push_back(total);
            for (const CudaPlace place : {CudaPlace::kDevice, CudaPlace::kHostRegister}) {
                for (const size_t offset : {size_t{0}, size_t{1}}) {
                    EXPECT_EQ(cuda_sums(format, state.grad, count, place, offset), expected)
                        << "format " << static_cast<int>(format) << ", count " << count
                        << ", off by " << offset;
                }
            }
        }
    }
}

// Goal: what is not finite shows, with the same bits. Method: NaNs of several kinds, infinities,
// the largest numbers; compared as bytes, since a NaN equals nothing.
TEST_F(SquareSumsCudaTest, AgreeOnNumbersThatAreNotFinite) {
    for (const NumberFormat format : {kF32, kBf16, kF16}) {
        for (const float special : {NAN, -NAN, INFINITY, -INFINITY, 3e38F, 1e-45F}) {
            OptimState state({.grad = format}, 5 * kTile, kSeed);
            state.grad.set(2 * kTile + 77, special);
            const std::vector<double> expected = host_sums(format, state.grad, state.count);
            const std::vector<double> sums =
                cuda_sums(format, state.grad, state.count, CudaPlace::kDevice, 0);
            EXPECT_EQ(std::memcmp(sums.data(), expected.data(), 5 * sizeof(double)), 0)
                << "format " << static_cast<int>(format) << ", " << special;
        }
    }
}

}  // namespace
}  // namespace trainstream::optim
