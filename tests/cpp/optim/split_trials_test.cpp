#include "optim/split_trials.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>

namespace trainstream::optim {
namespace {

/// Nanoseconds of an element for each split.
using Rates = std::map<Split, double>;
using Noise = std::function<double()>;

constexpr size_t kRun = 2 * SplitTrials::kElements;
constexpr int kTrial = 2 * SplitTrials::kRuns;

const Rates kCoresWin = {{Split::kBoth, 0.176}, {Split::kCores, 0.164}};
const Rates kBothWin = {{Split::kBoth, 0.130}, {Split::kCores, 0.139}};

/// A machine, on which `runs` runs are made. Returns the nanoseconds that an element took.
double run(
    SplitTrials* trials, const Rates& rates, int runs, const Noise& noise = [] { return 1.0; }) {
    double total_ns = 0;
    double total_elements = 0;
    for (int i = 0; i < runs; ++i) {
        const SplitTrials::Turn turn = trials->next(kRun);
        const size_t elements = turn.timed ? SplitTrials::kElements : kRun;
        const double ns = rates.at(turn.split) * static_cast<double>(elements) * noise();
        if (turn.timed) {
            trials->note(turn.split, elements, static_cast<uint64_t>(ns));
        }
        total_ns += ns;
        total_elements += static_cast<double>(elements);
    }
    return total_ns / total_elements;
}

Split choice(SplitTrials* trials) { return trials->next(0).split; }

TEST(SplitTrialsTest, TheFasterSplitIsFound) {
    for (const auto& [rates, faster] :
         {std::pair{kCoresWin, Split::kCores}, std::pair{kBothWin, Split::kBoth}}) {
        SplitTrials trials;
        run(&trials, rates, kTrial);
        EXPECT_EQ(choice(&trials), faster);
    }
}

TEST(SplitTrialsTest, SmallRunsAreNeitherTimedNorCounted) {
    SplitTrials trials;
    for (int i = 0; i < 1000; ++i) {
        const SplitTrials::Turn turn = trials.next(SplitTrials::kElements - 1);
        EXPECT_FALSE(turn.timed);
        EXPECT_EQ(turn.split, Split::kBoth);
    }
    EXPECT_TRUE(trials.next(SplitTrials::kElements).timed);
}

TEST(SplitTrialsTest, SlowRunsDoNotDecide) {
    for (const int slow : {0, 1}) {  // Of each split's runs all but the last.
        SplitTrials trials;
        int count = 0;
        run(&trials, kCoresWin, kTrial, [&] {
            const int i = count++;
            return i % 2 == slow && i < kTrial - 2 ? 5.0 : 1.0;
        });
        EXPECT_EQ(choice(&trials), Split::kCores);
    }
}

TEST(SplitTrialsTest, WhatIsFasterByLessThanNoiseIsNotTaken) {
    SplitTrials trials;
    run(&trials, {{Split::kBoth, 0.150}, {Split::kCores, 0.147}}, kTrial);
    EXPECT_EQ(choice(&trials), Split::kBoth);
    run(&trials, kCoresWin, SplitTrials::kRunsBetween + kTrial);
    run(&trials, {{Split::kBoth, 0.147}, {Split::kCores, 0.150}}, 2000);
    EXPECT_EQ(choice(&trials), Split::kCores);
}

TEST(SplitTrialsTest, AChangedMachineIsNoticed) {
    SplitTrials trials;
    run(&trials, kCoresWin, kTrial);
    EXPECT_EQ(choice(&trials), Split::kCores);
    run(&trials, kBothWin, SplitTrials::kRunsBetween + kTrial);
    EXPECT_EQ(choice(&trials), Split::kBoth);
}

TEST(SplitTrialsTest, TrialsCostLittleBesideTheBetterSplit) {
    std::mt19937_64 random(7);
    std::uniform_real_distribution<double> rate(0.8, 1.2);
    for (int machine = 0; machine < 200; ++machine) {
        const Rates rates = {{Split::kBoth, rate(random)}, {Split::kCores, rate(random)}};
        const double better = std::min(rates.at(Split::kBoth), rates.at(Split::kCores));
        SplitTrials trials;
        run(&trials, rates, kTrial);
        EXPECT_LE(run(&trials, rates, 1000), (1.01 + SplitTrials::kMargin) * better) << machine;
    }
}

}  // namespace
}  // namespace trainstream::optim
