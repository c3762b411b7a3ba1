#include "pager/hardware_profile.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "base/assert.h"
#include "base/error.h"
#include "pager/busy_cores.h"
#include "pager/copy_flow.h"
#include "pager/host_pool.h"
#include "pager/profile_buffers.h"

namespace trainstream {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kSmallCopy = 64 * kKiB;
constexpr size_t kMediumCopy = kMiB;
constexpr size_t kLargeCopy = 16 * kMiB;  // More is no faster: 4 MiB reach the link's rate [H200].
constexpr size_t kMeasurements = 11;
constexpr Clock::duration kSliceMin = std::chrono::milliseconds(2);

/// What is at work during one measurement.
struct Load {
    size_t copy_bytes = 0;
    bool to_device = false;
    bool to_host = false;
    bool cores = false;
};

struct Rates {
    CopyRates copies;
    double update = 0;
};

/// Owner: one call of measure_hardware(). Lock: none.
class Meter {
public:
    Meter(Device& device, const ProfileBuffers& buffers, size_t cores, Clock::time_point deadline,
          std::vector<std::string>* notes)
        : device_(device), buffers_(buffers), cores_(cores), deadline_(deadline), notes_(notes) {}

    void measure_into(HardwareProfile* profile);

private:
    /// The copies of one measurement.
    struct Flows {
        std::optional<CopyFlow> to_device;
        std::optional<CopyFlow> to_host;
    };

    Clock::duration slice() const;
    void estimate();
    CopyRates each_direction(const std::string& name, Load load);
    Rates measure(const std::string& name, const Load& load);
    Rates run(const Load& load, Clock::duration time);
    void start(std::optional<CopyFlow>* flow, CopyDirection direction, size_t copy_bytes,
               Clock::duration time);
    static void spend(Clock::duration time, Flows* flows, const BusyCores* cores);
    size_t copy_bytes_max() const;
    size_t large_copy_bytes() const;
    double& estimated(CopyDirection direction) {
        return direction == CopyDirection::kToDevice ? estimate_.to_device : estimate_.to_host;
    }

