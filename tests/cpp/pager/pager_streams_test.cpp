// tests/cpp/pager/pager_streams_test.cpp: the order of work, on a device that computes
// asynchronously.
//
// A kernel works on the address that it was launched with, at some later time. Meanwhile the
// storage may have left, come back elsewhere or been freed, and its old place been given to others.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "pager/pager.h"
#include "support/async_device.h"
#include "support/fake_owner.h"

namespace trainstream {
namespace {

using testing::AsyncDevice;
using testing::AsyncMemory;
using testing::FakeOwner;
using testing::FakeOwnerPort;

constexpr size_t kStreams = 3;
constexpr size_t kArena = 64 * kKiB;
constexpr size_t kLargest = 16 * kKiB;
constexpr size_t kTensorsOfAThread = 20;

using Content = std::shared_ptr<const std::vector<unsigned char>>;

Content random_content(size_t size_bytes, uint64_t state) {
    auto bytes = std::make_shared<std::vector<unsigned char>>(size_bytes);
    for (unsigned char& byte : *bytes) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        byte = static_cast<unsigned char>(state >> 56);
    }
    return bytes;
}

struct World {
    World(uint64_t seed, uint64_t host_bytes, bool verify)
        : device(kStreams, seed, /*delay_ns_max=*/50'000),
          memory(device, kStreams, kArena),
          host(device, {.limit_bytes = host_bytes, .grow_in_background = false}),
          pager(device, memory, host, port, {verify}) {
        port.attach(pager);
    }

    AsyncDevice device;
    AsyncMemory memory;
    HostPool host;
    FakeOwnerPort port;
    Pager pager;
    std::atomic<uint64_t> kernels{0};
    std::atomic<uint64_t> wrong{0};
};

/// A storage, and what a script that uses several streams has to know of it.
struct Tensor {
    FakeOwner* owner = nullptr;
    StreamId home = 0;
    Content content;                 // Once all kernels launched so far have run.
    std::map<StreamId, Event> uses;  // The last on each stream.
    StreamId writer = 0;             // The stream of the last write.
    bool records_streams = false;    // Says record_stream() once; else waits before it frees.
    std::thread later;               // Makes a write that was announced.
};

/// One host thread: a script that launches kernels on its own tensors, on all streams.
class Script {
public:
    Script(World& world, uint64_t seed) : world_(world), random_(seed) {}

    void run(int operations) {
        for (int i = 0; i < operations && world_.wrong.load() == 0; ++i) {
            const uint64_t dice = below(100);
            if (dice < 62) {
                operate();
            } else if (dice < 65) {
                write_later(tensors_[below(tensors_.size())]);
            } else if (dice < 99) {
                make_or_free(tensors_[below(tensors_.size())]);
            } else {
                world_.pager.evict_all();
            }
        }
        for (Tensor& tensor : tensors_) {
            if (tensor.owner != nullptr) {
                free(tensor);
            }
        }
    }

private:
    struct Argument {
        unsigned char* address;
        Content before;
        Content after;  // Null: only read.
    };

    uint64_t below(uint64_t limit) { return random_() % limit; }

    /// A kernel that finds what should be there, and leaves what should be.
    Event launch(StreamId stream, const std::vector<Argument>& arguments) {
        return world_.device.launch(stream, [&world = world_, arguments] {
            for (const Argument& argument : arguments) {
                if (argument.before != nullptr &&
                    std::memcmp(argument.address, argument.before->data(),
                                argument.before->size()) != 0) {
                    world.wrong.fetch_add(1);
                }
                if (argument.after != nullptr) {
                    std::memcpy(argument.address, argument.after->data(), argument.after->size());
                }
            }
            world.kernels.fetch_add(1);
        });
    }

    void operate() {
        const StreamId stream = 1 + below(kStreams);
        std::vector<Tensor*> tensors;
        std::vector<Use> uses;
        for (uint64_t i = 0; i < 1 + below(3); ++i) {
            Tensor& tensor = tensors_[below(tensors_.size())];
            if (tensor.owner != nullptr &&
                std::find(tensors.begin(), tensors.end(), &tensor) == tensors.end()) {
                tensors.push_back(&tensor);
                uses.push_back({tensor.owner, below(3) == 0, static_cast<UseKind>(1 + below(3))});
            }
        }
        for (size_t i = 0; i < tensors.size(); ++i) {
            synchronize(*tensors[i], stream, uses[i].writes);
        }
        Pins pins;
        world_.pager.begin_use(uses, stream, &pins);
        std::vector<Argument> arguments;
        for (size_t i = 0; i < tensors.size(); ++i) {
            Tensor& tensor = *tensors[i];
            const Content before = tensor.content;
            if (uses[i].writes) {
                tensor.content = random_content(before->size(), random_());
            }
            arguments.push_back(
                {tensor.owner->bytes(), before, uses[i].writes ? tensor.content : nullptr});
        }
        const Event done = launch(stream, arguments);
        for (size_t i = 0; i < tensors.size(); ++i) {
            note_use(*tensors[i], stream, uses[i].writes, done);
        }
        world_.pager.end_use(&pins);  // The kernel may not have begun.
        if (below(32) == 0) {
            done->wait();  // Else the host would run ahead without end.
        }
    }

