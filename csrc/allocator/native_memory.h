// csrc/allocator/native_memory.h: device blocks from torch's caching allocator, within a budget.
#pragma once

#include <atomic>
#include <map>
#include <set>
#include <vector>

#include "allocator/native_forwarder.h"
#include "base/bytes.h"
#include "base/mutex.h"
#include "device/device_memory.h"

namespace trainstream {

/// Torch's allocator keeps splitting, joining and caching. Two things are added:
/// - a limit: its memory fraction, so that what it reserves stays within the budget;
/// - regions: once the budget presses, one large free segment for each compute stream, taken and
/// given
///   back at once, so that torch serves everything from it and asks the driver for nothing more.
///
/// Owner: EvictingAllocator, one for each device.
/// Lock:  `mutex_` of rank kMemory guards the regions; torch's allocator is never called under it.
///
/// Invariant: a region is one segment of torch's, in the pool of its stream.
class NativeMemory final : public DeviceMemory {
public:
    NativeMemory(cca::CUDAAllocator* native, c10::DeviceIndex device, uint64_t budget_bytes,
                 uint64_t total_bytes);

    void* allocate(size_t size_bytes, StreamId stream) override;
    void* allocate_high(size_t size_bytes, StreamId stream, const Region& gap) override;
    void* allocate_beyond_budget(size_t size_bytes, StreamId stream) override;
    void free(void* address) noexcept override;
    void defer_reuse(void* address, StreamId stream) override;
    std::vector<Region> regions(StreamId stream) const override;
    bool wants_rebuild(StreamId stream) const override;
    bool rebuild(StreamId stream) override;
    uint64_t scattered_bytes() const override;
    /// cuBLAS's, of 32 MiB for each thread that multiplies matrices.
    void clear_workspaces() override;
    /// Workspaces go too.
    bool lay_anew() override;
    /// A segment for each stream with a region, if the limit has room for it.
    void reserve_small_spare() override;
    /// Whether a block of so little is likely to find room outside the regions. False only once one
    /// was refused: a refusal flushes torch's cache, so it is not asked for in vain each time.
    bool has_small_room(size_t size_bytes) const;
    void note_small_refusal();
    /// Torch counts it as out of memory; the user got a block all the same.
    void note_answered_refusal() { answered_refusals_.fetch_add(1); }
    /// Torch serves blocks of up to 1 MiB (kSmallSize) from segments of their own, larger ones from
    /// the regions.
    static constexpr size_t kLeastInRegionBytes = (1 << 20) + kBlockAlignment;
    /// Torch does not split off a rest of up to 1 MiB (kSmallSize) of a large block.
    size_t slack_bytes() const override { return 1 << 20; }
    uint64_t budget_bytes() const override { return limit_bytes_.load(); }
    uint64_t peak_bytes() const override;
    uint64_t refusals() const override { return static_cast<uint64_t>(answered_refusals_.load()); }

    /// The user's own limit on top of ours, as a share of the device in (0, 1].
    void set_user_fraction(double fraction);
    double user_fraction() const { return user_fraction_.load(); }
    /// The user emptied the cache: regions that were free as a whole are gone.
    void forget_freed_regions();
    /// Small blocks and graph pools, which never move: past the limit rather than not at all.
    template <typename Function>
    auto past_the_limit(const Function& function) {
        set_native_limit(total_bytes_);
        try {
            auto result = function();
            limit_native();
            return result;
        } catch (...) {
            limit_native();
            throw;
        }
    }

    /// Torch's numbers without the traces of what only we did: refusals that we answered, and the
    /// moment in which a region counted as allocated.
    c10::CachingDeviceAllocator::DeviceStats stats() const;
    void reset_peaks();

private:
    using Stats = c10::CachingDeviceAllocator::DeviceStats;

    /// What torch may reserve; the rest of the budget is kept for the smallest blocks.
    void limit_native();
    void set_native_limit(uint64_t limit_bytes);
    uint64_t native_limit_bytes() const;
    uint64_t reserved_bytes() const;
    void note_stream(StreamId stream);
    void lay_region(StreamId stream, uint64_t size_bytes);
    void reserve_small_segment(StreamId stream);
    /// What happens until end_aside() is no peak of the user's.
    void begin_aside();
    void end_aside();
    void keep_peaks(const Stats& stats) TS_REQUIRES(mutex_);

    cca::CUDAAllocator* const native_;
    const c10::DeviceIndex device_;
    const uint64_t configured_bytes_;
    const uint64_t total_bytes_;
    std::atomic<uint64_t> limit_bytes_;
    std::atomic<double> user_fraction_{1.0};
    std::atomic<StreamId> last_stream_{~StreamId{0}};  // That allocated; at first none.
    std::atomic<int64_t> answered_refusals_{0};
    std::atomic<int> high_refusals_{0};
    // What lay free in segments for small blocks when one was refused; 0: none was so far.
    std::atomic<uint64_t> refused_small_bytes_{0};

    mutable Mutex mutex_{LockRank::kMemory};
    std::map<StreamId, std::vector<Region>> regions_ TS_GUARDED_BY(mutex_);
    std::set<StreamId> streams_ TS_GUARDED_BY(mutex_);
    Stats peaks_ TS_GUARDED_BY(mutex_);
};

}  // namespace trainstream
