// bench/schedule_bench.cpp: what planning costs, and how few bytes its plans move.
//
// A training step of a Qwen2 shape in bfloat16 (forward, recomputed forward and backward of each
// layer, stock optimizer in pieces) is replayed through FrameSchedule, loads and all, with no
// device. Beside the bytes loaded stands what the best fixed split would load: as many weights
// resident as fit beside two layers' frames, everything else fetched for each of its uses.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "pager/frame_schedule.h"

namespace trainstream {
namespace {

struct Shape {
    const char* name;
    uint32_t layers;
    std::array<size_t, 7> layer_bytes;  // In order of use: q, k, v, o, gate, up, down.
    size_t head_bytes;
};

constexpr Shape kLarge = {"7.62b",
                          28,
                          {25690112, 3670016, 3670016, 25690112, 135790592, 135790592, 135790592},
                          1089994752};
constexpr Shape kSmall = {
    "1.26b", 24, {8388608, 4194304, 4194304, 8388608, 23068672, 23068672, 23068672}, 131072000};

/// Each weight with its two moments: items w, m, v of it are 3 i, 3 i + 1, 3 i + 2.
Period step_of(const Shape& shape, size_t piece_bytes) {
    Period period;
    const auto weights = static_cast<uint32_t>(shape.layers * 7 + 1);
    for (uint32_t i = 0; i < weights; ++i) {
        const size_t bytes = i + 1 < weights ? shape.layer_bytes[i % 7] : shape.head_bytes;
        period.item_bytes.insert(period.item_bytes.end(), 3, bytes);
    }
    for (uint32_t i = 0; i < weights; ++i) {
        period.operations.push_back({3 * i});
    }
    period.operations.push_back({3 * (weights - 1)});
    for (uint32_t layer = shape.layers; layer-- > 0;) {
        for (uint32_t i = 0; i < 7; ++i) {
            period.operations.push_back({3 * (layer * 7 + i)});
        }
        for (uint32_t i = 7; i-- > 0;) {
            period.operations.push_back({3 * (layer * 7 + i)});
        }
    }
    ItemList piece;
    size_t bytes = 0;
    for (uint32_t i = 0; i < weights; ++i) {
        bytes += 4 * period.item_bytes[size_t{3} * i];  // The gradient counts, too.
        if (!piece.empty() && bytes > piece_bytes) {
            period.operations.push_back(std::exchange(piece, {}));
            bytes = 4 * period.item_bytes[size_t{3} * i];
        }
        piece.insert(piece.end(), {3 * i, 3 * i + 1, 3 * i + 2});
    }
    period.operations.push_back(piece);
    return period;
}

/// Weights that are used three times stay first: fewest loads for a byte of the arena.
uint64_t fixed_split_bytes(const Shape& shape, const Period& period, size_t arena_bytes) {
    size_t layer_bytes = 0;
    for (const size_t bytes : shape.layer_bytes) {
        layer_bytes += bytes;
    }
    uint64_t loads = 0;
    for (size_t i = 0; i < period.item_bytes.size(); ++i) {
        // Forward, recomputation and backward, the optimizer; the head once less, moments once.
        const uint64_t uses = i % 3 != 0 ? 1 : i + 3 == period.item_bytes.size() ? 2 : 3;
        loads += uses * period.item_bytes[i];
    }
    const size_t resident = arena_bytes - std::min(arena_bytes, 2 * layer_bytes);
    return loads - std::min<uint64_t>(loads, 3 * resident);
}

struct Replayed {
    uint64_t loaded_bytes = 0;
    uint64_t missed = 0;
};

void load_due(FrameSchedule* schedule, Replayed* replayed) {
    while (const auto load = schedule->due()) {
        for (const uint32_t item : load->leave) {
            schedule->left(item);
        }
        schedule->entered(load->item, load->offset);
        replayed->loaded_bytes += schedule->item_bytes(load->item);
    }
}

Replayed replay(const Period& period, FrameSchedule* schedule) {
    Replayed replayed;
    for (const ItemList& items : period.operations) {
        for (const uint32_t item : items) {
            schedule->begun(item);
            replayed.missed += schedule->has_frame(item) ? 0 : 1;
        }
        schedule->ended();
        load_due(schedule, &replayed);
    }
    schedule->period_ended();
    return replayed;
}

void replay_steps(benchmark::State& state, const Shape& shape, size_t budget_bytes,
                  size_t arena_bytes) {
    const Period period = step_of(shape, budget_bytes / 64);  // As trainstream/_foreach.py cuts.
    FrameSchedule schedule(period, arena_bytes, std::min<size_t>(768 * kMiB, arena_bytes / 4));
    replay(period, &schedule);  // From empty frames: not counted.
    Replayed last;
    for (auto _ : state) {
        last = replay(period, &schedule);
    }
    // An item larger than the arena is used where it is; all others must come, most of them in
    // time.
    uint64_t uses = 0;
    uint64_t too_large = 0;
    for (const ItemList& items : period.operations) {
        for (const uint32_t item : items) {
            (period.item_bytes[item] <= arena_bytes ? uses : too_large) += 1;
        }
    }
    if (last.loaded_bytes == 0 || last.missed > too_large + uses / 2) {
        state.SkipWithError("most uses came before their loads");
        return;
    }
    state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(period.operations.size()));
    state.counters["loaded_GB"] = static_cast<double>(last.loaded_bytes) * 1e-9;
    state.counters["of_fixed_split"] =
        static_cast<double>(last.loaded_bytes) /
        static_cast<double>(std::max<uint64_t>(1, fixed_split_bytes(shape, period, arena_bytes)));
    state.counters["late_items"] = static_cast<double>(last.missed);
}

void register_all() {
    for (const Shape* shape : {&kSmall, &kLarge}) {
        for (const size_t part : {32, 12, 6, 3}) {
            const size_t whole = shape == &kLarge ? 18 * kGiB : size_t{4402341478};
            const size_t arena_bytes = whole / part / kMiB * kMiB;
            const std::string name = std::string("replay/") + shape->name +
                                     "/arena_MiB:" + std::to_string(arena_bytes / kMiB);
            benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
                replay_steps(state, *shape, whole, arena_bytes);
            })->Unit(benchmark::kMillisecond);
        }
    }
}

const int kRegistered = (register_all(), 0);

}  // namespace
}  // namespace trainstream
