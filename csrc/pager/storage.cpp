#include "pager/storage.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace trainstream {

namespace {

// Uses closer together than this are one use: an operator and the ones that it calls, a gradient
// that is made and at once accumulated.
constexpr uint64_t kSameUseTicks = 32;

constexpr uint64_t kHotterThanAnyInterval = uint64_t{1} << 62;

void add_once(std::vector<StreamId>* streams, StreamId stream) {
    if (std::find(streams->begin(), streams->end(), stream) == streams->end()) {
        streams->push_back(stream);
    }
}

}  // namespace

Storage::Storage(size_t size_bytes, StreamId home, void* device_address)
    : size_bytes_(size_bytes),
      home_(home),
      residency_(Residency::kResident),
      device_address_(device_address),
      streams_{home} {
    check_invariants();
}

Storage::Storage(size_t size_bytes, StreamId home, const HostBlock& host)
    : size_bytes_(size_bytes),
      home_(home),
      residency_(Residency::kCold),
      host_(host),
      streams_{home} {
    check_invariants();
}

void* Storage::address() const {
    const bool on_device = residency_ == Residency::kResident || residency_ == Residency::kEvicting;
    return on_device ? device_address_ : host_.address;
}

void Storage::unpin() {
    TS_ASSERT_GT(pin_count_, 0u);
    --pin_count_;
}

void Storage::pin_address() {
    ++address_pin_count_;
    TS_ASSERT_LE(address_pin_count_, pin_count_);
    check_invariants();
}

void Storage::unpin_address() {
    TS_ASSERT_GT(address_pin_count_, 0u);
    --address_pin_count_;
}

void Storage::begin_evict() {
    TS_ASSERT(movable());
    residency_ = Residency::kEvicting;
    check_invariants();
}

void* Storage::finish_evict(const HostBlock& host) {
    TS_ASSERT(residency_ == Residency::kEvicting);
    TS_ASSERT_EQ(host.size_bytes, size_bytes_);
    host_ = host;
    host_is_stale_ = false;
    in_frame_ = false;
    residency_ = Residency::kCold;
    void* block = std::exchange(device_address_, nullptr);
    // Uses so far are ordered before the copy, or do not touch the host block at all.
    streams_.assign({home_});
    check_invariants();
    return block;
}

void Storage::cancel_evict() {
    TS_ASSERT(residency_ == Residency::kEvicting);
    residency_ = Residency::kResident;
    check_invariants();
}

void Storage::begin_restore() {
    TS_ASSERT(may_come_in());
    residency_ = Residency::kRestoring;
    check_invariants();
}

void Storage::finish_restore(void* device_address, bool in_frame) {
    TS_ASSERT(residency_ == Residency::kRestoring);
    in_frame_ = in_frame;
    device_address_ = device_address;
    residency_ = Residency::kResident;
    check_invariants();
}

void Storage::cancel_restore() {
    TS_ASSERT(residency_ == Residency::kRestoring);
    residency_ = Residency::kCold;
    check_invariants();
}

HostBlock Storage::drop_host_copy() {
    if (!is_clean()) {
        return {};
    }
    if (keeps_host_block_) {
        host_is_stale_ = true;
        return {};
    }
    return std::exchange(host_, HostBlock{});
}

void Storage::keep_host_block(const HostBlock& block) {
    TS_ASSERT(!block || host_.address == nullptr);
    if (block) {
        host_ = block;
        host_is_stale_ = true;
    }
    keeps_host_block_ = true;
    check_invariants();
}

HostBlock Storage::give_up_host_block() {
    if (residency_ != Residency::kResident && residency_ != Residency::kEvicting) {
        return {};
    }
    keeps_host_block_ = false;
    host_is_stale_ = false;
    return std::exchange(host_, HostBlock{});
}

void Storage::used_by(StreamId stream) { add_once(&streams_, stream); }

void Storage::record_stream(StreamId stream) {
    used_by(stream);
    add_once(&recorded_, stream);
}

void Storage::set_ready(Event ready, std::vector<StreamId> synced) {
    ready_ = std::move(ready);
    synced_ = std::move(synced);
    copied_ = nullptr;
}

void Storage::set_written(Event written, StreamId stream) {
    written_ = std::move(written);
    after_write_ = {stream};
}

Event Storage::unsynced_write(StreamId stream) const {
    const bool synced =
        std::find(after_write_.begin(), after_write_.end(), stream) != after_write_.end();
    return synced ? nullptr : written_;
}

void Storage::note_waited(StreamId stream, const Event& event) {
    if (event == ready_) {
        add_once(&synced_, stream);
    }
    if (event == written_) {
        add_once(&after_write_, stream);
    }
}

Event Storage::unsynced(StreamId stream) const {
    const bool synced = std::find(synced_.begin(), synced_.end(), stream) != synced_.end();
    return synced ? nullptr : ready_;
}

void Storage::set_host_copy(const HostBlock& block, Event copied) {
    TS_ASSERT(device_address_ != nullptr && host_.address == nullptr);
    TS_ASSERT_EQ(block.size_bytes, size_bytes_);
    host_ = block;
    host_is_stale_ = false;
    copied_ = std::move(copied);
    check_invariants();
}

void Storage::touch(uint64_t now) {
    if (now <= last_use_) {
        return;  // A thread that took its tick, then waited while others went on.
    }
    const uint64_t gap = now - last_use_;
    if (last_use_ != 0 && gap > kSameUseTicks) {
        // The mean of the old estimate and the new one: two steps forget a change of habit.
        interval_ = interval_ == 0 ? gap : (interval_ + gap) / 2;
    }
    last_use_ = now;
}

uint64_t Storage::heat(uint64_t now) const {
    if (paged) {
        return 0;
    }
    if (spill == Spill::kLeaving) {
        return last_use_;
    }
    const bool newborn = interval_ == 0 && now < last_use_ + kNewbornTicks;
    return last_use_ + (newborn ? kHotterThanAnyInterval : interval_);
}

void Storage::check_invariants() const {
    TS_ASSERT_EQ(device_address_ == nullptr,
                 residency_ == Residency::kCold || residency_ == Residency::kRestoring);
    TS_ASSERT(residency_ == Residency::kResident || residency_ == Residency::kEvicting ||
              host_.address != nullptr);
    TS_ASSERT(residency_ != Residency::kEvicting || pin_count_ == 0);
    TS_ASSERT(residency_ != Residency::kRestoring || address_pin_count_ == 0);
}

}  // namespace trainstream