    Device& device_;
    const ProfileBuffers& buffers_;
    const size_t cores_;
    const Clock::time_point deadline_;
    std::vector<std::string>* const notes_;
    size_t measurements_left_ = kMeasurements;
    /// Where the next cores go on: short measurements that all began at the same place would work
    /// in what the last one left in the caches.
    uint64_t cores_position_ = 0;
    CopyRates estimate_;  // At least what the link gives; for how much to ask of it at once.
};

void Meter::measure_into(HardwareProfile* profile) {
    estimate();
    profile->copies_64_kib = each_direction("copies of 64 KiB", {.copy_bytes = kSmallCopy});
    profile->copies_1_mib = each_direction("copies of 1 MiB", {.copy_bytes = kMediumCopy});
    const size_t large = large_copy_bytes();
    profile->large_copy_bytes = large;
    profile->alone = each_direction("large copies alone", {.copy_bytes = large});
    profile->both =
        measure("large copies both ways", {.copy_bytes = large, .to_device = true, .to_host = true})
            .copies;
    profile->update_bytes_per_second = measure("cores alone", {.cores = true}).update;
    profile->beside_cores =
        each_direction("large copies beside cores", {.copy_bytes = large, .cores = true});
    const Rates all =
        measure("everything at once",
                {.copy_bytes = large, .to_device = true, .to_host = true, .cores = true});
    profile->everything = all.copies;
    profile->update_beside_copies_bytes_per_second = all.update;
    profile->host_memory_bytes_per_second = all.copies.to_device + all.copies.to_host + all.update;
    TS_ASSERT_EQ(measurements_left_, size_t{0});
}

/// The next measurement's time: an even part of what is left.
Clock::duration Meter::slice() const {
    TS_ASSERT_GT(measurements_left_, size_t{0});
    return std::max((deadline_ - Clock::now()) / static_cast<int64_t>(measurements_left_),
                    kSliceMin);
}

/// One small copy at a time, which is slower than the link: so what is asked for is never too much.
void Meter::estimate() {
    if (copy_bytes_max() < kSmallCopy) {
        return;
    }
    for (const CopyDirection direction : {CopyDirection::kToDevice, CopyDirection::kToHost}) {
        try {
            CopyFlow flow(device_, direction, buffers_.places(direction), kSmallCopy, 1);
            flow.advance();  // The first is slower.
            const Clock::time_point start = Clock::now();
            flow.advance();
            const std::chrono::duration<double> spent = Clock::now() - start;
            estimated(direction) = static_cast<double>(kSmallCopy) / std::max(spent.count(), 1e-9);
        } catch (const Error&) {
            // Found again, and noted, by the measurements.
        }
    }
}

CopyRates Meter::each_direction(const std::string& name, Load load) {
    load.to_device = true;
    load.to_host = false;
    const double to_device = measure(name + ", to device", load).copies.to_device;
    load.to_device = false;
    load.to_host = true;
    const double to_host = measure(name + ", to host", load).copies.to_host;
    if (!load.cores) {
        estimate_ = {std::max(estimate_.to_device, to_device),
                     std::max(estimate_.to_host, to_host)};
    }
    return {to_device, to_host};
}

Rates Meter::measure(const std::string& name, const Load& load) {
    const Clock::duration time = slice();
    --measurements_left_;
    const bool copies = load.to_device || load.to_host;
    if (copies && (load.copy_bytes == 0 || copy_bytes_max() < load.copy_bytes)) {
        if (copy_bytes_max() > 0) {  // Else it is noted already that there is no memory.
            notes_->push_back(name + ": not measured, the memory for copies has only " +
                              format_bytes(copy_bytes_max()));
        }
        return {};
    }
    if (load.cores && buffers_.for_cores().empty()) {
        return {};  // Noted already.
    }
    try {
        return run(load, time);
    } catch (const Error& error) {
        notes_->push_back(name + ": not measured: " + error.what());
        return {};
    }
}

Rates Meter::run(const Load& load, Clock::duration time) {
    Flows flows;
    std::optional<BusyCores> cores;
    if (load.to_device) {
        start(&flows.to_device, CopyDirection::kToDevice, load.copy_bytes, time);
    }
    if (load.to_host) {
        start(&flows.to_host, CopyDirection::kToHost, load.copy_bytes, time);
    }
    if (load.cores) {
        // One core looks after the copies, as it does in an optimizer's step.
        const size_t for_copies = load.to_device || load.to_host ? 1 : 0;
        cores.emplace(buffers_.for_cores(), std::max(cores_ - for_copies, size_t{1}),
                      cores_position_);
        if (cores->threads() == 0) {
            throw errors::device("starting threads", "the system gives none");
        }
    }
    const BusyCores* const busy = cores ? &*cores : nullptr;
    const auto bytes_so_far = [&]() -> Rates {
        const auto done = [](const std::optional<CopyFlow>& flow) {
            return static_cast<double>(flow ? flow->done_bytes() : 0);
        };
        return {{done(flows.to_device), done(flows.to_host)},
                static_cast<double>(busy != nullptr ? busy->touched_bytes() : 0)};
    };
    spend(time / 8, &flows, busy);  // Until all are at work.
    const Clock::time_point begin = Clock::now();
    const Rates before = bytes_so_far();
    spend(time * 3 / 4, &flows, busy);
    const std::chrono::duration<double> spent = Clock::now() - begin;
    const Rates after = bytes_so_far();
    if (cores) {
        cores_position_ = cores->position();
    }
    const double seconds = std::max(spent.count(), 1e-9);
    return {{(after.copies.to_device - before.copies.to_device) / seconds,
             (after.copies.to_host - before.copies.to_host) / seconds},
            (after.update - before.update) / seconds};
}

void Meter::start(std::optional<CopyFlow>* flow, CopyDirection direction, size_t copy_bytes,
                  Clock::duration time) {
    // Small copies need many under way, since each takes less than asking for it. What is under way
    // at the end is waited for: no more than a quarter of the time.
    const size_t depth_max = copy_bytes <= kSmallCopy ? 32 : copy_bytes <= kMediumCopy ? 8 : 4;
    const double affordable_bytes =
        estimated(direction) * std::chrono::duration<double>(time / 4).count();
    const auto depth = static_cast<size_t>(std::clamp(
        affordable_bytes / static_cast<double>(copy_bytes), 1.0, static_cast<double>(depth_max)));
    flow->emplace(device_, direction, buffers_.places(direction), copy_bytes, depth);
}

/// Keeps copies going for `time`, and until each kind of work has got on at least once.
void Meter::spend(Clock::duration time, Flows* flows, const BusyCores* cores) {
    const Clock::time_point end = Clock::now() + time;
    const uint64_t touched = cores != nullptr ? cores->touched_bytes() : 0;
    bool got_on = false;
    while (!got_on || Clock::now() < end) {
        for (std::optional<CopyFlow>* flow : {&flows->to_device, &flows->to_host}) {
            if (*flow) {
                (*flow)->advance();
            }
        }
        if (!flows->to_device && !flows->to_host) {
            std::this_thread::sleep_until(std::max(end, Clock::now() + kSliceMin / 8));
        }
        got_on = cores == nullptr || cores->touched_bytes() > touched;
    }
}

/// The largest copy that the memory has room for, in both directions.
size_t Meter::copy_bytes_max() const {
    size_t bytes = SIZE_MAX;
    for (const CopyDirection direction : {CopyDirection::kToDevice, CopyDirection::kToHost}) {
        const CopyPlaces places = buffers_.places(direction);
        bytes = std::min({bytes, places.host_bytes, places.device_bytes});
    }
    return bytes;
}

/// What fits, and what a slow link can do several times in one measurement's time.
size_t Meter::large_copy_bytes() const {
    const double slower = std::min(estimate_.to_device, estimate_.to_host);
    const double affordable_bytes = slower * std::chrono::duration<double>(slice() / 16).count();
    size_t bytes = kLargeCopy;
    while (bytes > kSmallCopy && (bytes > copy_bytes_max() ||
                                  (slower > 0 && static_cast<double>(bytes) > affordable_bytes))) {
        bytes /= 2;
    }
    return bytes <= copy_bytes_max() ? bytes : 0;
}

}  // namespace

