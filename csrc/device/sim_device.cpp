#include "device/sim_device.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/assert.h"
#include "base/error.h"

namespace trainstream {
namespace {

using Clock = std::chrono::steady_clock;

/// A random number that depends on nothing but its arguments (splitmix64), so that a copy's fate
/// does not depend on the order in which threads ask.
uint64_t random_of(uint64_t seed, uint64_t ordinal) {
    uint64_t x = seed + (ordinal + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

constexpr uint64_t kFaultSalt = 0x6661756C74u;  // Faults do not follow the delays.

size_t lane_index(CopyDirection direction) { return direction == CopyDirection::kToHost ? 0 : 1; }

std::chrono::nanoseconds transfer_time(size_t size_bytes, uint64_t bytes_per_second) {
    if (bytes_per_second == 0) {
        return std::chrono::nanoseconds{0};
    }
    const double seconds = static_cast<double>(size_bytes) / static_cast<double>(bytes_per_second);
    return std::chrono::nanoseconds{static_cast<int64_t>(seconds * 1e9)};
}

}  // namespace

/// One copy and the event that it is done.
///
/// Owner: its queue until it is done, then whoever waits for it.
/// Lock:  none. One thread runs it; `done_` hands its bytes over.
class SimDevice::Copy final : public EventState {
public:
    Copy(SimDevice& device, CopyDirection copy_direction, void* target, const void* source,
         size_t copy_bytes, std::vector<Event> after)
        : direction(copy_direction),
          size_bytes(copy_bytes),
          device_(device),
          target_(target),
          source_(source),
          after_(std::move(after)) {}

    bool is_done() const override {
        device_.finish_if_forked();
        return done_.load(std::memory_order_acquire);
    }

    void wait() const override {
        TS_ASSERT(holds_no_lock());
        device_.finish_if_forked();
        done_.wait(false, std::memory_order_acquire);
    }

    void wait_for_its_events() {
        for (const Event& event : after_) {
            if (event && !event->is_done()) {
                event->wait();
            }
        }
        after_.clear();  // Else the events of a long run would hang on one another.
    }

    void move_bytes() { std::memcpy(target_, source_, size_bytes); }

    void mark_done() {
        done_.store(true, std::memory_order_release);
        done_.notify_all();
    }

    const CopyDirection direction;
    const size_t size_bytes;
    uint64_t ordinal = 0;
    std::chrono::nanoseconds delay{0};
    std::chrono::nanoseconds transfer{0};

private:
    SimDevice& device_;
    void* const target_;
    const void* const source_;
    std::vector<Event> after_;
    std::atomic<bool> done_{false};
};

/// The moment at which it was made: compute is the calling thread.
///
/// Owner: whoever asked for it. Lock: none; it never changes.
class SimDevice::Mark final : public EventState {
public:
    bool is_done() const override { return true; }
    void wait() const override {}

    const Clock::time_point time = Clock::now();
};

SimDevice::SimDevice(const SimDeviceOptions& options)
    : options_(options),
      lanes_(std::make_unique<Lanes>()),
      fork_guard_(mutex_, [this] { enter_child(); }) {}

SimDevice::~SimDevice() {
    finish_if_forked();
    MutexLock lock(mutex_);
    if (forked_.load()) {
        // Left alone: threads that do not exist here cannot be joined, and a condition variable
        // on which one of them slept would wait for it.
        static_cast<void>(lanes_.release());
        return;
    }
    stopping_ = true;
    for (Lane& lane : *lanes_) {
        lane.changed.notify_all();
        if (const std::unique_ptr<std::thread> thread = std::move(lane.thread)) {
            lock.unlock();
            thread->join();
            lock.lock();
        }
    }
}

MemoryInfo SimDevice::memory_info() const { return {options_.memory_bytes, options_.memory_bytes}; }

bool SimDevice::page_lock(void* address, size_t size_bytes, std::string* reason) {
    TS_ASSERT_GT(size_bytes, size_t{0});
    const auto begin = reinterpret_cast<uintptr_t>(address);
    const MutexLock lock(mutex_);
    if (find_locked(begin, begin + size_bytes).first) {
        *reason = "part of the range is page-locked already";
        return false;
    }
    if (locked_bytes_ + size_bytes > faults_.page_lock_limit_bytes) {
        *reason = "the simulated limit is " + format_bytes(faults_.page_lock_limit_bytes);
        return false;
    }
    locked_ranges_.emplace(begin, size_bytes);
    locked_bytes_ += size_bytes;
    return true;
}

void SimDevice::page_unlock(void* address) noexcept {
    const MutexLock lock(mutex_);
    const auto range = locked_ranges_.find(reinterpret_cast<uintptr_t>(address));
    TS_ASSERT(range != locked_ranges_.end());
    if (range != locked_ranges_.end()) {
        locked_bytes_ -= range->second;
        locked_ranges_.erase(range);
    }
}

Event SimDevice::record(StreamId stream) {
    TS_ASSERT(!is_capturing(stream));
    return nullptr;  // Compute is the calling thread: all work given so far is done.
}

Event SimDevice::mark(StreamId stream) {
    TS_ASSERT(!is_capturing(stream));
    static_cast<void>(stream);
    return std::make_shared<Mark>();
}

uint64_t SimDevice::ns_between(const Event& from, const Event& to) const {
    const auto time_of = [](const Event& event) {
        return static_cast<const Mark&>(*event).time;  // NOLINT: marks are asked for only.
    };
    const std::chrono::nanoseconds passed = time_of(to) - time_of(from);
    return static_cast<uint64_t>(std::max<int64_t>(0, passed.count()));
}

void SimDevice::wait(StreamId /*stream*/, const Event& event) {
    if (event) {
        event->wait();
    }
}

Event SimDevice::copy(CopyDirection direction, void* target, const void* source, size_t size_bytes,
                      const std::vector<Event>& after) {
    TS_ASSERT(!is_capturing(0));
    finish_if_forked();
    const bool to_host = direction == CopyDirection::kToHost;
    auto copy = std::make_shared<Copy>(*this, direction, target, source, size_bytes, after);
    copy->transfer = transfer_time(size_bytes, to_host ? options_.to_host_bytes_per_second
                                                       : options_.to_device_bytes_per_second);
    MutexLock lock(mutex_);
    check_fault(direction, size_bytes);
    check_range(direction, to_host ? target : source, size_bytes);
    copy->ordinal = copies_asked_;
    if (options_.copy_latency_ns_max != 0) {
        copy->delay = std::chrono::nanoseconds{random_of(options_.seed, copy->ordinal) %
                                               (options_.copy_latency_ns_max + 1)};
    }
    Lane& lane = (*lanes_)[lane_index(direction)];
    lane.queue.push_back(copy);
    if (forked_.load()) {
        lock.unlock();
        finish_if_forked();
        return copy;
    }
    if (!lane.thread) {
        lane.thread = std::make_unique<std::thread>([this, direction] { run_lane(direction); });
    }
    lane.changed.notify_all();
    return copy;
}

void SimDevice::check_fault(CopyDirection direction, size_t size_bytes) {
    const uint64_t ordinal = copies_asked_++;
    const uint64_t one_in = faults_.fail_copy_one_in;
    if (one_in != 0 && random_of(options_.seed ^ kFaultSalt, ordinal) % one_in == 0) {
        throw errors::copy_failed(words(direction), size_bytes,
                                  "a fault was asked for (copy " + std::to_string(ordinal) +
                                      ", seed " + std::to_string(options_.seed) + ")");
    }
}

void SimDevice::check_range(CopyDirection direction, const void* host, size_t size_bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(host);
    const auto [meets, lies_in] = find_locked(begin, begin + size_bytes);
    if (meets && !lies_in) {
        throw errors::copy_failed(words(direction), size_bytes,
                                  "its host side reaches beyond one page-locked range");
    }
}

std::pair<bool, bool> SimDevice::find_locked(uintptr_t begin, uintptr_t end) const {
    const auto next = locked_ranges_.lower_bound(end);
    if (next == locked_ranges_.begin()) {
        return {false, false};
    }
    const auto& [range_begin, range_bytes] = *std::prev(next);  // The last that begins before end.
    const uintptr_t range_end = range_begin + range_bytes;
    return {range_end > begin, range_begin <= begin && end <= range_end};
}

void SimDevice::run_lane(CopyDirection direction) {
    // When the link is free again. Apart from the clock: what sleeping and copying cost the host
    // must not add up to a slower link than the one asked for.
    Clock::time_point link_free_at = Clock::now();
    MutexLock lock(mutex_);
    Lane& lane = (*lanes_)[lane_index(direction)];
    for (;;) {
        while (lane.queue.empty() && !stopping_) {
            lane.changed.wait(mutex_);
        }
        if (lane.queue.empty()) {
            return;
        }
        const std::shared_ptr<Copy> copy = lane.queue.front();
        lock.unlock();

        copy->wait_for_its_events();
        const Clock::time_point start = Clock::now();
        link_free_at = std::max(link_free_at, start) + copy->delay + copy->transfer;
        if (link_free_at > start) {
            std::this_thread::sleep_until(link_free_at);
        }
        copy->move_bytes();  // Last, so that a reader who does not wait sees the old bytes.
        const auto busy = std::chrono::nanoseconds{Clock::now() - start};

        lock.lock();
        count(*copy, static_cast<uint64_t>(busy.count()));
        lane.queue.pop_front();
        copy->mark_done();
    }
}

void SimDevice::count(const Copy& copy, uint64_t busy_ns) {
    const bool to_host = copy.direction == CopyDirection::kToHost;
    (to_host ? stats_.to_host_bytes : stats_.to_device_bytes) += copy.size_bytes;
    stats_.busy_ns += busy_ns;
}

void SimDevice::finish_if_forked() {
    if (!forked_.load()) {
        return;
    }
    MutexLock lock(mutex_);
    Queue left;
    for (Lane& lane : *lanes_) {
        std::move(lane.queue.begin(), lane.queue.end(), std::back_inserter(left));
        lane.queue.clear();
    }
    lock.unlock();
    // In the order of asking: a copy waits only for earlier ones. The copy that the fork cut off
    // is done again from its start; its source is still whole, since its event was not done.
    std::sort(left.begin(), left.end(),
              [](const auto& a, const auto& b) { return a->ordinal < b->ordinal; });
    for (const std::shared_ptr<Copy>& copy : left) {
        copy->wait_for_its_events();
        copy->move_bytes();
        lock.lock();
        count(*copy, 0);
        lock.unlock();
        copy->mark_done();
    }
}

void SimDevice::enter_child() {
    forked_.store(true);
    for (Lane& lane : *lanes_) {
        static_cast<void>(lane.thread.release());  // It has no thread here to join or detach.
    }
}

bool SimDevice::is_capturing(StreamId /*stream*/) const { return capturing_.load(); }

CopyStats SimDevice::copy_stats() const {
    const MutexLock lock(mutex_);
    return stats_;
}

void SimDevice::set_faults(const SimFaults& faults) {
    const MutexLock lock(mutex_);
    faults_ = faults;
}

void SimDevice::set_capturing(bool capturing) { capturing_.store(capturing); }

uint64_t SimDevice::locked_bytes() const {
    const MutexLock lock(mutex_);
    return locked_bytes_;
}

}  // namespace trainstream