    /// An optimizer's update on a thread and a stream of its own. The script goes on, and orders
    /// nothing after it.
    void write_later(Tensor& tensor) {
        if (tensor.owner == nullptr) {
            return;
        }
        join(tensor);
        const StreamId stream = 1 + below(kStreams);
        const Content before = tensor.content;
        tensor.content = random_content(before->size(), random_());
        const StoragePtr write = world_.pager.announce_write(tensor.owner);
        ASSERT_NE(write, nullptr);
        tensor.later = std::thread([this, write, stream, before, after = tensor.content,
                                    owner = tensor.owner, uses = std::move(tensor.uses)] {
            Pager::make_pending_writes();
            for (const auto& [other, event] : uses) {
                world_.device.wait(stream, event);
            }
            Pins pins;
            world_.pager.begin_use({{owner, /*writes=*/true, UseKind::kInPlace}}, stream, &pins);
            launch(stream, {{owner->bytes(), before, after}});
            EXPECT_TRUE(world_.pager.record_stream(owner->address, stream));
            world_.pager.end_use(&pins);
            world_.pager.end_write(write, stream);
        });
        tensor.uses.clear();
        tensor.writer = 0;
    }

    static void join(Tensor& tensor) {
        if (tensor.later.joinable()) {
            tensor.later.join();
        }
    }

    /// What torch asks of a script: a stream waits for writes on others, a write for every use.
    void synchronize(const Tensor& tensor, StreamId stream, bool writes) {
        for (const auto& [other, event] : tensor.uses) {
            if (other != stream && (writes || other == tensor.writer)) {
                world_.device.wait(stream, event);
            }
        }
    }

    void note_use(Tensor& tensor, StreamId stream, bool writes, const Event& done) {
        const bool first = tensor.uses.count(stream) == 0;
        tensor.uses[stream] = done;
        tensor.writer = writes ? stream : tensor.writer;
        if (tensor.records_streams && first && stream != tensor.home) {
            EXPECT_TRUE(world_.pager.record_stream(tensor.owner->address, stream));
        }
    }

    void make_or_free(Tensor& tensor) {
        if (tensor.owner != nullptr) {
            free(tensor);
            return;
        }
        const size_t size_bytes = 1 + below(kLargest);
        const StreamId stream = 1 + below(kStreams);
        void* address = world_.pager.allocate(size_bytes, stream);
        tensor.owner = world_.port.adopt(address, size_bytes);
        tensor.home = stream;
        tensor.content = random_content(size_bytes, random_());
        tensor.records_streams = below(2) == 0;
        const Event done = launch(stream, {{tensor.owner->bytes(), nullptr, tensor.content}});
        note_use(tensor, stream, /*writes=*/true, done);
        world_.pager.note_outputs({tensor.owner}, stream, nullptr);
    }

    void free(Tensor& tensor) {
        join(tensor);  // The update keeps the memory alive.
        for (const auto& [stream, event] : tensor.uses) {
            if (!tensor.records_streams && stream != tensor.home) {
                world_.device.wait(tensor.home, event);
            }
        }
        world_.port.drop(tensor.owner);
        tensor = Tensor{};
    }

    World& world_;
    std::mt19937_64 random_;
    std::array<Tensor, kTensorsOfAThread> tensors_;
};

struct Terrain {
    const char* name;
    uint64_t host_bytes;
    bool verify;
    unsigned threads;
};

class PagerStreamsTest : public ::testing::TestWithParam<Terrain> {};

// Goal: no place is given to others while a kernel still works there, and no kernel starts before
// its bytes have arrived. Method: scripts launch kernels at random on three streams that run behind
// the host; each kernel checks all bytes that it finds.
TEST_P(PagerStreamsTest, EveryKernelFindsItsBytes) {
    const char* given = std::getenv("TRAINSTREAM_WALK_SEED");
    const uint64_t seed =
        given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    const int operations = std::getenv("TRAINSTREAM_SOAK") != nullptr ? 50'000 : 2'000;
    SCOPED_TRACE("TRAINSTREAM_WALK_SEED=" + std::to_string(seed));
    World world(seed, GetParam().host_bytes, GetParam().verify);
    std::vector<std::thread> others;
    for (unsigned i = 1; i < GetParam().threads; ++i) {
        others.emplace_back(
            [&world, seed, i, operations] { Script(world, seed + i).run(operations); });
    }
    Script(world, seed).run(operations);
    for (std::thread& other : others) {
        other.join();
    }
    for (StreamId stream = 1; stream <= kStreams; ++stream) {
        world.device.record(stream)->wait();
    }

    const PagerStats stats = world.pager.stats();
    std::printf("seed %llu: kernels %llu evictions %llu restores %llu in place %llu KiB\n",
                static_cast<unsigned long long>(seed),
                static_cast<unsigned long long>(world.kernels),
                static_cast<unsigned long long>(stats.evictions),
                static_cast<unsigned long long>(stats.restores),
                static_cast<unsigned long long>(stats.in_place_bytes / kKiB));
    EXPECT_EQ(world.wrong, 0u);
    EXPECT_EQ(stats.verify_faults, 0u);
    EXPECT_GT(stats.evictions, static_cast<uint64_t>(operations) / 50);
    EXPECT_EQ(stats.resident_bytes + stats.cold_bytes, 0u);
    EXPECT_EQ(world.memory.used_bytes(), 0u);
    EXPECT_EQ(world.host.stats().in_use_bytes, 0u);
    EXPECT_EQ(world.port.owners() + world.port.held(), 0);
}

INSTANTIATE_TEST_SUITE_P(Terrains, PagerStreamsTest,
                         ::testing::Values(Terrain{"plain", 16 * kMiB, false, 1},
                                           Terrain{"verified", 16 * kMiB, true, 1},
                                           Terrain{"threads", 16 * kMiB, false, 3},
                                           Terrain{"short_of_host_memory", 512 * kKiB, false, 2}),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace trainstream
