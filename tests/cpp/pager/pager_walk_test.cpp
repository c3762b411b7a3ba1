// tests/cpp/pager/pager_walk_test.cpp: operators at random, every byte compared with a plain model.
//
// TRAINSTREAM_WALK_OPERATIONS  operations of each test, all its worlds together (default 10000;
//                              TRAINSTREAM_SOAK set: 400000)
// TRAINSTREAM_WALK_SEED        seed of everything (default: a new one each time)
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "support/pager_world.h"

namespace trainstream {
namespace {

using testing::Bytes;
using testing::FakeOwner;
using testing::PagerWorld;
using testing::WorldOptions;

constexpr size_t kBudget = 512 * kKiB;
constexpr size_t kLargest = 48 * kKiB;
constexpr size_t kTensors = 64;  // Two in three live: about twice the budget.
constexpr size_t kTensorsThatFit = 8;

uint64_t number_from_environment(const char* name, uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

/// Fills with bytes that no other call gives.
void fill_randomly(unsigned char* bytes, size_t size_bytes, uint64_t state) {
    for (size_t i = 0; i < size_bytes; ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        bytes[i] = static_cast<unsigned char>(state >> 56);
    }
}

/// One storage of the walk and the bytes that it should have.
///
/// Its two halves are like two views: each has its own lock, so that two operators may work on one
/// storage at once, as a script may that synchronizes what it must.
struct Tensor {
    std::shared_mutex life;  // Shared by its uses. Alone: who makes, frees or replaces it.
    FakeOwner* owner = nullptr;
    Bytes model;
    std::array<std::mutex, 2> halves;
    std::atomic<void*> fixed{nullptr};  // Its address, once that was given away for good.
};

/// What one world is to be like.
struct Terrain {
    const char* name;
    WorldOptions world;
    bool faults = false;         // Copies are refused from time to time.
    bool fits_at_first = false;  // In its first third, so that the watch goes off.
};

std::vector<Terrain> terrains(uint64_t seed) {
    const SimDeviceOptions device = {.seed = seed, .copy_latency_ns_max = 20'000};
    SimDeviceOptions blind = device;
    blind.reads_pageable_memory = false;
    return {
        {"plain", {.budget_bytes = kBudget, .device = device}},
        {"short of host memory", {kBudget, 512 * kKiB, device, {}, /*verify=*/true}, true},
        {"refused page locks", {kBudget, 8 * kMiB, blind, {.page_lock_limit_bytes = kMiB}}, true},
        {"fits at first", {kBudget, 64 * kMiB, device, {}, /*verify=*/true}, false, true},
    };
}

/// What happened, beside what the pager counts.
struct Tally {
    std::atomic<uint64_t> uses{0};
    std::atomic<uint64_t> unannounced{0};
    std::atomic<uint64_t> made{0};
    std::atomic<uint64_t> refused{0};
    std::atomic<uint64_t> compared_bytes{0};
};

/// A world, its tensors and the threads that walk in it.
class Walk {
public:
    Walk(const Terrain& where, uint64_t first_seed, uint64_t length)
        : terrain(where), world(where.world), seed(first_seed), operations(length) {}

    void run(unsigned threads);

    /// How many tensors may be in use now.
    size_t tensors_now() const {
        return terrain.fits_at_first && taken.load() < operations / 3 ? kTensorsThatFit : kTensors;
    }
    bool failed() const { return ::testing::Test::HasFailure(); }

    const Terrain terrain;
    PagerWorld world;
    const uint64_t seed;
    const uint64_t operations;
    std::array<Tensor, kTensors> tensors;
    Tally tally;
    std::atomic<uint64_t> taken{0};
    std::atomic<int> unannounced_now{0};
    std::mutex capture;  // One capture at a time.
};

/// One thread of a walk: plays operators, their guard, and a script.
class Walker {
public:
    Walker(Walk& walk, unsigned index)
        : walk_(walk), pager_(walk.world.pager), stream_(index + 1), random_(walk.seed + index) {}

    void run() {
        while (walk_.taken.fetch_add(1) < walk_.operations && !walk_.failed()) {
            step();
        }
    }

private:
    /// A tensor that an operator names, and where it found it.
    struct Argument {
        Tensor* tensor;
        Use use;
        unsigned char* address = nullptr;
    };

    uint64_t below(uint64_t limit) { return random_() % limit; }
    Tensor& any_tensor() { return walk_.tensors[below(walk_.tensors_now())]; }

    void step() {
        const uint64_t dice = below(1000);
        if (dice < 600) {
            operate(/*with_outer=*/below(4) == 0);
        } else if (dice < 880) {
            make_or_free(any_tensor());
        } else if (dice < 910) {
            hand_over();
        } else if (dice < 940) {
            replace();
        } else if (dice < 945) {
            pager_.evict_all();
        } else if (dice < 955 && !walk_.terrain.fits_at_first) {
            page_or_unpage();  // Where it fits nothing is to be left paged, or somebody watches on.
        } else if (dice < 975) {
            pager_.step_done();
        } else if (dice < 980) {
            pin_for_good();
        } else if (dice < 990) {
            record_stream();
        } else if (dice < 993) {
            capture();
        } else {
            change_faults();
        }
    }

    /// Runs `body(true)` as an announced operator, or `body(false)` while nobody watches.
    template <typename Body>
    void as_operator(const Body& body) {
        walk_.unannounced_now.fetch_add(1);
        if (walk_.world.port.watchers() == 0) {
            body(false);
            walk_.unannounced_now.fetch_sub(1);
            walk_.tally.unannounced.fetch_add(1);
            return;
        }
        walk_.unannounced_now.fetch_sub(1);
        body(true);
        // The pager trusts that so many boundaries outlast an operator that began unannounced. A
        // thread of ours may be put to sleep for longer.
        if (walk_.unannounced_now.load() == 0) {
            pager_.boundary();
        }
    }

    // --- Operators on what there is ---

    UseKind any_kind() { return static_cast<UseKind>(below(5)); }

    void operate(bool with_outer) {
        std::deque<std::shared_lock<std::shared_mutex>> lives;
        std::vector<Tensor*> tensors;
        for (uint64_t i = 0; i < 1 + below(4); ++i) {
            Tensor& tensor = any_tensor();
            if (std::find(tensors.begin(), tensors.end(), &tensor) != tensors.end()) {
                continue;
            }
            std::shared_lock<std::shared_mutex> life(tensor.life, std::try_to_lock);
            if (life && tensor.owner != nullptr) {
                lives.push_back(std::move(life));
                tensors.push_back(&tensor);
            }
        }
        if (tensors.empty()) {
            return;
        }
        walk_.tally.uses.fetch_add(1);
        as_operator([&](bool announced) {
            Pins pins;
            std::vector<Argument> outer = begin(tensors, announced, &pins);
            if (with_outer) {
                // An operator called by the first, on the same tensors, which keep their places.
                compute(begin(tensors, announced, &pins));
            }
            compute(outer);
            pager_.end_use(&pins);
        });
    }

    std::vector<Argument> begin(const std::vector<Tensor*>& tensors, bool announced, Pins* pins) {
        std::vector<Argument> arguments;
        std::vector<Use> uses;
        for (Tensor* tensor : tensors) {
            const Use use{tensor->owner, below(3) == 0, any_kind()};
            arguments.push_back({tensor, use});
            uses.push_back(use);
            if (below(8) == 0) {
                uses.push_back({tensor->owner, false, any_kind()});  // Named twice.
            }
        }
        if (announced) {
            pager_.begin_use(uses, stream_, pins);
        }
        for (Argument& argument : arguments) {
            if (argument.use.kind != UseKind::kMetadata) {
                argument.address = argument.tensor->owner->bytes();
            }
        }
        return arguments;
    }

    void compute(const std::vector<Argument>& arguments) {
        for (const Argument& argument : arguments) {
            if (argument.address == nullptr) {
                continue;
            }
            Tensor& tensor = *argument.tensor;
            EXPECT_EQ(argument.address, tensor.owner->bytes()) << "moved under an operator";
            void* const fixed = tensor.fixed.load();
            EXPECT_TRUE(fixed == nullptr || fixed == argument.address) << "moved though fixed";
            const size_t half = below(2);
            const std::lock_guard<std::mutex> lock(tensor.halves[half]);
            const size_t middle = tensor.model.size() / 2;
            const size_t begin = half == 0 ? 0 : middle;
            const size_t end = half == 0 ? middle : tensor.model.size();
            if (argument.use.writes) {
                write(tensor, argument.address, begin, end);
            } else {
                compare(tensor, argument.address, begin, end);
            }
        }
    }

    void compare(const Tensor& tensor, const unsigned char* address, size_t begin, size_t end) {
        walk_.tally.compared_bytes.fetch_add(end - begin);
        const auto from = tensor.model.begin();
        const auto different = std::mismatch(from + static_cast<int64_t>(begin),
                                             from + static_cast<int64_t>(end), address + begin);
        EXPECT_EQ(different.first, from + static_cast<int64_t>(end))
            << "byte " << different.first - from << " of " << tensor.model.size();
    }

    void write(Tensor& tensor, unsigned char* address, size_t begin, size_t end) {
        compare(tensor, address, begin, end);
        const size_t first = begin + below(end - begin + 1);
        fill_randomly(tensor.model.data() + first, end - first, random_());
        std::memcpy(address + first, tensor.model.data() + first, end - first);
    }

    // --- Storages that come and go ---

    /// Null: out of memory, as it may be.
    void* allocate(size_t size_bytes) {
        try {
            return pager_.allocate(size_bytes, stream_);
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory) << error.what();
            walk_.tally.refused.fetch_add(1);
            return nullptr;
        }
    }

    /// The more there are, the more go: about two in three of the tensors live.
    void make_or_free(Tensor& tensor) {
        const std::unique_lock<std::shared_mutex> life(tensor.life, std::try_to_lock);
        if (life && tensor.owner == nullptr) {
            make(tensor);
        } else if (life && below(2) == 0) {
            free(tensor);
        }
    }

    /// An operator that makes a storage: its owner is known once it ends, or once it is used.
    void make(Tensor& tensor) {
        as_operator([&](bool announced) {
            const size_t size_bytes = 1 + below(kLargest);
            if (void* address = allocate(size_bytes)) {
                tensor.owner = walk_.world.port.adopt(address, size_bytes);
                fill(tensor);
                note_output(tensor, announced);
                walk_.tally.made.fetch_add(1);
            }
        });
    }

    void fill(Tensor& tensor) {
        tensor.model.resize(tensor.owner->size_bytes);
        fill_randomly(tensor.model.data(), tensor.model.size(), random_());
        std::memcpy(tensor.owner->address, tensor.model.data(), tensor.model.size());
    }

    void note_output(Tensor& tensor, bool announced) {
        if (!announced || below(8) == 0) {
            return;
        }
        Pins pins;
        const bool inside_another = below(2) == 0;
        pager_.note_outputs({tensor.owner}, stream_, inside_another ? &pins : nullptr);
        if (inside_another) {
            auto* const address = tensor.owner->bytes();
            compare(tensor, address, 0, tensor.model.size());
            EXPECT_EQ(address, tensor.owner->bytes());
        }
        pager_.end_use(&pins);
    }

    void free(Tensor& tensor) {
        walk_.world.port.drop(std::exchange(tensor.owner, nullptr));
        tensor.fixed.store(nullptr);
    }

    /// Names `tensor` without touching its bytes, alone, and calls `body` meanwhile.
    template <typename Body>
    void alone_with_any_tensor(const Body& body) {
        Tensor& tensor = any_tensor();
        const std::unique_lock<std::shared_mutex> life(tensor.life, std::try_to_lock);
        if (!life || tensor.owner == nullptr) {
            return;
        }
        as_operator([&](bool announced) {
            Pins pins;
            if (announced) {
                pager_.begin_use({{tensor.owner, true, UseKind::kMetadata}}, stream_, &pins);
            }
            body(tensor, announced);
            pager_.end_use(&pins);
        });
    }

    /// The bytes go to another owner, whom the pager may learn of only later.
    void hand_over() {
        alone_with_any_tensor([&](Tensor& tensor, bool announced) {
            FakeOwner* old_owner = tensor.owner;
            tensor.owner = walk_.world.port.adopt(std::exchange(old_owner->address, nullptr),
                                                  old_owner->size_bytes);
            walk_.world.port.drop(old_owner);
            note_output(tensor, announced);
        });
    }

    /// The owner gets other bytes, and frees the old ones while the pager has them pinned.
    void replace() {
        alone_with_any_tensor([&](Tensor& tensor, bool announced) {
            const size_t size_bytes = 1 + below(kLargest);
            if (void* address = allocate(size_bytes)) {
                void* old_address = std::exchange(tensor.owner->address, address);
                tensor.owner->size_bytes = size_bytes;
                EXPECT_TRUE(pager_.free(old_address));
                tensor.fixed.store(nullptr);
                fill(tensor);
                note_output(tensor, announced);
            }
        });
    }

    // --- What is rare ---

    void pin_for_good() {
        Tensor& tensor = any_tensor();
        const std::shared_lock<std::shared_mutex> life(tensor.life, std::try_to_lock);
        if (life && tensor.owner != nullptr) {
            pager_.pin_for_good(tensor.owner, stream_);
            tensor.fixed.store(tensor.owner->address);
        }
    }

    void page_or_unpage() {
        Tensor& tensor = any_tensor();
        const std::shared_lock<std::shared_mutex> life(tensor.life, std::try_to_lock);
        if (!life || tensor.owner == nullptr) {
            return;
        }
        if (below(2) == 0) {
            pager_.set_paged_room(below(4) * kLargest);
            pager_.page({tensor.owner});
        } else {
            pager_.unpage({tensor.owner}, stream_);
        }
        pager_.take_peak();
    }

    void record_stream() {
        Tensor& tensor = any_tensor();
        const std::shared_lock<std::shared_mutex> life(tensor.life, std::try_to_lock);
        if (life && tensor.owner != nullptr) {
            Pins pins;
            pager_.begin_use({{tensor.owner, false, UseKind::kInPlace}}, stream_, &pins);
            EXPECT_TRUE(pager_.record_stream(tensor.owner->address, 100 + below(3)));
            pager_.end_use(&pins);
        }
    }

    void capture() {
        const std::unique_lock<std::mutex> alone(walk_.capture, std::try_to_lock);
        if (!alone) {
            return;
        }
        pager_.set_capturing(true);
        for (int i = 0; i < 3; ++i) {
            touch_captured(any_tensor());
            make_or_free(any_tensor());
        }
        pager_.set_capturing(false);
    }

    void touch_captured(Tensor& tensor) {
        const std::shared_lock<std::shared_mutex> life(tensor.life, std::try_to_lock);
        if (life && tensor.owner != nullptr) {
            Pins pins;
            pager_.begin_use({{tensor.owner, false, UseKind::kBringIn}}, stream_, &pins);
            tensor.fixed.store(tensor.owner->address);
            pager_.end_use(&pins);
        }
    }

    void change_faults() {
        if (walk_.terrain.faults) {
            SimFaults faults = walk_.terrain.world.faults;
            faults.fail_copy_one_in = std::array<uint64_t, 4>{0, 0, 20, 3}.at(below(4));
            walk_.world.device.set_faults(faults);
        }
    }

    Walk& walk_;
    Pager& pager_;
    const StreamId stream_;
    std::mt19937_64 random_;
};

void Walk::run(unsigned threads) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i) {
        others.emplace_back([this, i] { Walker(*this, i).run(); });
    }
    Walker(*this, 0).run();
    for (std::thread& other : others) {
        other.join();
    }
    const PagerStats stats = world.pager.stats();
    std::printf(
        "  %-20s uses %llu (%llu unwatched) made %llu refused %llu compared %.0f MiB | evictions "
        "%llu restores %llu dropped %llu KiB born cold %llu KiB in place %llu KiB failures %llu\n",
        terrain.name, static_cast<unsigned long long>(tally.uses),
        static_cast<unsigned long long>(tally.unannounced),
        static_cast<unsigned long long>(tally.made), static_cast<unsigned long long>(tally.refused),
        static_cast<double>(tally.compared_bytes) / kMiB,
        static_cast<unsigned long long>(stats.evictions),
        static_cast<unsigned long long>(stats.restores),
        static_cast<unsigned long long>(stats.dropped_bytes / kKiB),
        static_cast<unsigned long long>(stats.born_cold_bytes / kKiB),
        static_cast<unsigned long long>(stats.in_place_bytes / kKiB),
        static_cast<unsigned long long>(stats.failures));
    for (Tensor& tensor : tensors) {
        if (tensor.owner != nullptr) {
            world.device.set_faults({});
            Pins pins;  // Its bytes may be on their way.
            world.pager.begin_use({{tensor.owner, false, UseKind::kInPlace}}, 0, &pins);
            EXPECT_TRUE(
                std::equal(tensor.model.begin(), tensor.model.end(), tensor.owner->bytes()));
            world.pager.end_use(&pins);
            world.port.drop(tensor.owner);
        }
    }
    EXPECT_EQ(stats.verify_faults, 0u);
    EXPECT_LE(stats.peak_bytes, stats.budget_bytes);
    EXPECT_GT(stats.evictions + stats.restores, operations / 100);
    world.expect_nothing_left();
}

class PagerWalkTest : public ::testing::TestWithParam<unsigned> {};

// Goal: whatever operators do, on however many threads, no byte is ever wrong and nothing is left
// behind. Method: a random walk through worlds with delays, refusals and too little memory; every
// read is compared with a plain vector, and at the end all counts are back at nothing.
TEST_P(PagerWalkTest, EveryByteIsRightAndNothingIsLeft) {
    const uint64_t seed = number_from_environment("TRAINSTREAM_WALK_SEED", std::random_device{}());
    const bool soak = std::getenv("TRAINSTREAM_SOAK") != nullptr;
    const uint64_t operations =
        number_from_environment("TRAINSTREAM_WALK_OPERATIONS", soak ? 400'000 : 10'000);
    const std::string words = "TRAINSTREAM_WALK_SEED=" + std::to_string(seed) +
                              " TRAINSTREAM_WALK_OPERATIONS=" + std::to_string(operations);
    SCOPED_TRACE(words);
    std::printf("%s, %u threads\n", words.c_str(), GetParam());
    const std::vector<Terrain> all = terrains(seed);
    for (size_t i = 0; i < all.size() && !HasFailure(); ++i) {
        SCOPED_TRACE(all[i].name);
        Walk(all[i], seed + 1000 * i, operations / all.size()).run(GetParam());
    }
}

INSTANTIATE_TEST_SUITE_P(Threads, PagerWalkTest, ::testing::Values(1u, 4u),
                         [](const auto& tested) { return std::to_string(tested.param); });

}  // namespace
}  // namespace trainstream
