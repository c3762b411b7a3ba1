// The GPU's updates against the scalar host kernel. Skipped where no GPU answers.
#include "optim/update_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "optim/staged_update.h"
#include "support/cuda_state.h"

namespace trainstream::optim {
namespace {

using testing::all_formats;
using testing::CudaBytes;
using testing::CudaPlace;
using testing::CudaPlaces;
using testing::CudaState;
using testing::kBf16;
using testing::kF16;
using testing::kF32;
using testing::name_of;
using testing::OptimState;

constexpr uint64_t kSeed = 20262;
constexpr size_t kManyTiles = 100003;  // 48 whole tiles and a rest.
const std::vector<size_t> kCounts = {0, 1, 7, 2047, 2048, 2049, kManyTiles};

/// Weights and gradients on the device, the state on the host: what training uses.
constexpr CudaPlaces kMixed = {CudaPlace::kDevice, CudaPlace::kDevice, CudaPlace::kHostRegister};

/// Few blocks, so that each has many tiles and its ring of stages goes round.
const std::vector<CudaLaunch> kLaunches = {
    {CudaForm::kDirect, 5}, {CudaForm::kBulk, 5}, {CudaForm::kDirect, 32}, {CudaForm::kBulk, 32}};

std::string name_of(const CudaLaunch& launch) {
    return std::string(launch.form == CudaForm::kDirect ? "direct, " : "bulk, ") +
           std::to_string(launch.blocks) + " blocks";
}

class UpdateCudaTest : public ::testing::Test {
protected:
    void SetUp() override {
        const std::string reason = testing::no_cuda_reason();
        if (!reason.empty()) {
            GTEST_SKIP() << reason;
        }
    }
};

struct Step {
    AdamW::Scalars scalars = AdamW::scalars({}, 3, 0.7);
    RoundingKey key = rounding_key(1, 2, 3);
};

/// `state` after a step on the host.
OptimState after_host_step(const OptimState& state, const Step& step) {
    OptimState result = state;
    update(InstructionSet::kScalar, result.formats, result.slice(), step.scalars, step.key);
    return result;
}

/// `state` after a step on the device.
OptimState after_cuda_step(const OptimState& state, const Step& step, const CudaLaunch& launch,
                           CudaPlaces places = kMixed, size_t offset = 0) {
    OptimState result = state;
    const CudaState there(&result, places, offset);
    update_cuda(result.formats, there.slice(), step.scalars, step.key, nullptr, launch);
    there.read();
    return result;
}

/// Every pair of numbers at which GPUs and hosts could differ, once as (p, g) and once as (m, v).
OptimState special_state(Formats formats) {
    std::vector<uint32_t> patterns;
    for (const uint32_t magnitude :
         {0x00000000U, 0x00000001U, 0x00008000U, 0x007FFFFFU, 0x00800000U, 0x33000000U,
          0x33800000U, 0x38800000U, 0x3F800000U, 0x3F808000U, 0x3F817FFFU, 0x3F818000U,
          0x477FE000U, 0x477FF000U, 0x47800000U, 0x7F7F0000U, 0x7F7FFFFFU, 0x7F800000U,
          0x7F800001U, 0x7FC00000U, 0x7FC12345U, 0x7FFFFFFFU}) {
        patterns.push_back(magnitude);
        patterns.push_back(magnitude | 0x80000000U);
    }
    const size_t pairs = patterns.size() * patterns.size();
    OptimState state(formats, 2 * pairs, kSeed);
    for (size_t i = 0; i < pairs; ++i) {
        const float first = float_of_bits(patterns[i % patterns.size()]);
        const float second = float_of_bits(patterns[i / patterns.size()]);
        state.set_master(i, first);
        state.grad.set(i, second);
        state.exp_avg.set(pairs + i, first);
        state.exp_avg_sq.set(pairs + i, second);
    }
    state.write_checksums();
    return state;
}

// Goal: both forms give the host's bits. Method: all formats, counts around a tile's end and of
// many tiles, aligned and one element off; every stream and checksum is compared.
TEST_F(UpdateCudaTest, AgreesWithTheScalarKernelBitForBit) {
    for (const Formats formats : all_formats()) {
        for (const size_t count : kCounts) {
            const OptimState before(formats, count, kSeed);
            const OptimState expected = after_host_step(before, {});
            for (const CudaLaunch& launch : kLaunches) {
                for (const size_t offset : {size_t{0}, size_t{1}}) {
                    const OptimState after = after_cuda_step(before, {}, launch, kMixed, offset);
                    EXPECT_TRUE(after == expected)
                        << name_of(formats) << ", count " << count << ", " << name_of(launch)
                        << ", off by " << offset;
                }
            }
        }
    }
}

// Goal: so they do wherever the state lies.
TEST_F(UpdateCudaTest, PlaceOfTheStateDoesNotMatter) {
    for (const Formats formats : all_formats()) {
        const OptimState before(formats, 10 * kTile + 5, kSeed);
        const OptimState expected = after_host_step(before, {});
        for (const CudaPlace place :
             {CudaPlace::kDevice, CudaPlace::kHostAlloc, CudaPlace::kHostRegister}) {
            for (const CudaLaunch& launch : kLaunches) {
                const OptimState after =
                    after_cuda_step(before, {}, launch, CudaPlaces::all_in(place));
                EXPECT_TRUE(after == expected) << name_of(formats) << ", " << name_of(launch)
                                               << ", place " << static_cast<int>(place);
            }
        }
    }
}

// Goal: so they do for infinities, NaNs, subnormal numbers and ties, for Adam, for maximizing, and
// with a denominator of zero.
TEST_F(UpdateCudaTest, AgreesOnSpecialNumbersAndOtherRules) {
    AdamW::Hyperparameters adam;
    adam.decoupled = false;
    adam.maximize = true;
    AdamW::Hyperparameters no_eps;
    no_eps.eps = 0;
    no_eps.weight_decay = 0;
    for (const Formats formats : all_formats()) {
        const OptimState before = special_state(formats);
        for (const auto& hyper : {AdamW::Hyperparameters{}, adam, no_eps}) {
            const Step step = {AdamW::scalars(hyper, 3, 1.0), {}};
            const OptimState expected = after_host_step(before, step);
            for (const CudaLaunch& launch : kLaunches) {
                EXPECT_TRUE(after_cuda_step(before, step, launch) == expected)
                    << name_of(formats) << ", " << name_of(launch);
            }
        }
    }
}

// Goal: bits agree for numbers nobody thought of. Method: random patterns in every stream, which
// are NaN, infinite or subnormal one time in a hundred, and far apart otherwise.
TEST_F(UpdateCudaTest, AgreesOnRandomPatterns) {
    std::mt19937_64 random(kSeed);
    for (const Formats formats : all_formats()) {
        OptimState before(formats, kManyTiles, kSeed);
        for (size_t i = 0; i < before.count; ++i) {
            before.set_master(i, float_of_bits(static_cast<uint32_t>(random())));
            before.grad.set_bits(i, static_cast<uint32_t>(random()));
            before.exp_avg.set_bits(i, static_cast<uint32_t>(random()));
            before.exp_avg_sq.set_bits(i, static_cast<uint32_t>(random()) & 0x7FFF7FFFU);
        }
        before.write_checksums();
        const OptimState expected = after_host_step(before, {});
        for (const CudaLaunch& launch : kLaunches) {
            EXPECT_TRUE(after_cuda_step(before, {}, launch) == expected)
                << name_of(formats) << ", " << name_of(launch) << ", seed " << kSeed;
        }
    }
}

// Goal: weights changed from outside become the master, in their tile only, also in the last one.
TEST_F(UpdateCudaTest, MasterFollowsWeightsThatWereChangedOutside) {
    for (const NumberFormat param : {kBf16, kF16}) {
        OptimState before({param, kF32, kF32}, 30 * kTile + 9, kSeed);
        for (const size_t changed : {size_t{3}, 11 * kTile + 2047, 30 * kTile + 8}) {
            before.weight.set(changed, 0.75F);
        }
        const OptimState expected = after_host_step(before, {});
        for (const CudaLaunch& launch : kLaunches) {
            EXPECT_TRUE(after_cuda_step(before, {}, launch) == expected) << name_of(launch);
        }
    }
}

// Goal: no mirror is needed, and none is written.
TEST_F(UpdateCudaTest, WorksWithoutAMirror) {
    for (const Formats formats : all_formats()) {
        const OptimState before(formats, 12 * kTile + 3, kSeed);
        OptimState expected = after_host_step(before, {});
        expected.mirror = before.mirror;
        for (const CudaLaunch& launch : kLaunches) {
            OptimState after = before;
            const CudaState there(&after, kMixed, 0);
            Slice slice = there.slice();
            slice.weight_mirror = nullptr;
            const Step step;
            update_cuda(formats, slice, step.scalars, step.key, nullptr, launch);
            there.read();
            EXPECT_TRUE(after == expected) << name_of(formats) << ", " << name_of(launch);
        }
    }
}

// Goal: a step may be split between host and device anywhere. Method: page-locked state; tiles up
// to the split by one, the others by the other; an index beyond 2^32, so that draw keys differ.
TEST_F(UpdateCudaTest, SplitsBetweenHostAndDeviceAgree) {
    constexpr uint64_t kFar = (uint64_t{1} << 32) - 5 * kTile;
    const Step step;
    for (const Formats formats : all_formats()) {
        const OptimState before(formats, 20 * kTile + 77, kSeed);
        OptimState expected = before;
        Slice whole = expected.slice();
        whole.first = kFar;
        update(InstructionSet::kScalar, formats, whole, step.scalars, step.key);
        for (const size_t split : {size_t{0}, size_t{6}, size_t{13}, size_t{21}}) {
            OptimState after = before;
            const CudaState there(&after, CudaPlaces::all_in(CudaPlace::kHostRegister), 0);
            Slice slice = there.slice();
            slice.first = kFar;
            const Slice first = part_of(formats, slice, 0, split);
            const Slice second = part_of(formats, slice, split, 21);
            update_cuda(formats, second, step.scalars, step.key, nullptr, kLaunches[split % 4]);
            update(best_instruction_set(), formats, first, step.scalars, step.key);
            there.read();
            EXPECT_TRUE(after == expected) << name_of(formats) << ", split " << split;
        }
    }
}

// Goal: a step through device buffers gives the same bits. Method: chunks of one tile, of some and
// larger than the parameter, more of them than buffers; state on the host, mixed and on the device.
TEST_F(UpdateCudaTest, StagedUpdateAgreesBitForBit) {
    const Step step;
    for (const size_t chunk_bytes : {size_t{1}, 128 * kKiB, 4 * kMiB}) {
        StagedUpdate staged({.chunk_bytes = chunk_bytes});
        for (const Formats formats : all_formats()) {
            const OptimState before(formats, 20 * kTile + 77, kSeed);
            const OptimState expected = after_host_step(before, step);
            for (const CudaPlaces places : {kMixed, CudaPlaces::all_in(CudaPlace::kHostAlloc),
                                            CudaPlaces::all_in(CudaPlace::kDevice)}) {
                OptimState after = before;
                const CudaState there(&after, places, 0);
                staged.update(formats, there.slice(), step.scalars, step.key, nullptr);
                there.read();
                EXPECT_TRUE(after == expected) << name_of(formats) << ", chunk " << chunk_bytes;
            }
        }
    }
}

// Goal: steps on one stream follow each other. Method: three steps in a row, no wait between them,
// by different forms.
TEST_F(UpdateCudaTest, StepsOfOneStreamFollowEachOther) {
    StagedUpdate staged({.chunk_bytes = 256 * kKiB});
    for (const Formats formats : all_formats()) {
        const OptimState before(formats, 50 * kTile + 1, kSeed);
        const Step step;
        const OptimState expected =
            after_host_step(after_host_step(after_host_step(before, step), step), step);
        OptimState after = before;
        const CudaState there(&after, kMixed, 0);
        update_cuda(formats, there.slice(), step.scalars, step.key, nullptr, kLaunches[0]);
        staged.update(formats, there.slice(), step.scalars, step.key, nullptr);
        update_cuda(formats, there.slice(), step.scalars, step.key, nullptr, kLaunches[1]);
        there.read();
        EXPECT_TRUE(after == expected) << name_of(formats);
    }
}

// Goal: a refused launch is our error, and the next one works.
TEST_F(UpdateCudaTest, RefusedLaunchSaysSo) {
    const OptimState before({}, kTile, kSeed);
    const Step step;
    try {
        after_cuda_step(before, step, {CudaForm::kDirect, 0});
        FAIL() << "a launch of no block was accepted";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kDevice);
        EXPECT_NE(std::string(error.what()).find("optimizer update"), std::string::npos);
    }
    EXPECT_TRUE(after_cuda_step(before, step, {}) == after_host_step(before, step));
}

}  // namespace
}  // namespace trainstream::optim
