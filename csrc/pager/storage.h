// csrc/pager/storage.h: the record of one managed storage: where its bytes are and who needs them.
//
// Apart from the pager, so that the state machine is tested with no copy running.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/device.h"
#include "pager/host_pool.h"

namespace trainstream {

/// kResident -> kEvicting -> kCold -> kRestoring -> kResident. An eviction or a restore that fails
/// goes back to where it came from; no other step is legal. A storage may be born kCold.
enum class Residency : uint8_t { kResident, kEvicting, kCold, kRestoring };

/// How an operator uses a storage.
enum class UseKind : uint8_t {
    kMetadata,       // Touches no byte: views, shapes.
    kInPlace,        // Few bytes: cold bytes are read where they are.
    kOnce,           // Each byte once: likewise, but worth a load that nobody waits for.
    kBringInIfRoom,  // Unknown: brought in when that evicts nothing.
    kBringIn,        // Reuses bytes: worth evicting something colder.
};

/// A storage that comes at no interval yet belongs to the work of this moment for so many ticks: a
/// layer's forward pass is 30 to 60 operators, counting those that operators call. Without it the
/// newest logits leave before weights that are not needed until backward.
constexpr uint64_t kNewbornTicks = 128;

/// Where a storage that is saved for backward is on its way (pager_saved.cpp).
enum class Spill : uint8_t {
    kNo,        // It leaves for want of room only.
    kWaiting,   // It is to leave once nothing but saved tensors holds it.
    kLeaving,   // Nothing else does: cold from now. Its copy has begun, or it has left.
    kReturned,  // Backward has asked for it, or is about to.
};

/// One managed storage.
///
/// Owner: the pager's table; pins share it, so that it outlives its storage by a moment.
/// Lock:  the pager's mutex, for every member but the constants. Not held while a copy is enqueued.
///
/// Invariants, checked after every step in debug builds:
///   1. A device block is held while kResident or kEvicting.
///   2. A host block is held while kCold or kRestoring; before, only while it still has
///      the same bytes ("clean"), or to leave to it again (keep_host_block).
///   3. kEvicting means no pin, kRestoring no address pin.
class Storage {
public:
    /// A resident storage in `device_address`, or one born cold in `host`.
    Storage(size_t size_bytes, StreamId home, void* device_address);
    Storage(size_t size_bytes, StreamId home, const HostBlock& host);

    size_t size_bytes() const { return size_bytes_; }
    /// The stream that its device blocks belong to, wherever it is used.
    StreamId home() const { return home_; }
    Residency residency() const { return residency_; }
    bool in_transition() const {
        return residency_ == Residency::kEvicting || residency_ == Residency::kRestoring;
    }
    /// Where its owner points: the device block from kResident to the end of kEvicting.
    void* address() const;
    void* device_address() const { return device_address_; }
    const HostBlock& host() const { return host_; }
    /// The host block, if there is one, has the same bytes as the device block.
    bool has_host_copy() const { return host_.address != nullptr && !host_is_stale_; }
    bool is_clean() const { return residency_ == Residency::kResident && has_host_copy(); }
    /// The device block is a frame of the plan's arena, not one of the device's pool.
    bool in_frame() const { return in_frame_; }
    bool movable() const {
        return residency_ == Residency::kResident && pin_count_ == 0 && !pinned_for_good_ &&
               owner != nullptr;
    }

    void pin() { ++pin_count_; }
    void unpin();
    uint32_t pin_count() const { return pin_count_; }
    /// An operator works with the address, on top of its pin: not brought in then either.
    void pin_address();
    void unpin_address();
    bool may_come_in() const {
        return residency_ == Residency::kCold && address_pin_count_ == 0 && !pinned_for_good_;
    }
    /// The address was given away: neither out nor in any more.
    void pin_for_good() { pinned_for_good_ = true; }
    bool pinned_for_good() const { return pinned_for_good_; }

    void begin_evict();
    /// Gives the device block back to the caller.
    void* finish_evict(const HostBlock& host);
    void cancel_evict();
    void begin_restore();
    void finish_restore(void* device_address, bool in_frame = false);
    void cancel_restore();
    /// The bytes are about to change: the host copy of a resident storage is no longer one. Returns
    /// the block to free; empty when there is none, or when it is kept.
    HostBlock drop_host_copy();
    /// It leaves and comes back each step: its host block stays its own, whatever is written.
    /// `block` is for one that has none.
    void keep_host_block(const HostBlock& block);
    bool keeps_host_block() const { return keeps_host_block_; }
    /// Takes the host block of a storage that has its bytes on the device; empty: it has none.
    HostBlock give_up_host_block();

