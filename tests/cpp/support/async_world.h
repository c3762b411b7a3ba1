// tests/cpp/support/async_world.h: a pager on a device that computes asynchronously, and kernels
// that check the bytes they find.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "pager/pager.h"
#include "support/async_device.h"
#include "support/fake_owner.h"
#include "support/flaky_device.h"
#include "support/manual_event.h"

namespace trainstream::testing {

using Content = std::shared_ptr<const std::vector<unsigned char>>;

inline Content random_content(size_t size_bytes, uint64_t state) {
    auto bytes = std::make_shared<std::vector<unsigned char>>(size_bytes);
    for (unsigned char& byte : *bytes) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        byte = static_cast<unsigned char>(state >> 56);
    }
    return bytes;
}

/// A storage of the script, and what it has once all kernels launched so far have run.
struct AsyncTensor {
    FakeOwner* owner = nullptr;
    Content content;
};

struct AsyncWorldOptions {
    size_t streams = 2;
    size_t arena_bytes = 256 * kKiB;  // Of device memory, for each stream.
    uint64_t host_bytes = 16 * kMiB;
    uint64_t seed = 1;
    uint64_t delay_ns_max = 0;
    PagerOptions pager = {};
};

/// Owner: the test, which plays the operators. Kernels run later than they are launched.
struct AsyncWorld {
    /// What a kernel finds, and what it leaves; null: it does not look, or only reads.
    struct Argument {
        unsigned char* address = nullptr;
        Content before;
        Content after;
    };

    explicit AsyncWorld(const AsyncWorldOptions& options)
        : device(options.streams, options.seed, options.delay_ns_max),
          memory(device, options.streams, options.arena_bytes),
          door(device),
          host(door, {.limit_bytes = options.host_bytes, .grow_in_background = false}),
          pager(door, memory, host, port, options.pager),
          streams(options.streams) {
        port.attach(pager);
    }

    Event launch(StreamId stream, std::vector<Argument> arguments) {
        return device.launch(stream, [this, arguments = std::move(arguments)] {
            for (const Argument& argument : arguments) {
                if (argument.before != nullptr &&
                    std::memcmp(argument.address, argument.before->data(),
                                argument.before->size()) != 0) {
                    wrong.fetch_add(1);
                }
                if (argument.after != nullptr) {
                    std::memcpy(argument.address, argument.after->data(), argument.after->size());
                }
            }
            kernels.fetch_add(1);
        });
    }
    /// Work of `stream` from now on waits until the event is finished.
    std::shared_ptr<ManualEvent> hold_back(StreamId stream) {
        auto gate = std::make_shared<ManualEvent>();
        device.wait(stream, gate);
        return gate;
    }

    AsyncTensor make(size_t size_bytes, StreamId stream, uint64_t state) {
        void* address = pager.allocate(size_bytes, stream);
        AsyncTensor tensor{port.adopt(address, size_bytes), random_content(size_bytes, state)};
        launch(stream, {{tensor.owner->bytes(), nullptr, tensor.content}});
        pager.note_outputs({tensor.owner}, stream, nullptr);
        return tensor;
    }
    /// The kernel of an operator, or one that no operator announces. `after`: what it writes.
    Event launch_on(AsyncTensor* tensor, StreamId stream, Content after = nullptr) {
        const Event done = launch(stream, {{tensor->owner->bytes(), tensor->content, after}});
        tensor->content = after != nullptr ? std::move(after) : tensor->content;
        return done;
    }
    void operate(AsyncTensor* tensor, StreamId stream, UseKind kind, Content after = nullptr) {
        Pins pins;
        pager.begin_use({{tensor->owner, after != nullptr, kind}}, stream, &pins);
        launch_on(tensor, stream, std::move(after));
        pager.end_use(&pins);
        pager.boundary();
    }

    bool is_resident(const AsyncTensor& tensor) const {
        Residency residency = Residency::kCold;
        EXPECT_TRUE(pager.residency(tensor.owner->address, &residency));
        return residency == Residency::kResident;
    }
    void finish_all() {
        for (StreamId stream = 1; stream <= streams; ++stream) {
            device.record(stream)->wait();
        }
        device.finish_copies();
    }
    /// Called once all owners were dropped.
    void expect_nothing_left() {
        pager.boundary();  // A plan about storages that are no more gives its memory back.
        finish_all();
        const PagerStats stats = pager.stats();
        EXPECT_EQ(wrong.load(), 0u);
        EXPECT_EQ(stats.verify_faults, 0u);
        EXPECT_EQ(stats.resident_bytes + stats.cold_bytes, 0u);
        EXPECT_EQ(memory.used_bytes(), 0u);
        EXPECT_EQ(host.stats().in_use_bytes, 0u);
        EXPECT_EQ(port.owners() + port.held() + port.remembered() + port.blocked(), 0);
    }

    AsyncDevice device;
    AsyncMemory memory;
    FlakyDevice door;  // To the device, for the pager and its pool.
    HostPool host;
    FakeOwnerPort port;
    Pager pager;
    const size_t streams;
    std::atomic<uint64_t> kernels{0};
    std::atomic<uint64_t> wrong{0};
};

}  // namespace trainstream::testing
