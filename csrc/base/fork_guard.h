// csrc/base/fork_guard.h: what a mutex guards stays whole over fork().
//
// A training script forks while our threads work (data-loader workers). The child has none of them:
// a mutex that one of them held would never open, and what it guards could be half changed. Apart
// from Mutex, since only state that a child may touch pays for it.
#pragma once

#include <functional>

#include "base/mutex.h"

namespace trainstream {

/// Holds a mutex over every fork() and, in the child, says so to its owner.
///
/// Owner: the object whose mutex it is; declared after the mutex.
/// Lock:  a process-wide one that is taken before every ranked lock. Hence construct and destroy a
///        guard with no guarded mutex held.
class ForkGuard {
public:
    /// `in_child` runs in the forked child, with the mutex held and no other thread alive. It sets
    /// flags and forgets threads; it must not take a lock.
    ForkGuard(Mutex& mutex, std::function<void()> in_child);
    ~ForkGuard();
    ForkGuard(const ForkGuard&) = delete;
    ForkGuard& operator=(const ForkGuard&) = delete;

private:
    friend struct ForkHandlers;
    Mutex& mutex_;
    const std::function<void()> in_child_;
};

}  // namespace trainstream
