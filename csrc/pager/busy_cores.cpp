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
/// Of one stream, that a thread walks over before it skips the others': so long that caches fetch
/// ahead as in an optimizer's step, so short that threads stay side by side.
constexpr size_t kChunkBytes = 256 * kKiB;

/// Reads and writes three streams; restrict, else the compiler would not use vectors. A function of
/// its own: inlined, restrict was lost, and memory gave a sixth less.
[[gnu::noinline]] void change(uint64_t* __restrict a, uint64_t* __restrict b,
                              uint64_t* __restrict c, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        a[i] += 1;
        b[i] += 1;
        c[i] += 1;
    }
}

}  // namespace

BusyCores::BusyCores(std::span<std::byte> memory, size_t threads, uint64_t position)
    : memory_(memory),
      stream_bytes_(memory.size() / kStreams / kCacheLine * kCacheLine),
      begin_(position),
      counters_(std::clamp(stream_bytes_ / kCacheLine, size_t{1}, threads)),
      chunk_bytes_(std::clamp(stream_bytes_ / counters_.size() / kCacheLine * kCacheLine,
                              kCacheLine, kChunkBytes)) {
    TS_ASSERT_GT(threads, size_t{0});
    TS_ASSERT_GE(memory.size(), kStreams * kCacheLine);
    // Signals are for the threads of the script: blocked here, a thread starts with them blocked.
    sigset_t all;
    sigset_t usual;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &usual);
    start(counters_.size());
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

void BusyCores::start(size_t threads) {
    threads_.reserve(threads);
    try {
        for (size_t i = 0; i < threads; ++i) {
            threads_.emplace_back([this, i] { run(i); });
        }
    } catch (const std::system_error&) {
        // The system gives no more threads; threads() says how many there are.
    }
}

void BusyCores::run(size_t thread) noexcept {
    const size_t chunks = (stream_bytes_ + chunk_bytes_ - 1) / chunk_bytes_;
    const size_t first = begin_ / kStreams % stream_bytes_ / chunk_bytes_;
    const size_t threads = counters_.size();
    // The first of its own chunks from where the walk begins; behind the last, the first of all.
    size_t chunk = first + (thread + threads - first % threads) % threads;
    while (!stopping_.load(std::memory_order_relaxed)) {
        chunk = chunk < chunks ? chunk : thread;
        change_chunk(chunk, counters_[thread]);
        chunk += threads;
    }
}

void BusyCores::change_chunk(size_t chunk, Counter& counter) noexcept {
    const auto word = [&](size_t stream, size_t offset) {
        return reinterpret_cast<uint64_t*>(memory_.data() + stream * stream_bytes_ + offset);
    };
    const size_t end = std::min((chunk + 1) * chunk_bytes_, stream_bytes_);
    for (size_t offset = chunk * chunk_bytes_; offset < end; offset += kPieceBytes) {
        const size_t piece = std::min(kPieceBytes, end - offset);
        change(word(0, offset), word(1, offset), word(2, offset), piece / sizeof(uint64_t));
        // Nobody else writes it.
        const uint64_t touched = counter.bytes.load(std::memory_order_relaxed);
        counter.bytes.store(touched + 2 * kStreams * piece, std::memory_order_relaxed);
    }
}

}  // namespace trainstream
