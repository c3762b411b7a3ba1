// tests/cpp/support/async_device.h: a device whose compute is asynchronous too, like CUDA's.
//
// SimDevice computes on the calling thread, so it cannot show that a block was reused while a
// kernel that was given to a stream before still works on it. Here every stream is a thread.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/free_extents.h"
#include "base/mutex.h"
#include "device/device.h"
#include "device/device_memory.h"
#include "support/manual_event.h"

namespace trainstream::testing {

/// Work in the order given, after the events that each piece waits for, on a thread of its own.
///
/// Lock: its own, a leaf; not held while work runs.
class Timeline {
public:
    Timeline() : thread_([this] { run(); }) {}
    ~Timeline() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }
    Timeline(const Timeline&) = delete;
    Timeline& operator=(const Timeline&) = delete;

    Event give(std::vector<Event> after, std::function<void()> work) {
        auto done = std::make_shared<ManualEvent>();
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            queue_.push_back({std::move(after), std::move(work), done});
        }
        changed_.notify_all();
        return done;
    }

private:
    struct Piece {
        std::vector<Event> after;
        std::function<void()> work;
        std::shared_ptr<ManualEvent> done;
    };

    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
            if (queue_.empty()) {
                return;
            }
            const Piece piece = std::move(queue_.front());
            queue_.pop_front();
            lock.unlock();
            for (const Event& event : piece.after) {
                if (event != nullptr) {
                    event->wait();
                }
            }
            piece.work();
            piece.done->finish();
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Piece> queue_;
    bool stopping_ = false;
    std::thread thread_;  // Last: it uses the others.
};

/// A point of a timeline that knows when it was reached. Lock: none; `done` hands `time` over.
struct Mark final : public EventState {
    using Clock = std::chrono::steady_clock;

    bool is_done() const override { return done->is_done(); }
    void wait() const override { done->wait(); }

    Event done;
    Clock::time_point time;
};

/// A Device of timelines: one for each stream 1 to `streams`, one for each direction of copies. No
/// call makes the host wait.
class AsyncDevice final : public Device {
public:
    AsyncDevice(size_t streams, uint64_t seed, uint64_t delay_ns_max)
        : delay_ns_max_(delay_ns_max), random_(seed), streams_(streams) {}

    /// Runs `kernel` on `stream` after all that the stream has now.
    Event launch(StreamId stream, std::function<void()> kernel) {
        return at(stream).give({}, delayed(std::move(kernel)));
    }

    const char* name() const override { return "async"; }
    MemoryInfo memory_info() const override { return {kGiB, kGiB}; }
    int numa_node() const override { return -1; }
    bool page_lock(void*, size_t, std::string*) override { return true; }
    void page_unlock(void*) noexcept override {}
    bool reads_pageable_memory() const override { return true; }
    Event record(StreamId stream) override {
        EXPECT_FALSE(capturing.load()) << "recorded during a capture";
        return record_unchecked(stream);
    }
    Event mark(StreamId stream) override {
        EXPECT_FALSE(capturing.load()) << "marked during a capture";
        auto mark = std::make_shared<Mark>();
        mark->done = at(stream).give({}, [mark] { mark->time = Mark::Clock::now(); });
        return mark;
    }
    uint64_t ns_between(const Event& from, const Event& to) const override {
        const auto& first = dynamic_cast<const Mark&>(*from);
        const auto& last = dynamic_cast<const Mark&>(*to);
        EXPECT_TRUE(first.is_done() && last.is_done());
        const std::chrono::nanoseconds passed = last.time - first.time;
        return static_cast<uint64_t>(std::max<int64_t>(0, passed.count()));
    }
    /// For memory, which puts off what a capture frees.
    Event record_unchecked(StreamId stream) {
        return at(stream).give({}, [] {});
    }
    void wait(StreamId stream, const Event& event) override {
        at(stream).give({event}, [] {});
    }
    Event copy(CopyDirection direction, void* target, const void* source, size_t size_bytes,
               const std::vector<Event>& after) override {
        const bool to_host = direction == CopyDirection::kToHost;
        return (to_host ? to_host_ : to_device_).give(after, delayed([target, source, size_bytes] {
                                                          std::memcpy(target, source, size_bytes);
                                                      }));
    }
    void finish_copies() {
        to_host_.give({}, [] {})->wait();
        to_device_.give({}, [] {})->wait();
    }
    bool is_capturing(StreamId) const override { return capturing; }
    std::atomic<bool> capturing{false};
    CopyStats copy_stats() const override { return {}; }

private:
    Timeline& at(StreamId stream) { return streams_.at(stream - 1); }

