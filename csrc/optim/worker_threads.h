// csrc/optim/worker_threads.h: threads that stay, among which the tiles of an update are shared.
//
// Our own, since OpenMP's count and waiting are the script's business: launchers set the one to 1.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

namespace trainstream::optim {

/// Owner: HostEngine. Threads start at the first work that is worth sharing, and again in a child
/// after fork(), which has none of them. When the system refuses a thread, the others do its part.
class WorkerThreads {
public:
    /// `count`: how many work at once, the calling thread among them. 0: usable_cores().
    explicit WorkerThreads(size_t count = 0);
    ~WorkerThreads();
    WorkerThreads(const WorkerThreads&) = delete;
    WorkerThreads& operator=(const WorkerThreads&) = delete;

    size_t count() const;

    /// Calls work(begin, end) for pieces that cover [0, items), each of `chunk` items but the last,
    /// and returns when all are done. The pieces go to whoever is free. Any thread may call; two
    /// calls at once take turns. `work` itself may not call. Nothing it does may throw: there is no
    /// one to catch in a thread of ours.
    template <typename Work>
    void parallel_for(size_t items, size_t chunk, const Work& work) {
        static_assert(std::is_nothrow_invocable_v<const Work&, size_t, size_t>,
                      "work must be noexcept");
        run(items, chunk, {&call<Work>, &work});
    }

private:
    class Impl;

    struct Piecework {
        void (*call)(const void* work, size_t begin, size_t end) noexcept;
        const void* work;
    };

    template <typename Work>
    static void call(const void* work, size_t begin, size_t end) noexcept {
        (*static_cast<const Work*>(work))(begin, end);
    }

    void run(size_t items, size_t chunk, Piecework piecework);

    const std::unique_ptr<Impl> impl_;
};

}  // namespace trainstream::optim
