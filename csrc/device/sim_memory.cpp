#include "device/sim_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/error.h"

namespace trainstream {
namespace {

uintptr_t reserve(size_t size_bytes) {
    if (size_bytes == 0) {
        throw errors::invalid_argument("the simulated device's budget must not be 0.");
    }
    void* const range =
        mmap(nullptr, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) {
        throw errors::device("mmap", "cannot reserve " + format_bytes(size_bytes) +
                                         " for the simulated device: " + std::strerror(errno));
    }
    return reinterpret_cast<uintptr_t>(range);
}

}  // namespace

SimMemory::SimMemory(const SimMemoryOptions& options)
    : budget_bytes_(options.budget_bytes),
      page_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
      arena_bytes_(align_up(options.budget_bytes, page_bytes_)),
      arena_(reserve(arena_bytes_)) {
    const MutexLock lock(mutex_);
    free_.insert(arena_, arena_bytes_);
}

SimMemory::~SimMemory() { munmap(reinterpret_cast<void*>(arena_), arena_bytes_); }

void* SimMemory::allocate(size_t size_bytes, StreamId /*stream*/) {
    return take(size_bytes, End::kLow);
}

/// The highest extent that has the bytes is the caller's gap, or a better one.
void* SimMemory::allocate_high(size_t size_bytes, StreamId /*stream*/, const Region& /*gap*/) {
    return take(size_bytes, End::kHigh);
}

void* SimMemory::take(size_t size_bytes, End end) {
    const MutexLock lock(mutex_);
    ++refusals_;  // Until it is served.
    if (size_bytes > budget_bytes_) {
        return nullptr;  // Also keeps the rounding below from overflowing.
    }
    const size_t block_bytes = align_up(std::max(size_bytes, size_t{1}), page_bytes_);
    if (used_bytes_ + block_bytes > budget_bytes_) {
        return nullptr;
    }
    const std::optional<uintptr_t> begin =
        end == End::kLow ? free_.take(block_bytes) : free_.take_high(block_bytes);
    if (!begin) {
        return nullptr;
    }
    void* const address = reinterpret_cast<void*>(*begin);
    if (mprotect(address, block_bytes, PROT_READ | PROT_WRITE) != 0) {
        free_.insert(*begin, block_bytes);  // The kernel's limit on mappings: no room, like others.
        return nullptr;
    }
    --refusals_;
    blocks_.emplace(*begin, block_bytes);
    used_bytes_ += block_bytes;
    peak_bytes_ = std::max(peak_bytes_, used_bytes_);
    return address;
}

void SimMemory::free(void* address) noexcept {
    const MutexLock lock(mutex_);
    const auto block = blocks_.find(reinterpret_cast<uintptr_t>(address));
    TS_ASSERT(block != blocks_.end());
    if (block == blocks_.end()) {
        return;
    }
    const size_t block_bytes = block->second;
    // Both before the extent is free: nobody may be handed a page that is about to lose its bytes.
    madvise(address, block_bytes, MADV_DONTNEED);
    mprotect(address, block_bytes, PROT_NONE);
    free_.insert(block->first, block_bytes);
    blocks_.erase(block);
    used_bytes_ -= block_bytes;
}

std::vector<Region> SimMemory::regions(StreamId /*stream*/) const {
    return {Region{arena_, arena_ + arena_bytes_}};
}

bool SimMemory::rebuild(StreamId /*stream*/) { return false; }

uint64_t SimMemory::peak_bytes() const {
    const MutexLock lock(mutex_);
    return peak_bytes_;
}

uint64_t SimMemory::used_bytes() const {
    const MutexLock lock(mutex_);
    return used_bytes_;
}

uint64_t SimMemory::refusals() const {
    const MutexLock lock(mutex_);
    return refusals_;
}

}  // namespace trainstream
