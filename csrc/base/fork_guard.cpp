#include "base/fork_guard.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace trainstream {

/// The process-wide list of guards and the three handlers of pthread_atfork().
///
/// The mutexes are taken in rising rank, as everywhere; past Mutex::lock(), since its check
/// forbids two of one rank, which is harmless here: nobody else holds two of one rank.
struct ForkHandlers {
    static ForkHandlers& instance() {
        // Never destroyed: a fork() may come after the static destructors.
        static auto* const handlers = new ForkHandlers();
        return *handlers;
    }

    ForkHandlers() { pthread_atfork(&before_fork, &in_parent, &in_child); }

    void add(ForkGuard* guard) {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto place = std::upper_bound(guards.begin(), guards.end(), guard,
                                            [](const ForkGuard* a, const ForkGuard* b) {
                                                return a->mutex_.rank_ < b->mutex_.rank_;
                                            });
        guards.insert(place, guard);
    }

    void remove(ForkGuard* guard) {
        const std::lock_guard<std::mutex> lock(mutex);
        guards.erase(std::find(guards.begin(), guards.end(), guard));
    }

    static void before_fork() {
        ForkHandlers& handlers = instance();
        handlers.mutex.lock();
        for (ForkGuard* guard : handlers.guards) {
            guard->mutex_.mutex_.lock();
        }
    }

    static void in_parent() {
        ForkHandlers& handlers = instance();
        for (auto guard = handlers.guards.rbegin(); guard != handlers.guards.rend(); ++guard) {
            (*guard)->mutex_.mutex_.unlock();
        }
        handlers.mutex.unlock();
    }

    static void in_child() {
        for (ForkGuard* guard : instance().guards) {
            guard->in_child_();
        }
        in_parent();
    }

    std::mutex mutex;
    std::vector<ForkGuard*> guards;  // In rising rank.
};

ForkGuard::ForkGuard(Mutex& mutex, std::function<void()> in_child)
    : mutex_(mutex), in_child_(std::move(in_child)) {
    ForkHandlers::instance().add(this);
}

ForkGuard::~ForkGuard() { ForkHandlers::instance().remove(this); }

}  // namespace trainstream
