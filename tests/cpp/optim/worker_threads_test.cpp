#include "optim/worker_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "support/in_child.h"

namespace trainstream::optim {
namespace {

/// Whether every item is worked on once.
bool covers(WorkerThreads& workers, size_t items, size_t chunk) {
    std::vector<std::atomic<int>> visits(items);
    workers.parallel_for(items, chunk, [&](size_t begin, size_t end) noexcept {
        for (size_t i = begin; i < end; ++i) {
            ++visits[i];
        }
    });
    for (const std::atomic<int>& count : visits) {
        if (count != 1) {
            return false;
        }
    }
    return true;
}

TEST(WorkerThreadsTest, EveryItemIsWorkedOnOnce) {
    for (const size_t count : {1, 2, 7, 16}) {
        WorkerThreads workers(count);
        EXPECT_EQ(workers.count(), count);
        for (const size_t items : {0, 1, 2, 15, 16, 17, 1000}) {
            for (const size_t chunk : {1, 3, 16}) {
                EXPECT_TRUE(covers(workers, items, chunk))
                    << count << ", " << items << ", " << chunk;
            }
        }
    }
}

// Goal: all threads work, the caller among them. Method: each of 4 items waits for the others.
TEST(WorkerThreadsTest, AllThreadsWorkAndTheCallerToo) {
    WorkerThreads workers(4);
    std::atomic<int> arrived{0};
    std::mutex mutex;
    std::set<std::thread::id> ids;
    workers.parallel_for(4, 1, [&](size_t, size_t) noexcept {
        ++arrived;
        while (arrived < 4) {
            std::this_thread::yield();
        }
        const std::lock_guard<std::mutex> lock(mutex);
        ids.insert(std::this_thread::get_id());
    });
    EXPECT_EQ(ids.size(), 4U);
    EXPECT_EQ(ids.count(std::this_thread::get_id()), 1U);
}

// Goal: callers take turns, and none returns before its own work is done.
TEST(WorkerThreadsTest, SeveralThreadsMayCall) {
    WorkerThreads workers(3);
    std::atomic<int> failures{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&] {
            for (int round = 0; round < 200; ++round) {
                failures += covers(workers, 40, 1) ? 0 : 1;
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
    EXPECT_EQ(failures, 0);
}

/// Forks while another thread keeps the workers busy, and expects `body` to hold in each child.
template <typename Body>
void expect_in_children(WorkerThreads& workers, const Body& body) {
    ASSERT_TRUE(covers(workers, 100, 1));
    std::atomic<bool> stop{false};
    // It asks for no memory: AddressSanitizer's allocator, unlike the system's, may be left locked
    // in a child by whoever is in it.
    std::thread busy([&] {
        std::atomic<size_t> visits{0};
        while (!stop) {
            workers.parallel_for(100, 1, [&](size_t begin, size_t end) noexcept {
                visits.fetch_add(end - begin, std::memory_order_relaxed);
            });
        }
    });
    for (int round = 0; round < 20; ++round) {
        EXPECT_TRUE(testing::holds_in_child(body));
    }
    stop = true;
    busy.join();
    EXPECT_TRUE(covers(workers, 100, 1));
}

// Goal: a forked child works with threads of its own, also when the parent was at work; the parent
// goes on.
TEST(WorkerThreadsTest, ChildHasThreadsOfItsOwn) {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "ThreadSanitizer allows no threads in a child";
#endif
    auto workers = std::make_unique<WorkerThreads>(3);
    expect_in_children(*workers, [&] {
        const bool works = covers(*workers, 100, 1) && covers(*workers, 100, 1);
        workers.reset();  // Joins the child's own.
        return works;
    });
}

TEST(WorkerThreadsTest, ChildThatDestroysThemWaitsForNoThreadOfTheParent) {
    auto workers = std::make_unique<WorkerThreads>(3);
    expect_in_children(*workers, [&] {
        workers.reset();
        return true;
    });
}

}  // namespace
}  // namespace trainstream::optim
