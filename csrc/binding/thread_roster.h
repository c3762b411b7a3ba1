// csrc/binding/thread_roster.h: the threads that run operators, and how far each has come.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace trainstream {

/// Tells when an operator that began while uses were not announced can no longer be running: every
/// thread has ended many since. One boundary is no proof: the operators that such a one calls are
/// announced, and look outermost.
///
/// Owner: the process; never destroyed, since threads may outlive every static object.
/// Lock:  its own mutex, a leaf: nothing is called under it.
class ThreadRoster {
public:
    /// One thread's line, which it owns.
    struct Line {
        std::atomic<uint64_t> boundaries{0};   // Outermost operators that it has ended.
        uint64_t at_start = 0;                 // Of these, before the watch began. Under the mutex.
        std::atomic<bool> uses_device{false};  // Some named a tensor of a device that is managed.
        std::atomic<bool> is_ours{false};      // It runs our own code and nothing else.
        // Autograd's: it works only while the thread that called for the backward pass waits.
        std::atomic<bool> is_autograds{false};
    };

    static ThreadRoster& instance();

    void join(Line* line);
    void leave(Line* line);

    /// Uses are announced from now on.
    void start();
    /// Whether every thread has ended so many operators since start() that none began before.
    bool all_announced() const;
    /// Threads that may use the device at any time: less our own, and autograd's.
    size_t user_threads() const;

private:
    // More than any operator calls between taking a pointer and using it.
    static constexpr uint64_t kEnough = 64;

    mutable std::mutex mutex_;
    std::vector<Line*> lines_;
};

}  // namespace trainstream
