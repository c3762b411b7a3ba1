// Training loops at random, on a device that computes asynchronously: every kernel checks all
// bytes.
//
// TRAINSTREAM_WALK_SEED  seed of everything (default: a new one each time)
// TRAINSTREAM_SOAK       set: many more worlds
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "support/async_world.h"

namespace trainstream {
namespace {

using testing::AsyncWorld;
using testing::AsyncWorldOptions;
using testing::Content;
using testing::FakeOwner;
using testing::random_content;

constexpr size_t kStreams = 3;
constexpr size_t kLargest = 16 * kKiB;

/// A storage, and what a script that uses several streams has to know of it.
struct Tensor {
    FakeOwner* owner = nullptr;
    StreamId home = 0;
    Content content;                 // Once all kernels launched so far have run.
    std::map<StreamId, Event> uses;  // The last on each stream.
    StreamId writer = 0;             // The stream of the last write.
    bool records_streams = false;    // Says record_stream(); else waits before it frees.
    bool in_function = false;        // Kernels on it need not be announced until the step ends.
    void* fixed = nullptr;           // Its address, once that was given away for good.
};

struct Terrain {
    const char* name;
    unsigned threads = 1;
    uint64_t host_bytes = 16 * kMiB;
    bool copy_faults = false;
    bool page_locks_refused = false;
    bool fits_at_first = false;
    bool pages = false;  // Somebody says what belongs out.
};

/// What one host thread runs: a period over its own tensors, again and again, with what scripts do
/// beside it.
class Script {
public:
    Script(AsyncWorld& world, const Terrain& terrain, uint64_t seed)
        : world_(world),
          pager_(world.pager),
          terrain_(terrain),
          alone_(terrain.threads == 1),
          random_(seed) {}

    void run(int steps) {
        tensors_.resize(8 + below(16));
        for (int step = 0; step < steps && world_.wrong.load() == 0; ++step) {
            in_use_ = terrain_.fits_at_first && step < steps / 3 ? 3 : tensors_.size();
            if (step == 0 || below(8) == 0 || step == steps / 3) {
                take_a_habit();
            }
            for (const Operation& operation : period_) {
                play(operation);
            }
            between_steps();
        }
        world_.door.refuse_copy_one_in = 0;
        for (Tensor& tensor : tensors_) {
            free(tensor);
        }
    }

private:
    struct Argument {
        size_t tensor = 0;
        UseKind kind = UseKind::kBringIn;
        bool writes = false;
    };
    struct Operation {
        StreamId stream = 1;
        std::vector<Argument> arguments;
        bool ends_step = false;  // There may be several optimizers.
    };

    uint64_t below(uint64_t limit) { return random_() % limit; }
    StreamId any_stream() { return below(4) != 0 ? 1 : 1 + below(kStreams); }
    Tensor& any_tensor() { return tensors_[below(in_use_)]; }

    void take_a_habit() {
        period_.clear();
        for (uint64_t i = 0; i < 5 + below(30); ++i) {
            period_.push_back(any_operation());
        }
        for (size_t i = 0; i < in_use_; ++i) {
            Operation write{any_stream(), {{i, UseKind::kOnce, true}}, below(16) == 0};
            period_.push_back(write);
        }
        period_.back().ends_step = true;
    }

    Operation any_operation() {
        Operation operation{any_stream(), {}, false};
        for (uint64_t i = 0; i < 1 + below(3); ++i) {
            const size_t tensor = below(in_use_);
            const auto same = [&](const Argument& other) { return other.tensor == tensor; };
            if (std::none_of(operation.arguments.begin(), operation.arguments.end(), same)) {
                const auto kind =
                    below(3) != 0 ? UseKind::kBringIn : static_cast<UseKind>(1 + below(4));
                operation.arguments.push_back({tensor, kind, below(8) == 0});
            }
        }
        return operation;
    }

    void play(const Operation& operation) {
        const uint64_t dice = below(100);
        if (dice < 3) {
            return;  // Not this time.
        }
        if (dice < 6) {
            operate(any_operation(), nullptr);
        }
        const Operation inner = any_operation();
        operate(operation, dice < 20 ? &inner : nullptr);
        if (dice >= 88) {
            work_beside(below(8));
        }
        if (Tensor& saved = any_tensor(); saved.in_function) {
            launch_unannounced(saved);  // As the function's backward pass does.
        }
        if (operation.ends_step) {
            pager_.step_done();
            for (Tensor& tensor : tensors_) {
                tensor.in_function = false;
            }
        }
    }