    // The order of work on its bytes.
    void used_by(StreamId stream);
    const std::vector<StreamId>& streams() const { return streams_; }
    /// A stream that the user named (record_stream), for as long as the storage lives: its device
    /// block is not reused before the work that the stream has when the storage is freed.
    void record_stream(StreamId stream);
    const std::vector<StreamId>& recorded() const { return recorded_; }
    /// The last copy; the streams of `synced` have been made to wait for it.
    void set_ready(Event ready, std::vector<StreamId> synced);
    const Event& ready() const { return ready_; }
    /// Null once `stream` has been made to wait for the last move: see note_waited().
    Event unsynced(StreamId stream) const;
    /// A resident storage gets a host copy, which `copied` makes. Neither block may be reused
    /// before.
    void set_host_copy(const HostBlock& block, Event copied);
    /// Null: none was made since the last move.
    const Event& copied() const { return copied_; }
    /// The last copy out of its blocks or into them; those before have ended by then.
    const Event& last_copy() const { return copied_ != nullptr ? copied_ : ready_; }
    /// It was written in an order that no stream but `stream` has: others wait for `written`.
    void set_written(Event written, StreamId stream);
    /// Null once `stream` has been made to wait for that write.
    Event unsynced_write(StreamId stream) const;
    /// `stream` has been made to wait for `event`, if that is still one to wait for. Not said
    /// before: another thread would give the stream work that is in no order yet.
    void note_waited(StreamId stream, const Event& event);

    // Coldness, in ticks of the pager's clock (one a use).
    void touch(uint64_t now);
    /// The higher, the longer it should stay: the last use, plus one usual interval for a storage
    /// that comes back. A scan over storages used once thus leaves before what is used each step;
    /// but what has just been made is what the next operators work on, and is hotter than either.
    /// What is paged is colder than all else.
    uint64_t heat(uint64_t now) const;
    uint64_t last_use() const { return last_use_; }

    void* owner = nullptr;   // Whom OwnerPort knows; null until an operator names it.
    bool paged = false;      // It belongs out: coldest of all, and leaves after each use.
    bool freed = false;      // Its blocks are gone, or whoever moves it will free them.
    uint64_t ticket = 0;     // The use that pinned it last, and its place among that use's
    size_t ticket_slot = 0;  // entries: an operator may name a storage twice.

    static constexpr uint32_t kNoItem = UINT32_MAX;
    uint64_t serial = 0;          // Its name in traces.
    uint64_t born_step = 0;       // Optimizer steps that had ended when it was made.
    uint64_t unseen_step = 0;     // One more had when kernels were last used that nobody announces.
    uint64_t last_operation = 0;  // The last traced operator that used it.
    uint32_t item = kNoItem;      // Its number in the plan.

    uint32_t pending_writes = 0;  // That were announced and have not ended.
    uint32_t unseen_writers = 0;  // Under way: what may write without being announced.

    size_t saved_count = 0;     // Saved tensors that hold it, each with one reference.
    bool left_early = false;    // For want of room, in the step that made it.
    bool brought_back = false;  // Before it was asked for: once is enough.
    Spill spill = Spill::kNo;
    int spill_looks = 0;  // How often it was held by others too.

private:
    void check_invariants() const;

    const size_t size_bytes_;
    const StreamId home_;
    Residency residency_;
    void* device_address_ = nullptr;
    bool in_frame_ = false;
    HostBlock host_;
    bool host_is_stale_ = false;  // It is kept, but was not written to last.
    bool keeps_host_block_ = false;
    uint32_t pin_count_ = 0;
    uint32_t address_pin_count_ = 0;  // Of these pins.
    bool pinned_for_good_ = false;
    std::vector<StreamId> streams_;
    std::vector<StreamId> recorded_;
    Event ready_;
    std::vector<StreamId> synced_;
    Event copied_;
    Event written_;
    std::vector<StreamId> after_write_;  // Streams that have waited for it.
    uint64_t last_use_ = 0;
    uint64_t interval_ = 0;
};

using StoragePtr = std::shared_ptr<Storage>;

}  // namespace trainstream
