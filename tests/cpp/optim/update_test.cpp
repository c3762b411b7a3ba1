#include "optim/update.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "support/optim_state.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trainstream::optim {
namespace {

using testing::all_formats;
using testing::kBf16;
using testing::kF16;
using testing::kF32;
using testing::name_of;
using testing::Numbers;
using testing::OptimState;
using testing::vector_instruction_sets;

constexpr uint64_t kSeed = 20261;
// Of every remainder modulo 8 and 16 lanes, around a tile's end, and some tiles with a rest.
const std::vector<size_t> kCounts = {0, 1, 7, 8, 9, 15, 16, 17, 31, 2047, 2048, 2049, 10003};

void run_steps(InstructionSet set, OptimState& state, int steps = 2,
               AdamW::Hyperparameters hyper = {}) {
    for (int step = 1; step <= steps; ++step) {
        state.new_gradient(kSeed + static_cast<uint64_t>(step));
        const auto scalars = AdamW::scalars(hyper, step, 0.7);
        update(set, state.formats, state.slice(), scalars, rounding_key(1, 2, 3));
    }
}

/// Numbers at which instruction sets could differ.
std::vector<uint32_t> special_patterns() {
    std::vector<uint32_t> patterns;
    for (const uint32_t magnitude :
         {0x00000000U, 0x00000001U, 0x00008000U, 0x007FFFFFU, 0x00800000U, 0x33000000U,
          0x33800000U, 0x38800000U, 0x3F800000U, 0x3F808000U, 0x3F817FFFU, 0x3F818000U,
          0x477FE000U, 0x477FF000U, 0x47800000U, 0x7F7F0000U, 0x7F7FFFFFU, 0x7F800000U,
          0x7F800001U, 0x7FC00000U, 0x7FC12345U, 0x7FFFFFFFU}) {
        patterns.push_back(magnitude);
        patterns.push_back(magnitude | 0x80000000U);
    }
    return patterns;
}

/// Every pair of special patterns, once as (p, g) and once as (m, v).
OptimState special_state(Formats formats) {
    const std::vector<uint32_t> patterns = special_patterns();
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

// Goal: the instruction sets give the same bits. Method: all formats, counts with every kind of
// rest, addresses off by one element; every stream and checksum is compared.
TEST(UpdateTest, InstructionSetsAgreeBitForBit) {
    if (vector_instruction_sets().empty()) {
        GTEST_SKIP() << "this machine has neither AVX2 nor AVX-512";
    }
    for (const Formats formats : all_formats()) {
        for (const size_t count : kCounts) {
            const size_t offset = count % 3;
            const OptimState before(formats, count, kSeed, offset);
            OptimState expected = before;
            run_steps(InstructionSet::kScalar, expected);
            for (const InstructionSet set : vector_instruction_sets()) {
                OptimState state = before;
                run_steps(set, state);
                EXPECT_TRUE(state == expected)
                    << name_of(set) << ", " << name_of(formats) << ", count " << count;
            }
        }
    }
}

// Goal: so they do for infinities, NaNs, subnormal numbers and ties, for Adam, for maximizing, and
// with a denominator of zero.
TEST(UpdateTest, InstructionSetsAgreeOnSpecialNumbersAndOtherRules) {
    AdamW::Hyperparameters adam;
    adam.decoupled = false;
    adam.maximize = true;
    AdamW::Hyperparameters no_eps;
    no_eps.eps = 0;
    no_eps.weight_decay = 0;
    for (const Formats formats : all_formats()) {
        for (const auto& hyper : {AdamW::Hyperparameters{}, adam, no_eps}) {
            OptimState expected = special_state(formats);
            const auto scalars = AdamW::scalars(hyper, 3, 1.0);
            update(InstructionSet::kScalar, formats, expected.slice(), scalars, {});
            for (const InstructionSet set : vector_instruction_sets()) {
                OptimState state = special_state(formats);
                update(set, formats, state.slice(), scalars, {});
                EXPECT_TRUE(state == expected) << name_of(set) << ", " << name_of(formats);
            }
        }
    }
}

// Goal: where a parameter is cut does not matter. Method: in 1, 2, 3 and random pieces at tiles'
// borders, each updated by another instruction set, in reverse order.
TEST(UpdateTest, SplitsAgreeBitForBit) {
    std::vector<InstructionSet> sets = vector_instruction_sets();
    sets.push_back(InstructionSet::kScalar);
    std::mt19937_64 random(kSeed);
    const auto scalars = AdamW::scalars({}, 5, 1.0);
    const RoundingKey key = rounding_key(7, 8, 9);
    for (const Formats formats : all_formats()) {
        const OptimState before(formats, 8 * kTile + 77, kSeed);
        OptimState expected = before;
        update(InstructionSet::kScalar, formats, expected.slice(), scalars, key);
        for (int round = 0; round < 6; ++round) {
            OptimState state = before;
            size_t end = tile_count(state.count);
            for (int piece = 0; end > 0; ++piece) {
                const bool last = piece >= round;
                const size_t begin = last ? 0 : random() % end;
                const Slice part = part_of(formats, state.slice(), begin, end - begin);
                update(sets[static_cast<size_t>(piece) % sets.size()], formats, part, scalars, key);
                end = begin;
            }
            EXPECT_TRUE(state == expected) << name_of(formats) << ", pieces " << round + 1;
        }
    }
}

// Goal: a thread that flushes subnormal numbers, or rounds otherwise, gets the same bits, and its
// environment back.
TEST(UpdateTest, FloatEnvironmentOfTheThreadDoesNotMatter) {
#if defined(__x86_64__)
    for (const Formats formats : all_formats()) {
        OptimState expected = special_state(formats);
        OptimState state = special_state(formats);
        const auto scalars = AdamW::scalars({}, 1, 1.0);
        update(best_instruction_set(), formats, expected.slice(), scalars, {});

        const unsigned usual = _mm_getcsr();
        const unsigned other = usual | 0x8040U | 0x2000U;  // Flush both ways, round down.
        _mm_setcsr(other);
        update(best_instruction_set(), formats, state.slice(), scalars, {});
        const unsigned after = _mm_getcsr();
        _mm_setcsr(usual);

        EXPECT_EQ(after, other);
        EXPECT_TRUE(state == expected) << name_of(formats);
    }
#else
    GTEST_SKIP() << "only x86 keeps it in a register that we set";
#endif
}

// Goal: one kind of NaN is stored, infinite weights without decay of zero stay what they are.
TEST(UpdateTest, StoresOneNanAndKeepsInfinities) {
    for (const Formats formats : all_formats()) {
        OptimState state = special_state(formats);
        for (size_t i = 0; i < state.count; ++i) {
            state.grad.set(i, i % 2 == 0 ? 0.0F : -NAN);
            state.exp_avg.set(i, 0.0F);
            state.exp_avg_sq.set(i, 1.0F);
            state.set_master(i, i % 4 == 0 ? INFINITY : -INFINITY);
        }
        state.write_checksums();
        update(best_instruction_set(), formats, state.slice(), AdamW::scalars({}, 1, 1.0), {});

        for (size_t i = 0; i < state.count; ++i) {
            if (i % 2 == 0) {
                ASSERT_EQ(state.get_master(i), i % 4 == 0 ? INFINITY : -INFINITY);
                continue;
            }
            ASSERT_EQ(bits_of_float(state.get_master(i)), kCanonicalNan) << name_of(formats);
            ASSERT_EQ(bits_of_float(state.exp_avg.get(i)), kCanonicalNan);
            ASSERT_EQ(bits_of_float(state.exp_avg_sq.get(i)), kCanonicalNan);
        }
    }
}

// Goal: the mirror receives the new weights, and none is needed.
TEST(UpdateTest, MirrorHoldsTheNewWeights) {
    for (const Formats formats : all_formats()) {
        OptimState state(formats, 2 * kTile + 3, kSeed);
        run_steps(best_instruction_set(), state);
        EXPECT_TRUE(state.mirror == state.weight) << name_of(formats);

        OptimState without(formats, state.count, kSeed);
        Slice slice = without.slice();
        slice.weight_mirror = nullptr;
        without.new_gradient(kSeed + 1);
        update(best_instruction_set(), formats, slice, AdamW::scalars({}, 1, 0.7),
               rounding_key(1, 2, 3));
        EXPECT_TRUE(without.mirror == Numbers(formats.param, state.count, 0));
    }
}

/// After this, an update writes the master that it read.
AdamW::Scalars standing_still() {
    AdamW::Hyperparameters hyper;
    hyper.lr = 0;
    return AdamW::scalars(hyper, 1, 1.0);
}

// Goal: weights changed from outside become the master, in their tile only; a change away and back
// loses nothing. Method: an update with lr 0, which leaves a master as it finds it.
TEST(UpdateTest, MasterFollowsBfloat16WeightsThatWereChangedOutside) {
    const Formats formats = {kBf16, kF32, kF32};
    OptimState state(formats, 3 * kTile, kSeed);
    const OptimState before = state;
    const size_t changed = kTile + 100;

    const uint32_t kept = state.weight.bits(changed);
    state.weight.set_bits(changed, kept ^ 1U);
    state.weight.set_bits(changed, kept);
    update(best_instruction_set(), formats, state.slice(), standing_still(), {});
    EXPECT_TRUE(state.weight == before.weight && state.remainder == before.remainder);

    state.weight.set(changed, 0.75F);
    update(best_instruction_set(), formats, state.slice(), standing_still(), {});
    EXPECT_EQ(state.get_master(changed), 0.75F);
    for (size_t i = 0; i < state.count; ++i) {
        const bool same_tile = i / kTile == changed / kTile;
        ASSERT_EQ(state.get_master(i), same_tile ? state.weight.get(i) : before.get_master(i)) << i;
    }
    const std::vector<uint32_t> checksums = state.checksums;
    state.write_checksums();
    EXPECT_EQ(checksums, state.checksums);  // The new ones are those of the new weights.
}

// Goal: an fp16 weight that is not its master's rounding becomes the master; others keep theirs.
TEST(UpdateTest, MasterFollowsFloat16WeightsThatWereChangedOutside) {
    const Formats formats = {kF16, kF32, kF32};
    OptimState state(formats, kTile + 5, kSeed);
    state.set_master(3, 1e6F);  // Infinite in fp16, and not changed from outside.
    const OptimState before = state;
    state.weight.set(7, 0.75F);
    state.weight.set(kTile + 4, -0.5F);

    update(best_instruction_set(), formats, state.slice(), standing_still(), {});

    for (size_t i = 0; i < state.count; ++i) {
        const float expected = i == 7 ? 0.75F : i == kTile + 4 ? -0.5F : before.get_master(i);
        ASSERT_EQ(state.get_master(i), expected) << i;
    }
}

// Goal: draws depend on the element's index in its parameter alone. Method: the second tile of a
// parameter, and a slice that claims to begin there.
TEST(UpdateTest, DrawsFollowTheIndexInTheParameter) {
    const Formats formats = {kF32, kF32, kBf16};
    const auto scalars = AdamW::scalars({}, 1, 1.0);
    OptimState whole(formats, 2 * kTile, kSeed);
    OptimState part = whole;
    OptimState elsewhere = whole;
    update(best_instruction_set(), formats, whole.slice(), scalars, rounding_key(1, 2, 3));

    const Slice second = part_of(formats, part.slice(), 1, 1);
    EXPECT_EQ(second.first, kTile);
    update(best_instruction_set(), formats, second, scalars, rounding_key(1, 2, 3));
    Slice far = part_of(formats, elsewhere.slice(), 1, 1);
    far.first += uint64_t{1} << 32;
    update(best_instruction_set(), formats, far, scalars, rounding_key(1, 2, 3));

    size_t differing = 0;
    for (size_t i = kTile; i < 2 * kTile; ++i) {
        ASSERT_EQ(part.exp_avg.bits(i), whole.exp_avg.bits(i));
        ASSERT_EQ(part.exp_avg_sq.bits(i), whole.exp_avg_sq.bits(i));
        differing += elsewhere.exp_avg.bits(i) != whole.exp_avg.bits(i) ? 1 : 0;
    }
    EXPECT_GT(differing, kTile / 8);  // Draws of another block: a third of them round otherwise.
}

}  // namespace
}  // namespace trainstream::optim
