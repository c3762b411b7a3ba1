// csrc/base/mutex.h: a mutex with a rank, so that lock order is one list and debug builds check it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "base/thread_annotations.h"

namespace trainstream {

/// A thread takes locks in rising rank only. Gaps leave room for later ones.
enum class LockRank : uint8_t {
    kUpdates = 5,     // Optimizers' updates that wait.
    kRegistry = 10,   // The allocators' list of pagers.
    kPager = 20,      // Storage table, pins, residency.
    kHostPool = 30,   // Free extents of page-locked memory.
    kStepClock = 35,  // Marks of the step that runs.
    kMemory = 40,     // The simulated device's arena; the bookkeeping beside torch's allocator.
    kDevice = 50,     // Copy queues, event pools.
    kWorkers = 55,    // The host optimizer's threads and their job.
    kLog = 60,        // Once-only messages.
};

/// Owner: whoever declares it. Invariant (debug): no lock of the same or a higher rank is held by
/// the thread that locks it.
class TS_CAPABILITY("mutex") Mutex {
public:
    explicit Mutex(LockRank rank) : rank_(rank) {}
    Mutex(const Mutex&) = delete;
    Mutex& operator=(const Mutex&) = delete;

    void lock() TS_ACQUIRE();
    void unlock() TS_RELEASE();

private:
    friend class CondVar;
    friend struct ForkHandlers;  // base/fork_guard.cpp holds it over fork().
    std::mutex mutex_;
    const LockRank rank_;
};

/// Holds a Mutex for a scope; may be opened for the length of a call that must not hold it.
class TS_SCOPED_CAPABILITY MutexLock {
public:
    explicit MutexLock(Mutex& mutex) TS_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
    ~MutexLock() TS_RELEASE() {
        if (held_) {
            mutex_.unlock();
        }
    }
    MutexLock(const MutexLock&) = delete;
    MutexLock& operator=(const MutexLock&) = delete;

    void unlock() TS_RELEASE() {
        held_ = false;
        mutex_.unlock();
    }
    void lock() TS_ACQUIRE() {
        mutex_.lock();
        held_ = true;
    }

private:
    Mutex& mutex_;
    bool held_ = true;
};

/// A condition variable over Mutex. wait() may wake without a reason: callers loop.
class CondVar {
public:
    void wait(Mutex& mutex) TS_REQUIRES(mutex);
    void notify_all() { condition_.notify_all(); }

private:
    std::condition_variable condition_;
};

/// True when this thread holds no ranked lock. Debug builds only know; release builds say true.
bool holds_no_lock();

}  // namespace trainstream