    void between_steps() {
        if (terrain_.copy_faults) {
            world_.door.refuse_copy_one_in = below(2) == 0 ? 0 : 2 + below(9);
        }
        if (terrain_.page_locks_refused) {
            world_.door.refuse_page_lock = below(2) == 0;
        }
        for (int i = 0; i < 2; ++i) {
            free(any_tensor(), /*one_in=*/4);  // Made again when it is used next.
        }
        if (below(4) == 0) {
            world_.finish_all();
        }
    }

    // --- Operators ---

    void operate(const Operation& operation, const Operation* inner) {
        while (!all_live(operation)) {  // For want of memory, making one may free another.
            for (const Argument& argument : operation.arguments) {
                make_sure(tensors_[argument.tensor], operation.stream);
            }
        }
        // While nobody watches nothing moves. With other threads one could not be sure of it.
        const bool announced = !alone_ || world_.port.watchers() > 0;
        Pins pins;
        begin(operation, announced, &pins);
        launch(operation);
        if (inner != nullptr && announced && all_live(*inner)) {
            begin(*inner, announced, &pins);
            launch(*inner);
            order(operation);
            launch(operation);  // The addresses that it named first are as they were.
        }
        pager_.end_use(&pins);
        if (announced) {
            pager_.boundary();
        }
    }

    void order(const Operation& operation) {
        for (const Argument& argument : operation.arguments) {
            synchronize(tensors_[argument.tensor], operation.stream, argument.writes);
        }
    }

    bool all_live(const Operation& operation) const {
        return std::all_of(
            operation.arguments.begin(), operation.arguments.end(),
            [&](const Argument& argument) { return tensors_[argument.tensor].owner != nullptr; });
    }

    void begin(const Operation& operation, bool announced, Pins* pins) {
        std::vector<Use> uses;
        for (const Argument& argument : operation.arguments) {
            uses.push_back({tensors_[argument.tensor].owner, argument.writes, argument.kind});
        }
        order(operation);
        if (announced) {
            pager_.begin_use(uses, operation.stream, pins);
        }
    }

    void launch(const Operation& operation) {
        std::vector<AsyncWorld::Argument> arguments;
        for (const Argument& argument : operation.arguments) {
            arguments.push_back(touch(tensors_[argument.tensor], argument.writes));
        }
        note_uses(operation, world_.launch(operation.stream, std::move(arguments)));
    }

    AsyncWorld::Argument touch(Tensor& tensor, bool writes) {
        EXPECT_TRUE(tensor.fixed == nullptr || tensor.fixed == tensor.owner->address);
        const Content before = tensor.content;
        if (writes) {
            tensor.content = random_content(before->size(), random_());
        }
        return {tensor.owner->bytes(), before, writes ? tensor.content : nullptr};
    }

    /// What torch asks of a script: a stream waits for writes on others, a write for every use.
    void synchronize(const Tensor& tensor, StreamId stream, bool writes) {
        for (const auto& [other, event] : tensor.uses) {
            if (other != stream && (writes || other == tensor.writer)) {
                world_.device.wait(stream, event);
            }
        }
    }

    void note_uses(const Operation& operation, const Event& done) {
        for (const Argument& argument : operation.arguments) {
            note_use(tensors_[argument.tensor], operation.stream, argument.writes, done);
        }
    }

    void note_use(Tensor& tensor, StreamId stream, bool writes, const Event& done) {
        tensor.uses[stream] = done;
        tensor.writer = writes ? stream : tensor.writer;
        if (tensor.records_streams && stream != tensor.home) {
            EXPECT_TRUE(pager_.record_stream(tensor.owner->address, stream));
        }
    }

    // --- What scripts do beside their operators ---

    void work_beside(uint64_t dice) {
        Tensor& tensor = any_tensor();
        if (terrain_.pages && below(2) == 0) {
            page_or_unpage(tensor);
        } else if (dice == 0) {
            pager_.evict_all();
        } else if (dice == 1) {
            free(tensor);
        } else if (dice == 2 && below(4) == 0) {
            pin_for_good(tensor);
        } else if (dice == 3) {
            capture();
        } else if (dice == 4) {
            use_on_a_named_stream(tensor);
        } else if (dice == 5) {
            make_and_drop_activations();
        } else {
            launch_unannounced(tensor);
        }
    }

