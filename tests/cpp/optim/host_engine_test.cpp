#include "optim/host_engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "base/error.h"
#include "support/optim_state.h"

namespace trainstream::optim {
namespace {

using testing::all_formats;
using testing::kBf16;
using testing::kF16;
using testing::kF32;
using testing::Numbers;
using testing::OptimState;

/// Parameters of every format and many sizes, small ones between large ones.
std::vector<OptimState> make_parameters() {
    std::vector<OptimState> parameters;
    size_t number = 0;
    const std::vector<size_t> counts = {0, 1, 3 * kTile, 17, 0, 0, 10 * kTile + 5, 2047, 100003};
    for (const Formats formats : all_formats()) {
        parameters.emplace_back(formats, counts[number % counts.size()], number, number % 2);
        ++number;
    }
    return parameters;
}

std::vector<SliceUpdate> updates_of(std::vector<OptimState>& parameters) {
    std::vector<SliceUpdate> updates;
    for (OptimState& parameter : parameters) {
        updates.push_back({parameter.formats, parameter.slice(), AdamW::scalars({}, 3, 0.5),
                           rounding_key(1, updates.size(), 3)});
    }
    return updates;
}

// Goal: how many threads work does not matter. Method: against one scalar kernel for each whole
// parameter, for 1, 2, 7 and 16 threads of the best instruction set.
TEST(HostEngineTest, ThreadCountsAgreeBitForBit) {
    std::vector<OptimState> expected = make_parameters();
    for (const SliceUpdate& one : updates_of(expected)) {
        update(InstructionSet::kScalar, one.formats, one.slice, one.scalars, one.key);
    }
    for (const size_t threads : {1, 2, 7, 16}) {
        HostEngine engine({.threads = threads});
        EXPECT_EQ(engine.threads(), threads);
        EXPECT_EQ(engine.instruction_set(), best_instruction_set());
        std::vector<OptimState> parameters = make_parameters();
        const std::vector<SliceUpdate> updates = updates_of(parameters);
        engine.update(updates);
        for (size_t i = 0; i < parameters.size(); ++i) {
            EXPECT_TRUE(parameters[i] == expected[i]) << threads << " threads, parameter " << i;
        }
    }
}

TEST(HostEngineTest, NothingToDoIsDone) {
    HostEngine engine({.threads = 2});
    engine.update({});
    EXPECT_EQ(engine.sum_of_squares({}), 0.0);
}

TEST(HostEngineTest, InstructionSetThatIsMissingIsRefused) {
    for (const auto set : {InstructionSet::kAvx2, InstructionSet::kAvx512}) {
        if (!is_supported(set)) {
            EXPECT_THROW(HostEngine({.threads = 1, .instruction_set = set}), Error);
            return;
        }
    }
    GTEST_SKIP() << "this machine has every instruction set";
}

class SumOfSquaresTest : public ::testing::TestWithParam<NumberFormat> {
protected:
    static Numbers numbers(size_t count) {
        const OptimState state({.grad = GetParam()}, count, 31);
        return state.grad;
    }
    static Gradient gradient(const Numbers& numbers, size_t begin, size_t end) {
        const auto address = reinterpret_cast<uintptr_t>(numbers.data());
        return {GetParam(), reinterpret_cast<const void*>(address + begin * bytes_of(GetParam())),
                end - begin};
    }
    static double sum_of(HostEngine& engine, const Numbers& numbers, size_t count) {
        const Gradient whole = gradient(numbers, 0, count);
        return engine.sum_of_squares({&whole, 1});
    }
};
INSTANTIATE_TEST_SUITE_P(Formats, SumOfSquaresTest, ::testing::Values(kF32, kBf16, kF16));

// Goal: the sum is right and its bits depend on nothing but the numbers. Method: counts with every
// kind of rest; instruction sets, threads, and cuts at random tiles' borders.
TEST_P(SumOfSquaresTest, InstructionSetsThreadsAndSplitsAgreeBitForBit) {
    HostEngine scalar({.threads = 1, .instruction_set = InstructionSet::kScalar});
    std::mt19937_64 random(3);
    for (const size_t count : {0UL, 1UL, 7UL, 15UL, 16UL, 17UL, 2047UL, 2048UL, 2049UL, 100003UL}) {
        const Numbers values = numbers(count);
        long double exact = 0;
        for (size_t i = 0; i < count; ++i) {
            exact += static_cast<long double>(values.get(i)) * values.get(i);
        }
        const double expected = sum_of(scalar, values, count);
        // 2048 / 16 + 4 additions in a tile and one for each tile, 2^-53 each.
        const double roundings = 132 + static_cast<double>(tile_count(count));
        EXPECT_NEAR(expected, static_cast<double>(exact), roundings * 0x1p-53 * expected);

        for (const auto set : testing::vector_instruction_sets()) {
            for (const size_t threads : {1, 2, 7, 16}) {
                HostEngine engine({.threads = threads, .instruction_set = set});
                EXPECT_EQ(sum_of(engine, values, count), expected) << name_of(set) << threads;
            }
        }
        HostEngine engine({.threads = 2});
        for (int round = 0; round < 5; ++round) {
            std::vector<Gradient> parts;
            for (size_t begin = 0; begin < count;) {
                const size_t end = std::min(count, begin + kTile * (1 + random() % 20));
                parts.push_back(gradient(values, begin, end));
                begin = end;
            }
            EXPECT_EQ(engine.sum_of_squares(parts), expected);
        }
    }
}

// Goal: the sum is not finite exactly if an element is not. Method: one infinity or NaN in any
// place; without one, the largest finite number everywhere.
TEST_P(SumOfSquaresTest, IsFiniteExactlyIfEveryElementIs) {
    constexpr size_t kCount = kTile + 19;
    HostEngine engine({.threads = 2});
    Numbers values(GetParam(), kCount, 0);
    const float largest = GetParam() == kF16 ? 65504.0F : 0x1.FEp127F;
    for (size_t i = 0; i < kCount; ++i) {
        values.set(i, i % 2 == 0 ? largest : -largest);
    }
    EXPECT_TRUE(std::isfinite(sum_of(engine, values, kCount)));
    for (const size_t place : {0UL, 1UL, 15UL, 16UL, 100UL, kTile - 1, kTile, kTile + 18}) {
        for (const float bad : {INFINITY, -INFINITY, NAN}) {
            const float good = values.get(place);
            values.set(place, bad);
            EXPECT_FALSE(std::isfinite(sum_of(engine, values, kCount))) << place;
            values.set(place, good);
        }
    }
}

// Goal: a NaN makes the same NaN on every instruction set, whatever its sign and payload.
TEST_P(SumOfSquaresTest, NanSumsHaveTheSameBits) {
    Numbers values(GetParam(), kTile, 0);
    for (size_t i = 0; i < kTile; ++i) {
        values.set(i, i == 3 ? -NAN : i == 700 ? INFINITY : 1.0F);
    }
    for (const auto set : testing::vector_instruction_sets()) {
        HostEngine engine({.threads = 1, .instruction_set = set});
        HostEngine scalar({.threads = 1, .instruction_set = InstructionSet::kScalar});
        const double sum = sum_of(engine, values, kTile);
        const double expected = sum_of(scalar, values, kTile);
        EXPECT_EQ(std::memcmp(&sum, &expected, sizeof sum), 0);
    }
}

}  // namespace
}  // namespace trainstream::optim
