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
///   1. Each thread has chunks of the memory for itself.
///   2. A counter is written by its own thread only.
///   3. All threads together walk over the memory from its begin to its end, then again: what comes
///      next is always what was left alone for longest, the least likely to be in a cache.
class BusyCores {
public:
    /// Starts `threads` threads, fewer when the system refuses some. Nobody else uses `memory`.
    /// `position` is where the walk begins: that of an earlier one over the same memory.
    BusyCores(std::span<std::byte> memory, size_t threads, uint64_t position = 0);
    ~BusyCores();
    BusyCores(const BusyCores&) = delete;
    BusyCores& operator=(const BusyCores&) = delete;

    /// Ends the threads; what they touched stays known. Once stopped, nothing happens.
    void stop() noexcept;

    size_t threads() const { return threads_.size(); }
    /// Bytes read plus bytes written so far, of all threads.
    uint64_t touched_bytes() const;
    /// How far the walk has come, in bytes of the memory; it goes on rising pass after pass.
    uint64_t position() const { return begin_ + touched_bytes() / 2; }

private:
    /// On a cache line of its own: threads would wait for each other's otherwise.
    struct alignas(64) Counter {
        std::atomic<uint64_t> bytes{0};
    };

    void start(size_t threads);
    void run(size_t thread) noexcept;
    void change_chunk(size_t chunk, Counter& counter) noexcept;

    const std::span<std::byte> memory_;
    const size_t stream_bytes_;
    const uint64_t begin_;
    std::atomic<bool> stopping_{false};
    std::vector<Counter> counters_;
    const size_t chunk_bytes_;  // Of one stream; a thread has every counters_.size()th chunk.
    std::vector<std::thread> threads_;
};

}  // namespace trainstream