AvailableMemory available_memory(const Device& device) {
    const MemoryInfo info = device.memory_info();
    return {info.free_bytes, info.total_bytes, available_host_bytes()};
}

uint64_t HardwareProfile::page_lock_limit_bytes() const {
    return page_lock_refusal.empty() ? available.host_bytes : page_locked_bytes;
}

HardwareProfile measure_hardware(Device& device, DeviceMemory& memory,
                                 const ProfileOptions& options) {
    if (device.is_capturing(options.stream)) {
        throw errors::invalid_argument(
            "the hardware cannot be measured while a graph is captured; do it before.");
    }
    TS_ASSERT_GT(options.cores, size_t{0});
    const Clock::time_point begin = Clock::now();
    const std::chrono::nanoseconds budget(options.time_budget_ns);
    HardwareProfile profile;
    profile.cores = options.cores;
    profile.available = available_memory(device);
    const size_t core_bytes = options.host_core_bytes_max > 0 ? options.host_core_bytes_max
                                                              : core_bytes_for(options.cache_bytes);
    const ProfileBuffers buffers(device, memory, options.stream,
                                 {.copy_bytes = options.host_copy_bytes_max,
                                  .core_bytes = core_bytes,
                                  .device_bytes = options.device_bytes_max,
                                  .available_host_bytes = profile.available.host_bytes,
                                  .cache_bytes = options.cache_bytes,
                                  .touch_until = begin + budget / 2});
    profile.page_lock_bytes_per_second = buffers.page_lock_bytes_per_second();
    profile.page_locked_bytes = buffers.page_locked_bytes();
    profile.page_lock_refusal = buffers.page_lock_refusal();
    profile.notes = buffers.notes();
    Meter(device, buffers, options.cores, begin + budget, &profile.notes).measure_into(&profile);
    return profile;
}

}  // namespace trainstream
