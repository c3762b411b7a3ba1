#include "pager/profile_buffers.h"

#include <algorithm>
#include <chrono>

#include "base/bytes.h"
#include "base/error.h"

namespace trainstream {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kHugePage = 2 * kMiB;
constexpr size_t kLockStep = kMiB;       // How exactly a limit on page locks is found.
constexpr size_t kBlockMin = 64 * kKiB;  // The smallest copies that are measured.

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

std::byte* at(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

ProfileBuffers::ProfileBuffers(Device& device, DeviceMemory& memory, StreamId stream,
                               const ProfileBufferSizes& sizes)
    : device_(device), memory_(memory) {
    const uint64_t share = std::min<uint64_t>(sizes.host_bytes, sizes.available_host_bytes / 8);
    const size_t half_bytes = static_cast<size_t>(share) / 2 / kHugePage * kHugePage;
    if (half_bytes < sizes.host_bytes / 2 / kHugePage * kHugePage) {
        notes_.push_back("only " + format_bytes(sizes.available_host_bytes) +
                         " of host memory is left, so " + format_bytes(2 * half_bytes) +
                         " of it was used instead of " + format_bytes(sizes.host_bytes));
    }
    try {
        take_host_memory(half_bytes);
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

void ProfileBuffers::take_host_memory(size_t half_bytes) {
    if (half_bytes == 0) {
        return;
    }
    const Clock::time_point start = Clock::now();
    try {
        range_.emplace(device_, 2 * half_bytes, /*touch_threads=*/0);
    } catch (const Error& error) {
        notes_.emplace_back(error.what());
        return;
    }
    const uintptr_t begin = range_->begin();
    if (!range_->commit(begin, half_bytes)) {
        notes_.push_back("the system refused " + format_bytes(half_bytes) + " of host memory");
        return;
    }
    const double touch_seconds = seconds_since(start);
    const Clock::time_point touched = Clock::now();
    lock_pages(begin, half_bytes);
    if (page_locked_bytes_ > 0) {
        // After a refusal only a part of what was touched is locked.
        const auto locked = static_cast<double>(page_locked_bytes_);
        const double share = locked / static_cast<double>(half_bytes);
        page_lock_bytes_per_second_ = locked / (touch_seconds * share + seconds_since(touched));
    }
    if (range_->commit(begin + half_bytes, half_bytes)) {
        for_cores_ = {at(begin + half_bytes), half_bytes};
    } else {
        notes_.push_back("the system refused " + format_bytes(half_bytes) +
                         " more of host memory: the cores were not measured");
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
