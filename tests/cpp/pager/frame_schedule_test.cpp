#include "pager/frame_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace trainstream {
namespace {

constexpr size_t kUnit = 4096;

/// Runs periods as a pager would: loads that are due before and after each operator, and at demand
/// what is still missing when it is needed.
class Replay {
public:
    Replay(const Period& period, size_t arena_bytes, size_t lead_bytes)
        : schedule(period, arena_bytes, lead_bytes), period_(period) {}

    void one_period() {
        for (const ItemList& items : period_.operations) {
            one_operation(items);
        }
        schedule.period_ended();
    }

    void one_operation(const ItemList& items) {
        in_use_.clear();
        for (const uint32_t item : items) {
            schedule.begun(item);
            if (!schedule.has_frame(item)) {
                demand(item);
            }
            in_use_.insert(item);
        }
        in_use_.clear();
        schedule.ended();
        load_due();
    }

    void load_due() {
        while (const auto load = schedule.due()) {
            carry_out(*load);
            ++planned_loads;
        }
    }

    FrameSchedule schedule;
    uint64_t planned_loads = 0;
    uint64_t demanded = 0;
    uint64_t refused = 0;
    uint64_t loaded_bytes = 0;

private:
    void demand(uint32_t item) {
        const auto load =
            schedule.demand(item, [&](uint32_t other) { return in_use_.count(other) != 0; });
        if (!load.has_value()) {
            ++refused;
            return;
        }
        carry_out(*load);
        ++demanded;
    }

    void carry_out(const FrameSchedule::Load& load) {
        for (const uint32_t item : load.leave) {
            EXPECT_EQ(in_use_.count(item), 0u) << "an operator's own storage left";
            schedule.left(item);
        }
        schedule.entered(load.item, load.offset);
        loaded_bytes += schedule.item_bytes(load.item);
    }

