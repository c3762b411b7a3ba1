// csrc/pager/busy_cores.h: threads that read, change and write host memory as an optimizer does.
//
// For the hardware profile: what the cores get from host memory, and what they leave to copies. Not
// optim's kernels: those would bring their arithmetic along, and the pager does not know them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

namespace trainstream {

/// Owner: one measurement; the threads live as long as it does. Lock: none.
///
/// Invariants:
///   1. Each thread has a part of the memory for itself.
///   2. A counter is written by its own thread only.
class BusyCores {
public:
    /// Starts `threads` threads, fewer when the system refuses some. Nobody else uses `memory`.
    BusyCores(std::span<std::byte> memory, size_t threads);
    ~BusyCores();
    BusyCores(const BusyCores&) = delete;
    BusyCores& operator=(const BusyCores&) = delete;

    /// Ends the threads; what they touched stays known. Once stopped, nothing happens.
    void stop() noexcept;

    size_t threads() const { return threads_.size(); }
    /// Bytes read plus bytes written so far, of all threads.
    uint64_t touched_bytes() const;

private:
    /// On a cache line of its own: threads would wait for each other's otherwise.
    struct alignas(64) Counter {
        std::atomic<uint64_t> bytes{0};
    };

    void start(std::span<std::byte> memory, size_t threads);
    void run(std::span<std::byte> part, Counter& counter) noexcept;

    std::atomic<bool> stopping_{false};
    std::vector<Counter> counters_;
    std::vector<std::thread> threads_;
};

}  // namespace trainstream
