#include "base/mutex.h"

#include <vector>

#include "base/assert.h"

namespace trainstream {

#ifdef TS_DEBUG_CHECKS
namespace {

// The ranks this thread holds, lowest first. A plain vector: a thread holds two or three at most.
thread_local std::vector<LockRank> t_held_ranks;

void note_locked(LockRank rank) {
    if (!t_held_ranks.empty()) {
        TS_ASSERT_LT(static_cast<int>(t_held_ranks.back()), static_cast<int>(rank));
    }
    t_held_ranks.push_back(rank);
}

void note_unlocked(LockRank rank) {
    for (auto held = t_held_ranks.rbegin(); held != t_held_ranks.rend(); ++held) {
        if (*held == rank) {
            t_held_ranks.erase(std::next(held).base());
            return;
        }
    }
    TS_ASSERT(false && "unlocking a mutex that this thread does not hold");
}

}  // namespace

bool holds_no_lock() { return t_held_ranks.empty(); }
#else
namespace {
void note_locked(LockRank /*rank*/) {}
void note_unlocked(LockRank /*rank*/) {}
}  // namespace

bool holds_no_lock() { return true; }
#endif

void Mutex::lock() {
    note_locked(rank_);
    mutex_.lock();
}

void Mutex::unlock() {
    note_unlocked(rank_);
    mutex_.unlock();
}

void CondVar::wait(Mutex& mutex) {
    note_unlocked(mutex.rank_);
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
    note_locked(mutex.rank_);
}

}  // namespace trainstream