    std::function<void()> delayed(std::function<void()> work) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const std::chrono::nanoseconds delay{random_() % (delay_ns_max_ + 1)};
        return [delay, work = std::move(work)] {
            std::this_thread::sleep_for(delay);
            work();
        };
    }

    const uint64_t delay_ns_max_;
    std::mutex mutex_;
    std::mt19937_64 random_;
    Timeline to_host_;
    Timeline to_device_;
    std::deque<Timeline> streams_;
};

/// Memory in the order of streams, as torch's caching allocator gives it: each stream has an arena,
/// and a freed block may be used by its own stream's later work at once.
///
/// Lock: its own, of rank kMemory.
class AsyncMemory final : public DeviceMemory {
public:
    AsyncMemory(AsyncDevice& device, size_t streams, size_t arena_bytes)
        : device_(device),
          arena_bytes_(arena_bytes),
          bytes_(streams * arena_bytes + kBlockAlignment) {
        const uintptr_t begin =
            align_up(reinterpret_cast<uintptr_t>(bytes_.data()), kBlockAlignment);
        const MutexLock lock(mutex_);
        for (size_t i = 0; i < streams; ++i) {
            begins_.push_back(begin + i * arena_bytes);
            free_.emplace_back().insert(begins_.back(), arena_bytes);
        }
    }

    void* allocate(size_t size_bytes, StreamId stream) override {
        const MutexLock lock(mutex_);
        take_back();
        const size_t block_bytes = align_up(size_bytes, kBlockAlignment);
        const auto begin = free_.at(stream - 1).take(block_bytes);
        if (!begin) {
            return nullptr;
        }
        blocks_.emplace(*begin, Block{stream, *begin, block_bytes, {}});
        used_bytes_ += block_bytes;
        return reinterpret_cast<void*>(*begin);
    }
    void free(void* address) noexcept override {
        const MutexLock lock(mutex_);
        const auto block = blocks_.find(reinterpret_cast<uintptr_t>(address));
        pending_.push_back(std::move(block->second));
        blocks_.erase(block);
        take_back();
    }
    void defer_reuse(void* address, StreamId stream) override {
        const Event event = device_.record_unchecked(stream);
        const MutexLock lock(mutex_);
        blocks_.at(reinterpret_cast<uintptr_t>(address)).after.push_back(event);
    }
    std::vector<Region> regions(StreamId stream) const override {
        const uintptr_t begin = begins_.at(stream - 1);
        return {{begin, begin + arena_bytes_}};
    }
    bool rebuild(StreamId) override { return false; }
    uint64_t budget_bytes() const override { return begins_.size() * arena_bytes_; }
    uint64_t peak_bytes() const override { return 0; }
    /// Handed out, or freed and waiting for a stream.
    uint64_t used_bytes() {
        const MutexLock lock(mutex_);
        take_back();
        return used_bytes_;
    }

private:
    struct Block {
        StreamId stream;
        uintptr_t begin;
        size_t size_bytes;
        std::vector<Event> after;
    };

    void take_back() TS_REQUIRES(mutex_) {
        std::vector<Block> waiting;
        for (Block& block : pending_) {
            std::erase_if(block.after, [](const Event& event) { return event->is_done(); });
            if (!block.after.empty()) {
                waiting.push_back(std::move(block));
                continue;
            }
            free_.at(block.stream - 1).insert(block.begin, block.size_bytes);
            used_bytes_ -= block.size_bytes;
        }
        pending_.swap(waiting);
    }

    AsyncDevice& device_;
    const size_t arena_bytes_;
    std::vector<unsigned char> bytes_;
    std::vector<uintptr_t> begins_;

    mutable Mutex mutex_{LockRank::kMemory};
    std::vector<FreeExtents> free_ TS_GUARDED_BY(mutex_);
    std::map<uintptr_t, Block> blocks_ TS_GUARDED_BY(mutex_);
    std::vector<Block> pending_ TS_GUARDED_BY(mutex_);  // Freed, and not done with.
    uint64_t used_bytes_ TS_GUARDED_BY(mutex_) = 0;
};

}  // namespace trainstream::testing
