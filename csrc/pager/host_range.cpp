#include "pager/host_range.h"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/error.h"

namespace trainstream {
namespace {

constexpr size_t kHugePage = 2 * kMiB;
constexpr size_t kTouchThreadsMax = 16;  // More do not make the kernel zero pages faster.
constexpr size_t kTouchShareMin =
    4 * kMiB;  // 1 ms of one thread [H200]; starting one takes 0.1 ms.

size_t allowed_cpus() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        return static_cast<size_t>(CPU_COUNT(&set));
    }
    return std::max(1u, std::thread::hardware_concurrency());  // More CPUs than a cpu_set_t holds.
}

size_t touch_threads(int asked) {
    return asked > 0 ? static_cast<size_t>(asked) : std::min(allowed_cpus(), kTouchThreadsMax);
}

void touch_pages(uintptr_t begin, uintptr_t end) {
    static const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (uintptr_t page = begin; page < end; page += page_bytes) {
        *reinterpret_cast<volatile char*>(page) = 0;
    }
}

/// A wish, not a demand: where policies are forbidden (some containers) memory is only farther.
void prefer_node(uintptr_t begin, size_t size_bytes, int node) {
    constexpr size_t kBitsPerWord = sizeof(unsigned long) * CHAR_BIT;
    std::array<unsigned long, 16> mask{};
    const auto bit = static_cast<size_t>(node);
    if (node < 0 || bit >= mask.size() * kBitsPerWord) {
        return;
    }
    mask.at(bit / kBitsPerWord) = 1UL << (bit % kBitsPerWord);
    syscall(SYS_mbind, begin, size_bytes, MPOL_PREFERRED, mask.data(),
            mask.size() * kBitsPerWord + 1, 0);
}

}  // namespace

HostRange::HostRange(Device& device, size_t size_bytes, int touch_threads_asked)
    : device_(device),
      touch_threads_(touch_threads(touch_threads_asked)),
      mapping_bytes_(align_up(size_bytes, kHugePage) + kHugePage) {
    mapping_ = mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0);
    if (mapping_ == MAP_FAILED) {
        throw errors::host_range_refused(size_bytes, std::strerror(errno));
    }
    begin_ = align_up(reinterpret_cast<uintptr_t>(mapping_), kHugePage);
}

HostRange::~HostRange() { munmap(mapping_, mapping_bytes_); }

bool HostRange::commit(uintptr_t begin, size_t size_bytes) const noexcept {
    TS_ASSERT_GE(begin, begin_);
    TS_ASSERT_LE(begin + size_bytes, reinterpret_cast<uintptr_t>(mapping_) + mapping_bytes_);
    void* const address = reinterpret_cast<void*>(begin);
    if (mprotect(address, size_bytes, PROT_READ | PROT_WRITE) != 0) {
        return false;
    }
    madvise(address, size_bytes, MADV_HUGEPAGE);  // Refused by some kernels; only slower then.
    prefer_node(begin, size_bytes, device_.numa_node());
    touch(begin, size_bytes);
    return true;
}

bool HostRange::lock(uintptr_t begin, size_t size_bytes, std::string* reason) const noexcept {
    return device_.page_lock(reinterpret_cast<void*>(begin), size_bytes, reason);
}

void HostRange::unlock(uintptr_t begin) const noexcept {
    device_.page_unlock(reinterpret_cast<void*>(begin));
}

void HostRange::touch(uintptr_t begin, size_t size_bytes) const noexcept {
    const uintptr_t end = begin + size_bytes;
    const size_t shares = std::clamp(size_bytes / kTouchShareMin, size_t{1}, touch_threads_);
    const size_t share_bytes = align_up(size_bytes / shares, kHugePage);
    std::vector<std::thread> helpers;
    uintptr_t next = begin;
    try {
        while (next + share_bytes < end) {
            const uintptr_t share_end = next + share_bytes;
            helpers.emplace_back([next, share_end] { touch_pages(next, share_end); });
            next = share_end;
        }
    } catch (const std::system_error&) {
        // No more threads are to be had: this one does the rest.
    }
    touch_pages(next, end);
    for (std::thread& helper : helpers) {
        helper.join();
    }
}

}  // namespace trainstream