    void page_or_unpage(Tensor& tensor) {
        if (tensor.owner == nullptr) {
            return;
        }
        if (below(3) != 0) {
            pager_.set_paged_room(below(8) * kLargest);
            pager_.page({tensor.owner});
        } else {
            pager_.unpage({tensor.owner}, tensor.home);
        }
        pager_.take_peak();
    }

    /// An extension's kernel, on the stream of the storage, in a Python function that had it as an
    /// input in this step. Only where no other thread may move it between the look at its address
    /// and the launch.
    void launch_unannounced(Tensor& tensor) {
        if (!alone_ || tensor.owner == nullptr || world_.port.watchers() == 0) {
            return;
        }
        const bool writes = !tensor.in_function && below(2) == 0;
        synchronize(tensor, tensor.home, writes);
        if (!std::exchange(tensor.in_function, true)) {
            Pins pins;
            pager_.begin_use({{tensor.owner, true, UseKind::kMetadata, /*unseen=*/true}},
                             tensor.home, &pins);
            pager_.end_use(&pins);
        }
        note_use(tensor, tensor.home, writes, world_.launch(tensor.home, {touch(tensor, writes)}));
    }

    /// A collective: its operator is announced on one stream, its kernel runs on another.
    void use_on_a_named_stream(Tensor& tensor) {
        if (tensor.owner == nullptr) {
            return;
        }
        const StreamId stream = 1 + below(kStreams);
        Pins pins;
        const bool writes = below(2) == 0;
        synchronize(tensor, 1, writes);
        synchronize(tensor, stream, writes);
        pager_.begin_use({{tensor.owner, writes, UseKind::kInPlace}}, 1, &pins);
        EXPECT_TRUE(pager_.record_stream(tensor.owner->address, stream));
        world_.device.wait(stream, world_.device.record(1));  // It has what stream 1 waits for.
        note_use(tensor, stream, writes, world_.launch(stream, {touch(tensor, writes)}));
        pager_.end_use(&pins);
        pager_.boundary();
    }

    void pin_for_good(Tensor& tensor) {
        if (tensor.owner != nullptr) {
            pager_.pin_for_good(tensor.owner, tensor.home);
            tensor.fixed = tensor.owner->address;
        }
    }

    /// One at a time: a process captures one graph.
    void capture() {
        if (!alone_ || world_.port.watchers() == 0) {
            return;
        }
        Tensor& tensor = any_tensor();
        Pins pins;
        if (tensor.owner != nullptr) {
            pager_.begin_use({{tensor.owner, false, UseKind::kBringIn}}, 1, &pins);
        }
        world_.device.capturing = true;
        pager_.set_capturing(true);
        Tensor& other = any_tensor();
        if (other.owner != nullptr && below(2) == 0) {
            Pins captured;
            pager_.begin_use({{other.owner, false, UseKind::kBringIn}}, 1, &captured);
            pager_.end_use(&captured);
            other.fixed = other.owner->address;
        } else {
            free(any_tensor());
        }
        if (below(2) == 0) {
            pager_.end_use(&pins);
        }
        pager_.boundary();
        pager_.set_capturing(false);
        world_.device.capturing = false;
        pager_.end_use(&pins);
        pager_.boundary();
    }

    void make_and_drop_activations() {
        std::vector<Tensor> activations(1 + below(4));
        for (Tensor& tensor : activations) {
            make(tensor, any_stream(), 2 * kLargest);
            pager_.boundary();
        }
        for (Tensor& tensor : activations) {
            free(tensor);
        }
    }

    void make_sure(Tensor& tensor, StreamId stream) {
        if (tensor.owner == nullptr) {
            make(tensor, stream, kLargest);
        }
    }

    void make(Tensor& tensor, StreamId stream, size_t largest_bytes) {
        const size_t size_bytes = 1 + below(largest_bytes);
        void* address = nullptr;
        while (address == nullptr) {
            try {
                address = pager_.allocate(size_bytes, stream);
            } catch (const Error& error) {
                EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory) << error.what();
                free(tensors_[below(tensors_.size())]);
            }
        }
        tensor = Tensor{};
        tensor.owner = world_.port.adopt(address, size_bytes);
        tensor.home = stream;
        tensor.content = random_content(size_bytes, random_());
        tensor.records_streams = below(2) == 0;
        const Event done =
            world_.launch(stream, {{tensor.owner->bytes(), nullptr, tensor.content}});
        note_use(tensor, stream, /*writes=*/true, done);
        pager_.note_outputs({tensor.owner}, stream, nullptr);
    }

