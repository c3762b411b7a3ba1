#include "optim/split_trials.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>

namespace trainstream::optim {
namespace {

/// Nanoseconds of an element for each split.
using Rates = std::map<Split, double>;

constexpr size_t kRun = 2 * SplitTrials::kElements;

/// A machine, on which `runs` runs are made. Returns the nanoseconds that an element took.
double run(
    SplitTrials* trials, const Rates& rates, int runs, std::map<Split, int>* times = nullptr,
    const std::function<double()>& noise = [] { return 1.0; }) {
    double total_ns = 0;
    double total_elements = 0;
    for (int i = 0; i < runs; ++i) {
        const SplitTrials::Turn turn = trials->next(kRun);
        const size_t elements = turn.timed ? SplitTrials::kElements : kRun;
        const double ns = rates.at(turn.split) * static_cast<double>(elements) * noise();
        if (turn.timed) {
            trials->note(turn.split, elements, static_cast<uint64_t>(ns));
        }
        if (times != nullptr) {
            ++(*times)[turn.split];
        }
        total_ns += ns;
        total_elements += static_cast<double>(elements);
    }
    return total_ns / total_elements;
}

Split choice(SplitTrials* trials) { return trials->next(0).split; }

const Rates kCoresWin = {{Split::kBoth, 0.176}, {Split::kCores, 0.164}, {Split::kKernel, 0.25}};
const Rates kBothWin = {{Split::kBoth, 0.130}, {Split::kCores, 0.139}, {Split::kKernel, 0.155}};
const Rates kKernelWins = {{Split::kBoth, 0.3}, {Split::kCores, 0.9}, {Split::kKernel, 0.25}};

TEST(SplitTrialsTest, TheFastestSplitIsFound) {
    for (const auto& [rates, fastest] :
         {std::pair{kCoresWin, Split::kCores}, std::pair{kBothWin, Split::kBoth},
          std::pair{kKernelWins, Split::kKernel}}) {
        SplitTrials trials;
        run(&trials, rates, 3 * SplitTrials::kRuns);
        EXPECT_EQ(choice(&trials), fastest);
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

TEST(SplitTrialsTest, OneSlowRunOfEachDoesNotDecide) {
    for (int slow = 0; slow < 3; ++slow) {
        SplitTrials trials;
        int count = 0;
        run(&trials, kCoresWin, 3 * SplitTrials::kRuns, nullptr,
            [&] { return count++ % 3 == slow && count <= 3 ? 5.0 : 1.0; });
        EXPECT_EQ(choice(&trials), Split::kCores);
    }
}

TEST(SplitTrialsTest, AChangedMachineIsNoticed) {
    SplitTrials trials;
    run(&trials, kCoresWin, 100);
    EXPECT_EQ(choice(&trials), Split::kCores);
    run(&trials, kBothWin, 2 * SplitTrials::kRunsBetween);
    EXPECT_EQ(choice(&trials), Split::kBoth);
}

TEST(SplitTrialsTest, WhatIsFarSlowerIsNotTriedAgain) {
    SplitTrials trials;
    std::map<Split, int> times;
    run(&trials, kKernelWins, 10 * SplitTrials::kRunsBetween, &times);
    EXPECT_EQ(times[Split::kCores], SplitTrials::kRuns);
    EXPECT_GT(times[Split::kBoth], SplitTrials::kRuns);
}

TEST(SplitTrialsTest, TrialsCostLittleBesideTheBestSplit) {
    std::mt19937_64 random(7);
    std::uniform_real_distribution<double> rate(0.1, 0.4);
    for (int machine = 0; machine < 200; ++machine) {
        const Rates rates = {{Split::kBoth, rate(random)},
                             {Split::kCores, rate(random)},
                             {Split::kKernel, rate(random)}};
        double best = 1;
        for (const auto& [split, ns] : rates) {
            best = std::min(best, ns);
        }
        SplitTrials trials;
        run(&trials, rates, 3 * SplitTrials::kRuns);
        EXPECT_LE(run(&trials, rates, 1000), 1.01 * best) << machine;
    }
}

}  // namespace
}  // namespace trainstream::optim