    const Period period_;
    std::set<uint32_t> in_use_;
};

/// `layers` weights used forth and back, as a forward and a backward pass do.
Period forth_and_back(uint32_t layers, size_t bytes = kUnit) {
    Period period;
    period.item_bytes.assign(layers, bytes);
    for (uint32_t i = 0; i < layers; ++i) {
        period.operations.push_back({i});
    }
    for (uint32_t i = layers; i-- > 0;) {
        period.operations.push_back({i});
    }
    return period;
}

Period random_period(std::mt19937* random, bool same_size) {
    std::uniform_int_distribution<uint32_t> items(2, 7);
    std::uniform_int_distribution<size_t> units(1, 4);
    Period period;
    const uint32_t count = items(*random);
    for (uint32_t i = 0; i < count; ++i) {
        period.item_bytes.push_back(same_size ? kUnit : units(*random) * kUnit);
    }
    std::uniform_int_distribution<uint32_t> item(0, count - 1);
    for (uint32_t i = 0; i < 3 * count; ++i) {
        period.operations.push_back({item(*random)});
    }
    return period;
}

TEST(FrameScheduleTest, WhatFitsIsLoadedOnceAndStays) {
    Replay run(forth_and_back(8), 8 * kUnit, 0);
    for (int i = 0; i < 3; ++i) {
        run.one_period();
    }
    EXPECT_EQ(run.loaded_bytes, 8 * kUnit);
}

TEST(FrameScheduleTest, EverythingIsThereBeforeItIsUsed) {
    Replay run(forth_and_back(16), 4 * kUnit, 0);
    run.load_due();
    for (int i = 0; i < 4; ++i) {
        run.one_period();
    }
    EXPECT_EQ(run.demanded, 0u);
    EXPECT_EQ(run.refused, 0u);
}

TEST(FrameScheduleTest, TurningBackLoadsNothingThatIsStillThere) {
    Replay run(forth_and_back(16), 4 * kUnit, 0);
    run.one_period();
    const uint64_t before = run.planned_loads + run.demanded;
    run.one_period();
    // A pass over 16 through 4 frames: each of the two turns finds 4 still there, less the frame
    // through which the rest passes.
    EXPECT_LE(run.planned_loads + run.demanded - before, 2u * 16u - 2u * 3u);
}

TEST(FrameScheduleTest, ALoadStartsAheadOfItsUse) {
    Replay run(forth_and_back(16), 4 * kUnit, 2 * kUnit);
    run.load_due();
    run.one_operation({0});
    // Item 0 has been used and is needed last of all: item 4 takes its frame.
    EXPECT_TRUE(run.schedule.has_frame(1) && run.schedule.has_frame(2) &&
                run.schedule.has_frame(3));
    run.one_operation({1});
    EXPECT_TRUE(run.schedule.has_frame(2) && run.schedule.has_frame(3));
}

/// The fewest loads of any order of evictions, tried exhaustively, one operator after another.
uint64_t fewest_loads(const Period& period, size_t frames, int periods) {
    std::set<std::set<uint32_t>> states{{}};
    std::vector<std::pair<std::set<uint32_t>, uint64_t>> now{{{}, 0}};
    for (int p = 0; p < periods; ++p) {
        for (const ItemList& items : period.operations) {
            std::map<std::set<uint32_t>, uint64_t> next;
            const auto keep = [&](const std::set<uint32_t>& state, uint64_t loads) {
                const auto [entry, fresh] = next.emplace(state, loads);
                entry->second = fresh ? loads : std::min(entry->second, loads);
            };
            for (const auto& [state, loads] : now) {
                const uint32_t item = items.front();
                if (state.count(item) != 0) {
                    keep(state, loads);
                    continue;
                }
                std::set<uint32_t> with = state;
                with.insert(item);
                if (with.size() <= frames) {
                    keep(with, loads + 1);
                    continue;
                }
                for (const uint32_t leaving : state) {
                    std::set<uint32_t> after = with;
                    after.erase(leaving);
                    keep(after, loads + 1);
                }
            }
            now.assign(next.begin(), next.end());
        }
    }
    uint64_t fewest = UINT64_MAX;
    for (const auto& [state, loads] : now) {
        fewest = std::min(fewest, loads);
    }
    return fewest;
}

TEST(FrameScheduleTest, NoOtherOrderOfEvictionsLoadsLess) {
    std::mt19937 random(1);
    for (int i = 0; i < 200; ++i) {
        const Period period = random_period(&random, /*same_size=*/true);
        const size_t frames = 1 + random() % period.item_bytes.size();
        Replay run(period, frames * kUnit, 0);
        constexpr int kPeriods = 3;
        for (int p = 0; p < kPeriods; ++p) {
            run.one_period();
        }
        // It looks past the end, where the exhaustive search stops: what it has loaded for the
        // fourth period is more than the search counts.
        const uint64_t ahead = std::min(frames, period.item_bytes.size());
        EXPECT_LE(run.loaded_bytes / kUnit, fewest_loads(period, frames, kPeriods) + ahead)
            << "case " << i;
    }
}

/// Loads a period when the items of `resident` stay and the others come for each use, of which
/// those in a row are one.
uint64_t loads_of_split(const Period& period, const std::set<uint32_t>& resident) {
    uint64_t loads = 0;
    const ItemList* before = &period.operations.back();
    for (const ItemList& items : period.operations) {
        const uint32_t item = items.front();
        loads += resident.count(item) == 0 && item != before->front() ? 1 : 0;
        before = &items;
    }
    return loads;
}

/// The best of all fixed splits: so many items stay, the rest pass through one frame.
uint64_t best_fixed_split(const Period& period, size_t frames) {
    const size_t items = period.item_bytes.size();
    uint64_t fewest = frames >= items ? 0 : UINT64_MAX;
    for (uint32_t subset = 0; subset < (1u << items); ++subset) {
        std::set<uint32_t> resident;
        for (uint32_t item = 0; item < items; ++item) {
            if ((subset >> item & 1) != 0) {
                resident.insert(item);
            }
        }
        if (resident.size() < frames) {
            fewest = std::min(fewest, loads_of_split(period, resident));
        }
    }
    return fewest;
}

TEST(FrameScheduleTest, NeverWorseThanTheBestFixedSplit) {
    std::mt19937 random(3);
    for (int i = 0; i < 1000; ++i) {
        const Period period = random_period(&random, /*same_size=*/true);
        const size_t frames = 1 + random() % period.item_bytes.size();
        Replay run(period, frames * kUnit, 0);
        run.one_period();
        const uint64_t before = run.loaded_bytes;
        constexpr int kPeriods = 4;
        for (int p = 0; p < kPeriods; ++p) {
            run.one_period();
        }
        // What it has loaded ahead at the end is more, and at the beginning less, than its periods
        // need.
        EXPECT_LE((run.loaded_bytes - before) / kUnit,
                  kPeriods * best_fixed_split(period, frames) + frames)
            << "case " << i;
    }
}

TEST(FrameScheduleTest, RandomPeriodsOfAnySizeKeepTheInvariants) {
    std::mt19937 random(2);
    for (int i = 0; i < 1000; ++i) {
        const Period period = random_period(&random, /*same_size=*/false);
        const size_t arena_bytes = (1 + random() % 16) * kUnit;
        Replay run(period, arena_bytes, random() % (8 * kUnit));
        for (int p = 0; p < 3; ++p) {
            run.one_period();
        }
        size_t all_bytes = 0;
        size_t largest = 0;
        for (const size_t bytes : period.item_bytes) {
            all_bytes += bytes;
            largest = std::max(largest, bytes);
        }
        // What fits twice is never refused, since nothing else is in use; nor is what all fits.
        const bool all_fit = all_bytes <= arena_bytes || largest <= arena_bytes / 2;
        EXPECT_TRUE(!all_fit || run.refused == 0) << "case " << i;
    }
}

TEST(FrameScheduleTest, AScanGetsFramesEnoughToRunAhead) {
    // Eight weights that fit, then 32 states used once each: with a lead of four, four states are
    // in flight at once, not one.
    Period period;
    period.item_bytes.assign(40, kUnit);
    for (uint32_t i = 0; i < 40; ++i) {
        period.operations.push_back({i});
    }
    Replay run(period, 12 * kUnit, 4 * kUnit);
    run.one_period();
    run.one_period();
    for (uint32_t i = 0; i < 20; ++i) {
        run.one_operation({i});
    }
    int ahead = 0;
    for (uint32_t i = 20; i < 40; ++i) {
        ahead += run.schedule.has_frame(i) ? 1 : 0;
    }
    EXPECT_GE(ahead, 4);
}

// What is asked for on demand waits behind all that was proposed.
TEST(FrameScheduleTest, NoMoreIsProposedThanWhatIsUsedNext) {
    Period period;
    period.item_bytes.assign(40, kUnit);
    for (uint32_t i = 0; i < 40; ++i) {
        period.operations.push_back({i});
    }
    FrameSchedule schedule(period, 30 * kUnit, 0, /*ahead_bytes=*/4 * kUnit);
    const auto loaded = [&] {
        std::vector<uint32_t> items;
        while (const auto load = schedule.due()) {
            schedule.entered(load->item, load->offset);
            items.push_back(load->item);
        }
        return items;
    };
    EXPECT_EQ(loaded(), (std::vector<uint32_t>{0, 1, 2, 3}));
    schedule.begun(0);
    EXPECT_TRUE(loaded().empty());
    schedule.ended();
    EXPECT_EQ(loaded(), std::vector<uint32_t>{4});
    schedule.begun(1);
    schedule.ended();
    schedule.begun(2);
    schedule.ended();
    EXPECT_EQ(loaded(), (std::vector<uint32_t>{5, 6}));
}

TEST(FrameScheduleTest, AnOperatorsItemsStayTogether) {
    Period period;
    period.item_bytes.assign(12, kUnit);
    for (uint32_t i = 0; i < 12; i += 3) {
        period.operations.push_back({i, i + 1, i + 2});
    }
    Replay run(period, 4 * kUnit, 8 * kUnit);
    for (int p = 0; p < 3; ++p) {
        run.one_period();  // carry_out() checks.
    }
    EXPECT_EQ(run.refused, 0u);
}

TEST(FrameScheduleTest, ItFollowsARunThatSkipsAhead) {
    Replay run(forth_and_back(16), 4 * kUnit, 0);
    run.load_due();
    for (uint32_t i = 0; i < 4; ++i) {
        run.one_operation({i});
    }
    for (uint32_t i = 8; i < 12; ++i) {
        run.one_operation({i});
    }
    const uint64_t demanded = run.demanded;
    run.one_operation({12});
    run.one_operation({13});
    EXPECT_EQ(run.demanded, demanded) << "it had not found its place again";
}

TEST(FrameScheduleTest, ARunThatGoesElsewhereIsBelievedAfterAWhile) {
    Period period = forth_and_back(200);
    Replay run(period, 8 * kUnit, 0);
    run.load_due();
    for (uint32_t i = 0; i < 4; ++i) {
        run.one_operation({i});
    }
    for (uint32_t i = 150; i < 170; ++i) {
        run.one_operation({i});
    }
    EXPECT_GT(run.schedule.strays(), 0u);
    const uint64_t demanded = run.demanded;
    run.one_operation({170});
    EXPECT_EQ(run.demanded, demanded);
}

TEST(FrameScheduleTest, WhatOutlivesItsLastUseInASegmentLeavesAtOnce) {
    // Items 0 and 1 come back within the segment's time, 2 and 3 only after it has gone.
    const Period period{{kUnit, kUnit, kUnit, kUnit}, {{0}, {2}, {1}, {0}, {3}, {1}, {2}, {3}}};
    FrameSchedule schedule(period, 0, 0);
    const size_t begin = schedule.open_extra(4 * kUnit, /*until=*/6);
    ASSERT_GE(begin, FrameSchedule::kSegmentSpan);
    std::vector<ItemList> outlived;
    for (const ItemList& items : period.operations) {
        while (const auto load = schedule.due()) {
            schedule.entered(load->item, load->offset);
        }
        for (const uint32_t item : items) {
            schedule.begun(item);
        }
        schedule.ended();
        outlived.push_back(schedule.outlived());
        for (const uint32_t item : outlived.back()) {
            schedule.left(item);
        }
    }
    const std::vector<ItemList> expected{{}, {2}, {}, {0}, {3}, {1}, {}, {}};
    EXPECT_EQ(outlived, expected);
    EXPECT_TRUE(schedule.extra_is_empty(begin));
}

TEST(FrameScheduleTest, ARemovedItemIsForgotten) {
    Replay run(forth_and_back(8), 4 * kUnit, 0);
    run.load_due();
    run.schedule.remove(2);
    EXPECT_FALSE(run.schedule.has_frame(2));
    run.one_operation({0});
    run.one_operation({1});
    run.one_operation({3});
    EXPECT_FALSE(run.schedule.has_frame(2));
    EXPECT_EQ(run.refused, 0u);
}

TEST(FrameScheduleTest, AnEmptyPeriodAsksForNothing) {
    FrameSchedule schedule(Period{}, kUnit, 0);
    EXPECT_FALSE(schedule.due().has_value());
    schedule.ended();
    schedule.period_ended();
}

}  // namespace
}  // namespace trainstream
