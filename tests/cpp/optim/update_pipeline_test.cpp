#include "optim/update_pipeline.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "base/error.h"
#include "device/sim_device.h"
#include "support/manual_event.h"
#include "support/optim_state.h"

namespace trainstream::optim {
namespace {

using testing::all_formats;
using testing::OptimState;

constexpr size_t kChunk = 4 * kTile;

/// A kernel that runs late and on a thread of its own, in order.
class ThreadKernel final : public StreamKernel {
public:
    explicit ThreadKernel(uint64_t seed) : random_(seed), thread_([this] { run(); }) {}
    ~ThreadKernel() override {
        add(nullptr);
        thread_.join();
    }

    void launch(const SliceUpdate& update) override {
        launched += update.slice.count;
        add([update, pause = random_() % 300] {
            std::this_thread::sleep_for(std::chrono::microseconds(pause));
            optim::update(InstructionSet::kScalar, update.formats, update.slice, update.scalars,
                          update.key);
        });
    }
    Event record() override {
        auto event = std::make_shared<testing::ManualEvent>();
        add([event] { event->finish(); });
        return event;
    }

    std::atomic<uint64_t> launched{0};

private:
    void add(std::function<void()> work) {
        const std::lock_guard<std::mutex> lock(mutex_);
        queue_.push_back(std::move(work));
        changed_.notify_all();
    }
    void run() {
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [this] { return !queue_.empty(); });
            const std::function<void()> work = std::move(queue_.front());
            queue_.pop_front();
            lock.unlock();
            if (work == nullptr) {
                return;
            }
            work();
        }
    }

    std::mt19937_64 random_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> queue_;
    std::thread thread_;
};

/// Parameters of every format; sizes around tiles and chunks, small ones between large ones.
std::vector<OptimState> make_parameters() {
    const std::vector<size_t> counts = {1,  3 * kChunk + 5, 17,         33, 0,
                                        15, kTile,          kChunk - 1, 2,  2 * kChunk};
    std::vector<OptimState> parameters;
    for (const Formats formats : all_formats()) {
        const size_t number = parameters.size();
        parameters.emplace_back(formats, counts[number % counts.size()], number);
    }
    return parameters;
}

std::vector<DeviceUpdate> updates_of(std::vector<OptimState>& parameters, std::mt19937_64& random) {
    std::vector<DeviceUpdate> updates;
    for (OptimState& parameter : parameters) {
        SliceUpdate update{parameter.formats, parameter.slice(), AdamW::scalars({}, 3, 0.5),
                           rounding_key(1, updates.size(), 3)};
        update.slice.weight_mirror = nullptr;
        updates.push_back({update, random() % 2 == 0, random() % 2 == 0});
    }
    return updates;
}

void wait_for(const std::vector<Event>& events) {
    for (const Event& event : events) {
        if (event != nullptr) {
            event->wait();
        }
    }
}

// Goal: whoever does how much, the bits are those of one kernel over whole parameters, and every
// element is updated once. Method: cores alone, kernel alone and both, with late copies and late
// kernels from a seed; what "device memory" has is touched by copies and kernels only.
TEST(UpdatePipelineTest, EverySplitGivesTheBitsOfOneKernel) {
    const uint64_t seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<OptimState> expected = make_parameters();
    uint64_t elements = 0;
    for (const DeviceUpdate& one : updates_of(expected, random)) {
        update(InstructionSet::kScalar, one.update.formats, one.update.slice, one.update.scalars,
               one.update.key);
        elements += one.update.slice.count;
    }
    HostEngine host({.threads = 2});
    std::vector<std::byte> staging(PipelineOptions{.chunk_elements = kChunk}.staging_bytes());
    for (int round = 0; round < 12; ++round) {
        PipelineOptions options{.use_host = round % 3 != 1, .use_kernel = round % 3 != 0};
        options.chunk_elements = kChunk;
        SimDevice device({.seed = random(), .copy_latency_ns_max = 200'000});
        ThreadKernel kernel(random());
        std::vector<OptimState> parameters = make_parameters();
        UpdatePipeline pipeline(device, host, &kernel, staging.data(), options);
        std::vector<Event> finished;
        const PipelineShare share =
            pipeline.run(updates_of(parameters, random), nullptr, &finished);
        wait_for(finished);
        EXPECT_EQ(share.host + share.kernel, elements);
        EXPECT_EQ(share.kernel, kernel.launched.load());
        EXPECT_EQ(share.host == 0, !options.use_host);
        EXPECT_EQ(share.kernel == 0, !options.use_kernel);
        for (size_t i = 0; i < parameters.size(); ++i) {
            EXPECT_TRUE(parameters[i] == expected[i]) << "round " << round << ", parameter " << i;
        }
    }
}

// Goal: nothing is read before it is ready. Method: gradients are filled in once all that can begin
// before has begun.
TEST(UpdatePipelineTest, CoresWaitForTheGradients) {
    OptimState expected(all_formats()[0], 2 * kChunk, 1);
    OptimState parameter(all_formats()[0], 2 * kChunk, 1);
    std::mt19937_64 random(1);
    const SliceUpdate one{expected.formats, expected.slice(), AdamW::scalars({}, 1, 1), {}};
    update(InstructionSet::kScalar, one.formats, one.slice, one.scalars, one.key);
    const auto right = parameter.grad;
    std::memset(parameter.grad.data(), 0, 4 * parameter.count);
    SliceUpdate update{parameter.formats, parameter.slice(), AdamW::scalars({}, 1, 1), {}};
    HostEngine host({.threads = 1});
    SimDevice device;
    std::vector<std::byte> staging(PipelineOptions{.chunk_elements = kChunk}.staging_bytes());
    for (const bool on_host : {true, false}) {
        const auto ready = std::make_shared<testing::ManualEvent>();
        OptimState copy = parameter;
        update.slice = copy.slice();
        std::thread late([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            copy.grad = right;
            ready->finish();
        });
        UpdatePipeline pipeline(device, host, nullptr, staging.data(),
                                {.use_kernel = false, .chunk_elements = kChunk});
        std::vector<Event> finished;
        const std::vector<DeviceUpdate> updates = {{update, on_host, on_host}};
        pipeline.run(updates, ready, &finished);
        wait_for(finished);
        late.join();
        EXPECT_TRUE(copy == expected);
    }
}

// Goal: a refused copy ends the step with the device's error, with no copy left under way. Method:
// every third copy is refused; the staging memory goes away at once.
TEST(UpdatePipelineTest, RefusedCopyEndsTheStepWithItsError) {
    std::mt19937_64 random(7);
    HostEngine host({.threads = 1});
    for (uint64_t seed = 0; seed < 20; ++seed) {
        SimDevice device({.seed = seed, .copy_latency_ns_max = 100'000});
        device.set_faults({.fail_copy_one_in = 3});
        std::vector<OptimState> parameters = make_parameters();
        std::vector<std::byte> staging(PipelineOptions{.chunk_elements = kChunk}.staging_bytes());
        UpdatePipeline pipeline(device, host, nullptr, staging.data(),
                                {.use_kernel = false, .chunk_elements = kChunk});
        std::vector<Event> finished;
        std::vector<DeviceUpdate> updates = updates_of(parameters, random);
        for (DeviceUpdate& update : updates) {
            update.grad_on_host = false;
        }
        EXPECT_THROW(pipeline.run(updates, nullptr, &finished), Error);
    }
}

}  // namespace
}  // namespace trainstream::optim
