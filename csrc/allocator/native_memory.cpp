#include "allocator/native_memory.h"

#include <algorithm>
#include <optional>

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "base/bytes.h"

namespace trainstream {

namespace {

// Kept out of the regions for what never moves: blocks under 1 MiB, which torch serves from
// segments of 2 MiB of their own. An eighth of a tiny budget, 1/64 of a large one.
uint64_t headroom_of(uint64_t limit_bytes) {
    const uint64_t most = std::max<uint64_t>(64 * kMiB, limit_bytes / 64);
    return std::clamp<uint64_t>(limit_bytes / 8, 8 * kMiB, most);
}

// Of the headroom, what is kept for blocks so small that managing them is no use: where others took
// the rest, these still find room within the budget.
constexpr uint64_t kSmallestPart = 4;

// The gap is not what it seemed. A refusal flushes torch's cache and waits for the device, so after
// a few of them large blocks go where torch puts them.
constexpr int kMostHighRefusals = 4;

// Gaps that are filled before the one that a large block is to lie in. Where there are more of
// them, it lies elsewhere, which is no harm.
constexpr size_t kMostRests = 16;

// Segments of 10 MiB and more are whole multiples of 2 MiB (kRoundLarge).
constexpr uint64_t kSegmentRounding = 2 * kMiB;
constexpr uint64_t kSmallestRegion = 16 * kMiB;

// Torch's kSmallSize and kSmallBuffer: blocks of up to the one lie in segments of the other.
constexpr uint64_t kSmallBlock = kMiB;
constexpr uint64_t kSmallSegment = 2 * kMiB;

// A transformer's step has two or three segments for small blocks; a run that has more free blocks
// in them than this needs no spare.
constexpr size_t kMostSmallBlocks = 64;

/// What lies free between small blocks, in torch's segments for them.
uint64_t free_small_bytes(const c10::CachingDeviceAllocator::DeviceStats& stats) {
    const auto pool = static_cast<size_t>(c10::CachingAllocator::StatType::SMALL_POOL);
    const int64_t bytes =
        stats.reserved_bytes.at(pool).current - stats.allocated_bytes.at(pool).current;
    return static_cast<uint64_t>(std::max<int64_t>(bytes, 0));
}

cudaStream_t as_cuda(StreamId stream) { return reinterpret_cast<cudaStream_t>(stream); }

void raise_peak(c10::CachingAllocator::StatArray& kept,
                const c10::CachingAllocator::StatArray& seen) {
    for (size_t i = 0; i < kept.size(); ++i) {
        kept[i].peak = std::max(kept[i].peak, seen[i].peak);
    }
}

void raise_peaks(c10::CachingDeviceAllocator::DeviceStats& kept,
                 const c10::CachingDeviceAllocator::DeviceStats& seen) {
    raise_peak(kept.allocation, seen.allocation);
    raise_peak(kept.segment, seen.segment);
    raise_peak(kept.active, seen.active);
    raise_peak(kept.inactive_split, seen.inactive_split);
    raise_peak(kept.allocated_bytes, seen.allocated_bytes);
    raise_peak(kept.reserved_bytes, seen.reserved_bytes);
    raise_peak(kept.active_bytes, seen.active_bytes);
    raise_peak(kept.inactive_split_bytes, seen.inactive_split_bytes);
    raise_peak(kept.requested_bytes, seen.requested_bytes);
}

}  // namespace

NativeMemory::NativeMemory(cca::CUDAAllocator* native, c10::DeviceIndex device,
                           uint64_t budget_bytes, uint64_t total_bytes)
    : native_(native),
      device_(device),
      configured_bytes_(std::min(budget_bytes, total_bytes)),
      total_bytes_(total_bytes),
      limit_bytes_(configured_bytes_) {
    limit_native();
}

uint64_t NativeMemory::native_limit_bytes() const {
    const uint64_t limit = limit_bytes_.load();
    const uint64_t kept = headroom_of(limit) / kSmallestPart / kSmallSegment * kSmallSegment;
    return limit >= total_bytes_ ? limit : limit - std::min(kept, limit);
}

void NativeMemory::limit_native() { set_native_limit(native_limit_bytes()); }

void NativeMemory::set_native_limit(uint64_t limit_bytes) {
    // Torch multiplies the fraction out again; a page less keeps rounding below the limit.
    const double wanted = static_cast<double>(limit_bytes) - 4096.0;
    const double fraction = std::clamp(wanted / static_cast<double>(total_bytes_), 0.0, 1.0);
    native_->setMemoryFraction(limit_bytes >= total_bytes_ ? 1.0 : fraction, device_);
}

void NativeMemory::set_user_fraction(double fraction) {
    user_fraction_.store(fraction);
    const auto user_bytes = static_cast<uint64_t>(fraction * static_cast<double>(total_bytes_));
    limit_bytes_.store(std::min(configured_bytes_, user_bytes));
    limit_native();
}

void* NativeMemory::allocate(size_t size_bytes, StreamId stream) {
    note_stream(stream);
    // Mostly it is the current one, and a guard would ask the driver thrice.
    std::optional<c10::cuda::CUDAGuard> guard;
    if (c10::cuda::current_device() != device_) {
        guard.emplace(device_);
    }
    try {
        return native_->raw_alloc_with_stream(size_bytes, as_cuda(stream));
    } catch (const c10::OutOfMemoryError&) {
        note_answered_refusal();
        return nullptr;
    }
}

void NativeMemory::note_stream(StreamId stream) {
    if (last_stream_.load(std::memory_order_relaxed) == stream) {
        return;
    }
    {
        MutexLock lock(mutex_);
        streams_.insert(stream);
    }
    last_stream_.store(stream, std::memory_order_relaxed);
}

/// Torch takes the low end of the smallest block that serves. So the rest of the gap is taken
/// first, and given back at once; smaller gaps that would serve it are taken before. What of the
/// gap is really free differs by a rest that torch did not split off.
void* NativeMemory::allocate_high(size_t size_bytes, StreamId stream, const Region& gap) {
    const size_t gap_bytes = gap.end - gap.begin;
    const size_t need = align_up(size_bytes, kBlockAlignment) + 2 * slack_bytes();
    // A rest that torch serves from its segments for small blocks would cut six more of them in
    // vain.
    if (gap_bytes <= need + kSmallBlock || high_refusals_.load() >= kMostHighRefusals) {
        return allocate(size_bytes, stream);
    }
    const auto lies_in_gap = [&](const void* address) {
        const auto begin = reinterpret_cast<uintptr_t>(address);
        return begin + slack_bytes() >= gap.begin && begin < gap.end;
    };
    const size_t rest_bytes = (gap_bytes - need) / kBlockAlignment * kBlockAlignment;
    begin_aside();
    std::vector<void*> rests;
    do {
        rests.push_back(allocate(rest_bytes, stream));
    } while (rests.back() != nullptr && !lies_in_gap(rests.back()) && rests.size() < kMostRests);
    void* const block = rests.back() == nullptr ? nullptr : allocate(size_bytes, stream);
    if (block == nullptr) {
        high_refusals_.fetch_add(1);
    }
    for (void* const rest : rests) {
        if (rest != nullptr) {
            native_->raw_delete(rest);
        }
    }
    end_aside();
    return block != nullptr ? block : allocate(size_bytes, stream);
}

void* NativeMemory::allocate_beyond_budget(size_t size_bytes, StreamId stream) {
    return past_the_limit([&] { return allocate(size_bytes, stream); });
}

void NativeMemory::free(void* address) noexcept { native_->raw_delete(address); }

void NativeMemory::defer_reuse(void* address, StreamId stream) {
    c10::DataPtr pointer(address, address, native_->raw_deleter(),
                         c10::Device(c10::kCUDA, device_));
    native_->recordStream(pointer, c10::cuda::getStreamFromExternal(as_cuda(stream), device_));
    pointer.release_context();
}

std::vector<Region> NativeMemory::regions(StreamId stream) const {
    MutexLock lock(mutex_);
    const auto found = regions_.find(stream);
    return found == regions_.end() ? std::vector<Region>{} : found->second;
}

bool NativeMemory::wants_rebuild(StreamId stream) const {
    MutexLock lock(mutex_);
    return regions_.count(stream) == 0;
}

bool NativeMemory::rebuild(StreamId stream) {
    const c10::cuda::CUDAGuard guard(device_);
    native_->emptyCache({0, 0});
    forget_freed_regions();
    std::vector<StreamId> without;
    {
        MutexLock lock(mutex_);
        streams_.insert(stream);
        for (const StreamId known : streams_) {
            if (regions_.count(known) == 0) {
                without.push_back(known);
            }
        }
    }
    if (without.empty()) {
        return false;
    }
    const uint64_t reserved = reserved_bytes();
    const uint64_t limit = limit_bytes_.load();
    const uint64_t taken = reserved + headroom_of(limit);
    const uint64_t left = limit > taken ? limit - taken : 0;
    const uint64_t each = left / without.size() / kSegmentRounding * kSegmentRounding;
    if (each < kSmallestRegion) {
        return false;
    }
    for (const StreamId one : without) {
        lay_region(one, each);
    }
    return true;
}

uint64_t NativeMemory::reserved_bytes() const {
    return static_cast<uint64_t>(native_->getDeviceStats(device_).reserved_bytes[0].current);
}

bool NativeMemory::has_small_room(size_t size_bytes) const {
    const uint64_t refused_bytes = refused_small_bytes_.load();
    if (refused_bytes == 0 || size_bytes > kSmallBlock) {
        return true;
    }
    const Stats stats = native_->getDeviceStats(device_);
    const auto reserved = static_cast<uint64_t>(stats.reserved_bytes[0].current);
    // So much was free in vain; twice as much has room for one of any size.
    return reserved + kSmallSegment <= native_limit_bytes() ||
           free_small_bytes(stats) > 2 * refused_bytes;
}

void NativeMemory::note_small_refusal() {
    const uint64_t free_bytes = free_small_bytes(native_->getDeviceStats(device_));
    refused_small_bytes_.store(std::max({refused_small_bytes_.load(), free_bytes, kSmallBlock}));
}

uint64_t NativeMemory::scattered_bytes() const {
    const auto pool = static_cast<size_t>(c10::CachingAllocator::StatType::LARGE_POOL);
    const int64_t reserved = native_->getDeviceStats(device_).reserved_bytes.at(pool).current;
    auto outside = static_cast<uint64_t>(std::max<int64_t>(reserved, 0));
    MutexLock lock(mutex_);
    if (regions_.empty()) {
        return 0;
    }
    for (const auto& [stream, list] : regions_) {
        for (const Region& region : list) {
            outside -= std::min<uint64_t>(outside, region.end - region.begin);
        }
    }
    return outside;
}

void NativeMemory::clear_workspaces() { at::cuda::clearCublasWorkspaces(); }

bool NativeMemory::lay_anew() {
    std::optional<StreamId> stream;
    {
        MutexLock lock(mutex_);
        if (!streams_.empty()) {
            stream = *streams_.begin();
        }
    }
    if (!stream.has_value()) {
        return false;
    }
    clear_workspaces();
    return rebuild(*stream);
}

void NativeMemory::reserve_small_spare() {
    std::vector<StreamId> streams;
    {
        MutexLock lock(mutex_);
        for (const auto& [stream, list] : regions_) {
            streams.push_back(stream);
        }
    }
    for (const StreamId stream : streams) {
        reserve_small_segment(stream);
    }
}

/// Torch makes a segment once no other has room for a block.
void NativeMemory::reserve_small_segment(StreamId stream) {
    const uint64_t before = reserved_bytes();
    if (before + kSmallSegment > native_limit_bytes()) {
        return;  // A refusal would flush torch's cache.
    }
    begin_aside();
    std::vector<void*> blocks;
    while (reserved_bytes() == before && blocks.size() < kMostSmallBlocks) {
        void* const block = allocate(kSmallBlock, stream);
        if (block == nullptr) {
            break;
        }
        blocks.push_back(block);
    }
    for (void* const block : blocks) {
        native_->raw_delete(block);
    }
    end_aside();
}

void NativeMemory::lay_region(StreamId stream, uint64_t size_bytes) {
    begin_aside();
    void* begin = allocate(size_bytes, stream);
    if (begin == nullptr) {
        return;
    }
    native_->raw_delete(begin);
    end_aside();
    const auto address = reinterpret_cast<uintptr_t>(begin);
    MutexLock lock(mutex_);
    regions_[stream].push_back({address, address + size_bytes});
}

void NativeMemory::begin_aside() {
    MutexLock lock(mutex_);
    keep_peaks(native_->getDeviceStats(device_));
}

void NativeMemory::end_aside() { native_->resetPeakStats(device_); }

void NativeMemory::forget_freed_regions() {
    {
        MutexLock lock(mutex_);
        if (regions_.empty()) {
            return;
        }
    }
    // By containment: with expandable segments a region lies inside one.
    std::vector<Region> segments;
    for (const auto& segment : native_->snapshot({0, 0}, /*include_traces=*/false).segments) {
        const auto begin = static_cast<uintptr_t>(segment.address);
        segments.push_back({begin, begin + segment.total_size});
    }
    const auto is_gone = [&](const Region& region) {
        return std::none_of(segments.begin(), segments.end(), [&](const Region& segment) {
            return segment.begin <= region.begin && region.end <= segment.end;
        });
    };
    MutexLock lock(mutex_);
    for (auto entry = regions_.begin(); entry != regions_.end();) {
        auto& list = entry->second;
        list.erase(std::remove_if(list.begin(), list.end(), is_gone), list.end());
        entry = list.empty() ? regions_.erase(entry) : std::next(entry);
    }
}

void NativeMemory::keep_peaks(const Stats& stats) { raise_peaks(peaks_, stats); }

NativeMemory::Stats NativeMemory::stats() const {
    Stats stats = native_->getDeviceStats(device_);
    stats.num_ooms -= std::min(stats.num_ooms, answered_refusals_.load());
    MutexLock lock(mutex_);
    raise_peaks(stats, peaks_);
    return stats;
}

void NativeMemory::reset_peaks() {
    native_->resetPeakStats(device_);
    MutexLock lock(mutex_);
    peaks_ = Stats{};
}

uint64_t NativeMemory::peak_bytes() const {
    return static_cast<uint64_t>(stats().reserved_bytes[0].peak);
}

}  // namespace trainstream