    void free(Tensor& tensor, uint64_t one_in = 1) {
        if (tensor.owner == nullptr || below(one_in) != 0) {
            return;
        }
        for (const auto& [stream, event] : tensor.uses) {
            if (!tensor.records_streams && stream != tensor.home) {
                world_.device.wait(tensor.home, event);
            }
        }
        world_.port.drop(tensor.owner);
        tensor = Tensor{};
    }

    AsyncWorld& world_;
    Pager& pager_;
    const Terrain terrain_;
    const bool alone_;
    std::mt19937_64 random_;
    std::vector<Tensor> tensors_;
    size_t in_use_ = 0;  // Of them.
    std::vector<Operation> period_;
};

void walk(const Terrain& terrain, uint64_t seed, int steps) {
    std::mt19937_64 random(seed);
    AsyncWorldOptions options;
    options.streams = kStreams;
    options.arena_bytes = (48 + random() % 80) * kKiB;
    options.host_bytes = terrain.host_bytes;
    options.seed = seed;
    options.delay_ns_max = random() % 2 == 0 ? 0 : 20'000;
    options.pager.verify = random() % 4 == 0;
    options.pager.longest_operator = std::chrono::milliseconds(50);
    AsyncWorld world(options);
    std::vector<std::thread> others;
    for (unsigned i = 1; i < terrain.threads; ++i) {
        others.emplace_back([&, i] { Script(world, terrain, seed + i).run(steps); });
    }
    Script(world, terrain, seed).run(steps);
    for (std::thread& other : others) {
        other.join();
    }
    const PagerStats stats = world.pager.stats();
    std::printf(
        "  %-22s kernels %llu plans %llu ahead %llu demanded %llu in place %llu KiB strays "
        "%llu failures %llu\n",
        terrain.name, static_cast<unsigned long long>(world.kernels),
        static_cast<unsigned long long>(stats.plans),
        static_cast<unsigned long long>(stats.loaded_ahead_bytes / kKiB),
        static_cast<unsigned long long>(stats.demanded_bytes / kKiB),
        static_cast<unsigned long long>(stats.in_place_bytes / kKiB),
        static_cast<unsigned long long>(stats.strays),
        static_cast<unsigned long long>(stats.failures));
    world.expect_nothing_left();
}

class PagerPlanWalkTest : public ::testing::TestWithParam<Terrain> {};

// Goal: whatever a script does beside the step that was recorded, no frame is given to others
// while a kernel works there, and no kernel starts before its bytes are in place; nothing is left
// behind. Method: periods at random, strayed from at random, over three streams that run behind.
TEST_P(PagerPlanWalkTest, EveryKernelFindsItsBytes) {
    const char* given = std::getenv("TRAINSTREAM_WALK_SEED");
    const uint64_t seed =
        given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    const int worlds = std::getenv("TRAINSTREAM_SOAK") != nullptr ? 200 : 2;
    for (int i = 0; i < worlds && !HasFailure(); ++i) {
        const uint64_t this_seed = seed + static_cast<uint64_t>(i);
        SCOPED_TRACE("TRAINSTREAM_WALK_SEED=" + std::to_string(this_seed));
        walk(GetParam(), this_seed, /*steps=*/14);
    }
}

INSTANTIATE_TEST_SUITE_P(
    Terrains, PagerPlanWalkTest,
    ::testing::Values(Terrain{"plain"}, Terrain{"threads", 3},
                      Terrain{"short_of_host_memory", 1, 256 * kKiB},
                      Terrain{"copy_faults", 1, 16 * kMiB, true},
                      Terrain{"faults_and_threads", 3, 512 * kKiB, true, true},
                      Terrain{"fits_at_first", 1, 16 * kMiB, false, false, true},
                      Terrain{"paged", 1, 16 * kMiB, false, false, false, true},
                      Terrain{"paged_by_threads", 3, 512 * kKiB, true, true, false, true}),
    [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace trainstream
