#include "pager/profile_buffers.h"

#include <algorithm>
#include <chrono>

#include "base/bytes.h"
#include "base/error.h"

namespace trainstream {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kHugePage = 2 * kMiB;
constexpr size_t kTouchStep = 64 * kMiB;  // Enough for all threads that touch.
constexpr size_t kLockStep = kMiB;        // How exactly a limit on page locks is found.
constexpr size_t kBlockMin = 64 * kKiB;   // The smallest copies that are measured.

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

size_t whole_pages(uint64_t size_bytes) {
    return static_cast<size_t>(size_bytes / kHugePage * kHugePage);
}

std::byte* at(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

size_t core_bytes_for(uint64_t cache_bytes) {
    return static_cast<size_t>(
        std::clamp<uint64_t>(std::min<uint64_t>(cache_bytes, kGiB) * 3, 256 * kMiB, kGiB));
}

ProfileBuffers::ProfileBuffers(Device& device, DeviceMemory& memory, StreamId stream,
                               const ProfileBufferSizes& sizes)
    : device_(device), memory_(memory) {
    try {
        take_host_memory(sizes);
        take_device_memory(stream, sizes.device_bytes / 2);
    } catch (...) {
        release();
        throw;
    }
}

ProfileBuffers::~ProfileBuffers() { release(); }

void ProfileBuffers::release() noexcept {
    for (void* const block : blocks_) {
        memory_.free(block);
    }
    for (const uintptr_t begin : locks_) {
        range_->unlock(begin);
    }
}

void ProfileBuffers::take_host_memory(const ProfileBufferSizes& sizes) {
    const uint64_t share = sizes.available_host_bytes / 8;
    const size_t copy_bytes = whole_pages(std::min<uint64_t>(sizes.copy_bytes, share / 2));
    const size_t core_bytes = whole_pages(std::min<uint64_t>(sizes.core_bytes, share - copy_bytes));
    const uint64_t asked = whole_pages(sizes.copy_bytes) + whole_pages(sizes.core_bytes);
    if (copy_bytes + core_bytes < asked) {
        notes_.push_back("only " + format_bytes(sizes.available_host_bytes) +
                         " of host memory is left, so " + format_bytes(copy_bytes + core_bytes) +
                         " of it was used instead of " + format_bytes(asked));
    }
    if (copy_bytes + core_bytes == 0) {
        return;
    }
    try {
        range_.emplace(device_, copy_bytes + core_bytes, /*touch_threads=*/0);
    } catch (const Error& error) {
        notes_.emplace_back(error.what());
        return;
    }
    if (copy_bytes > 0) {
        take_memory_for_copies(range_->begin(), copy_bytes);
    }
    if (core_bytes > 0) {
        take_memory_for_cores(range_->begin() + copy_bytes, core_bytes, sizes.touch_until);
    }
    if (!for_cores_.empty() && for_cores_.size() < sizes.cache_bytes) {
        notes_.push_back("the cores worked in " + format_bytes(for_cores_.size()) +
                         " of host memory and have " + format_bytes(sizes.cache_bytes) +
                         " of caches: their rates may be those of the caches");
    }
}

void ProfileBuffers::take_memory_for_copies(uintptr_t begin, size_t size_bytes) {
    const Clock::time_point start = Clock::now();
    if (!range_->commit(begin, size_bytes)) {
        notes_.push_back("the system refused " + format_bytes(size_bytes) +
                         " of host memory: copies were not measured");
        return;
    }
    const double touch_seconds = seconds_since(start);
    const Clock::time_point touched = Clock::now();
    lock_pages(begin, size_bytes);
    if (page_locked_bytes_ > 0) {
        // After a refusal only a part of what was touched is locked.
        const auto locked = static_cast<double>(page_locked_bytes_);
        const double share = locked / static_cast<double>(size_bytes);
        page_lock_bytes_per_second_ = locked / (touch_seconds * share + seconds_since(touched));
    }
}

void ProfileBuffers::take_memory_for_cores(uintptr_t begin, size_t size_bytes,
                                           Clock::time_point until) {
    size_t taken = 0;
    bool granted = true;
    while (taken < size_bytes && (taken == 0 || Clock::now() < until)) {
        const size_t step = std::min(kTouchStep, size_bytes - taken);
        granted = range_->commit(begin + taken, step);
        if (!granted) {
            break;
        }
        taken += step;
    }
    for_cores_ = {at(begin), taken};
    if (taken < size_bytes) {
        notes_.push_back((granted ? "touching host memory is slow here"
                                  : "the system refused more host memory") +
                         (": the cores were measured in " + format_bytes(taken) + " instead of " +
                          format_bytes(size_bytes)));
    }
}

void ProfileBuffers::lock_pages(uintptr_t begin, size_t size_bytes) {
    // All at once; after a refusal ever smaller parts, until the sum is the limit to a step.
    // Copies use the first part, the largest: none may reach beyond one.
    size_t part_bytes = size_bytes;
    while (part_bytes >= kLockStep && page_locked_bytes_ < size_bytes) {
        const size_t wanted = std::min<size_t>(part_bytes, size_bytes - page_locked_bytes_);
        std::string reason;
        if (range_->lock(begin + page_locked_bytes_, wanted, &reason)) {
            locks_.push_back(begin + page_locked_bytes_);
            page_locked_bytes_ += wanted;
            for_copies_ = for_copies_.empty() ? std::span(at(begin), wanted) : for_copies_;
            continue;
        }
        page_lock_refusal_ = reason;
        part_bytes = part_bytes / 2 / kLockStep * kLockStep;
    }
    if (page_locked_bytes_ == 0) {
        for_copies_ = {at(begin), size_bytes};
        notes_.push_back("page-locking was refused (" + page_lock_refusal_ +
                         "): copies were measured with pageable memory");
    } else if (page_locked_bytes_ < size_bytes) {
        notes_.push_back("page-locking more than " + format_bytes(page_locked_bytes_) +
                         " was refused: " + page_lock_refusal_);
    }
}

void ProfileBuffers::take_device_memory(StreamId stream, size_t block_bytes) {
    for (size_t size = block_bytes; size >= kBlockMin; size /= 2) {
        while (blocks_.size() < 2) {
            void* const block = memory_.allocate(size, stream);
            if (block == nullptr) {
                break;
            }
            blocks_.push_back(block);
        }
        if (blocks_.size() == 2) {
            block_bytes_ = size;
            break;
        }
        for (void* const block : blocks_) {
            memory_.free(block);
        }
        blocks_.clear();
    }
    if (blocks_.empty()) {
        notes_.push_back("no room for " + format_bytes(2 * kBlockMin) +
                         " of device memory: copies were not measured");
        return;
    }
    if (block_bytes_ < block_bytes) {
        notes_.push_back("no room for " + format_bytes(2 * block_bytes) +
                         " of device memory: copies were measured with " +
                         format_bytes(2 * block_bytes_));
    }
    if (const Event given = device_.record(stream)) {
        given->wait();  // The allocator may have handed out what `stream` has work for.
    }
}

CopyPlaces ProfileBuffers::places(CopyDirection direction) const {
    const size_t index = direction == CopyDirection::kToDevice ? 0 : 1;
    const size_t host_bytes = for_copies_.size() / 2;
    if (blocks_.empty() || host_bytes == 0) {
        return {};
    }
    return {for_copies_.data() + index * host_bytes, host_bytes,
            static_cast<std::byte*>(blocks_[index]), block_bytes_};
}

}  // namespace trainstream
