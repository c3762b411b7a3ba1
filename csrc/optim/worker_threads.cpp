#include "optim/worker_threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <system_error>
#include <thread>
#include <vector>

#include "base/assert.h"
#include "base/fork_guard.h"
#include "base/mutex.h"
#include "optim/usable_cores.h"

namespace trainstream::optim {

/// Lock: `mutex_`, of rank kWorkers; open while work is done.
///
/// Invariants:
///   1. A job is on the stack of the thread that gave it, and that thread leaves run() only when
///      nobody else can find the job (job_) or is inside it (helpers).
///   2. `threads_` is null in a forked child until it starts its own.
class WorkerThreads::Impl {
public:
    explicit Impl(size_t count)
        : count_(count == 0 ? usable_cores() : count),
          fork_guard_(mutex_, [this] { enter_child(); }) {}
    ~Impl();
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;

    size_t count() const { return count_; }
    void run(size_t items, size_t chunk, Piecework piecework);

private:
    struct Job {
        Piecework piecework;
        size_t items;
        size_t chunk;
        std::atomic<size_t> next{0};
        size_t helpers = 0;  // Threads of ours inside; guarded by mutex_.
    };

    static void work_on(Job& job);
    void start_threads() TS_REQUIRES(mutex_);
    void run_thread() TS_EXCLUDES(mutex_);
    void enter_child() TS_NO_THREAD_SAFETY_ANALYSIS;

    const size_t count_;
    Mutex mutex_{LockRank::kWorkers};
    // On the heap, for a child to leave behind: threads that it does not have wait in them.
    std::unique_ptr<CondVar> given_ TS_GUARDED_BY(mutex_) = std::make_unique<CondVar>();
    std::unique_ptr<CondVar> done_ TS_GUARDED_BY(mutex_) = std::make_unique<CondVar>();
    std::unique_ptr<std::vector<std::thread>> threads_ TS_GUARDED_BY(mutex_);
    Job* job_ TS_GUARDED_BY(mutex_) = nullptr;
    uint64_t jobs_given_ TS_GUARDED_BY(mutex_) = 0;
    bool stopping_ TS_GUARDED_BY(mutex_) = false;
    bool forked_ TS_GUARDED_BY(mutex_) = false;
    ForkGuard fork_guard_;
};

WorkerThreads::Impl::~Impl() {
    MutexLock lock(mutex_);
    TS_ASSERT(job_ == nullptr);
    if (forked_) {
        static_cast<void>(threads_.release());
        static_cast<void>(given_.release());
        static_cast<void>(done_.release());
        return;
    }
    stopping_ = true;
    given_->notify_all();
    const auto threads = std::move(threads_);
    lock.unlock();
    if (threads) {
        for (std::thread& thread : *threads) {
            thread.join();
        }
    }
}

void WorkerThreads::Impl::run(size_t items, size_t chunk, Piecework piecework) {
    TS_ASSERT_GT(chunk, 0U);
    Job job{.piecework = piecework, .items = items, .chunk = chunk};
    if (count_ == 1 || items <= chunk) {
        work_on(job);
        return;
    }
    MutexLock lock(mutex_);
    start_threads();
    while (job_ != nullptr) {
        done_->wait(mutex_);
    }
    job_ = &job;
    ++jobs_given_;
    given_->notify_all();
    lock.unlock();
    work_on(job);
    lock.lock();
    job_ = nullptr;
    while (job.helpers > 0) {
        done_->wait(mutex_);
    }
    done_->notify_all();
}

void WorkerThreads::Impl::work_on(Job& job) {
    for (;;) {
        const size_t begin = job.next.fetch_add(job.chunk, std::memory_order_relaxed);
        if (begin >= job.items) {
            return;
        }
        const size_t end = std::min(begin + job.chunk, job.items);
        job.piecework.call(job.piecework.work, begin, end);
    }
}

void WorkerThreads::Impl::start_threads() {
    if (forked_) {
        static_cast<void>(threads_.release());
        static_cast<void>(given_.release());
        static_cast<void>(done_.release());
        given_ = std::make_unique<CondVar>();
        done_ = std::make_unique<CondVar>();
        forked_ = false;
    }
    if (threads_) {
        return;
    }
    threads_ = std::make_unique<std::vector<std::thread>>();
    // Signals are for the threads of the script: blocked here, a thread starts with them blocked.
    sigset_t all;
    sigset_t usual;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &usual);
    try {
        while (threads_->size() + 1 < count_) {
            threads_->emplace_back([this] { run_thread(); });
        }
    } catch (const std::system_error&) {
        // The system gives no more threads; the calling thread always works.
    }
    pthread_sigmask(SIG_SETMASK, &usual, nullptr);
}

void WorkerThreads::Impl::run_thread() {
    MutexLock lock(mutex_);
    uint64_t jobs_seen = 0;
    for (;;) {
        while (!stopping_ && (job_ == nullptr || jobs_given_ == jobs_seen)) {
            given_->wait(mutex_);
        }
        if (stopping_) {
            return;
        }
        jobs_seen = jobs_given_;
        Job& job = *job_;
        ++job.helpers;
        lock.unlock();
        work_on(job);
        lock.lock();
        if (--job.helpers == 0) {
            done_->notify_all();
        }
    }
}

void WorkerThreads::Impl::enter_child() {
    forked_ = true;
    job_ = nullptr;
}

WorkerThreads::WorkerThreads(size_t count) : impl_(std::make_unique<Impl>(count)) {}

WorkerThreads::~WorkerThreads() = default;

size_t WorkerThreads::count() const { return impl_->count(); }

void WorkerThreads::run(size_t items, size_t chunk, Piecework piecework) {
    impl_->run(items, chunk, piecework);
}

}  // namespace trainstream::optim
