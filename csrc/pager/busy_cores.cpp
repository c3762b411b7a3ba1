#include "pager/busy_cores.h"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <system_error>

#include "base/assert.h"
#include "base/bytes.h"

namespace trainstream {
namespace {

constexpr size_t kStreams = 3;  // An optimizer's master and two moments.
constexpr size_t kCacheLine = 64;
/// Of one stream, between two updates of the count: 10 us of one core.
constexpr size_t kPieceBytes = 16 * kKiB;

/// Reads and writes three streams; restrict, else the compiler would not use vectors.
void change(uint64_t* __restrict a, uint64_t* __restrict b, uint64_t* __restrict c, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        a[i] += 1;
        b[i] += 1;
        c[i] += 1;
    }
}

}  // namespace

BusyCores::BusyCores(std::span<std::byte> memory, size_t threads)
    : counters_(std::clamp(memory.size() / (kStreams * kCacheLine), size_t{1}, threads)) {
    TS_ASSERT_GT(threads, size_t{0});
    TS_ASSERT_GE(memory.size(), kStreams * kCacheLine);
    // Signals are for the threads of the script: blocked here, a thread starts with them blocked.
    sigset_t all;
    sigset_t usual;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &usual);
    start(memory, counters_.size());
    pthread_sigmask(SIG_SETMASK, &usual, nullptr);
}

BusyCores::~BusyCores() { stop(); }

void BusyCores::stop() noexcept {
    stopping_.store(true, std::memory_order_relaxed);
    for (std::thread& thread : threads_) {
        thread.join();
    }
    threads_.clear();
}

uint64_t BusyCores::touched_bytes() const {
    uint64_t total = 0;
    for (const Counter& counter : counters_) {
        total += counter.bytes.load(std::memory_order_relaxed);
    }
    return total;
}

void BusyCores::start(std::span<std::byte> memory, size_t threads) {
    const size_t part_bytes = memory.size() / threads / kCacheLine * kCacheLine;
    threads_.reserve(threads);
    try {
        for (size_t i = 0; i < threads; ++i) {
            threads_.emplace_back([this, part = memory.subspan(i * part_bytes, part_bytes),
                                   &counter = counters_[i]] { run(part, counter); });
        }
    } catch (const std::system_error&) {
        // The system gives no more threads; threads() says how many there are.
    }
}

void BusyCores::run(std::span<std::byte> part, Counter& counter) noexcept {
    const size_t stream_bytes = part.size() / kStreams / kCacheLine * kCacheLine;
    const auto word = [&](size_t stream, size_t offset) {
        return reinterpret_cast<uint64_t*>(part.data() + stream * stream_bytes + offset);
    };
    uint64_t touched = 0;
    size_t offset = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
        const size_t piece = std::min(kPieceBytes, stream_bytes - offset);
        change(word(0, offset), word(1, offset), word(2, offset), piece / sizeof(uint64_t));
        touched += 2 * kStreams * piece;
        counter.bytes.store(touched, std::memory_order_relaxed);
        offset = offset + piece == stream_bytes ? 0 : offset + piece;
    }
}

}  // namespace trainstream
