// csrc/pager/owner_port.h: what the pager asks of whoever points to a storage's bytes.
//
// On torch an owner is a StorageImpl; in tests it is a plain struct. The pager stays free of both.
#pragma once

namespace trainstream {

/// Calls marked (L) are made under the pager's lock: they may not block, allocate device memory,
/// take a lock or the GIL. All others are made with no lock held.
class OwnerPort {
public:
    virtual ~OwnerPort() = default;

    /// (L) The address that `owner` points to now. The owner is alive: an operator holds it.
    virtual void* address_of(const void* owner) const = 0;
    /// (L) How many references keep `owner`'s bytes. Only its memory need be alive.
    virtual size_t holders(const void* owner) const = 0;
    /// (L) Keeps `owner`'s memory, not its bytes, until forget().
    virtual void remember(void* owner) = 0;
    /// Ends remember().
    virtual void forget(void* owner) noexcept = 0;
    /// Keeps the bytes until release(). False: the owner has let go of them already.
    virtual bool hold(void* owner) = 0;
    /// Ends hold(); the owner may free its bytes in this call.
    virtual void release(void* owner) noexcept = 0;
    /// (L) Makes `owner` point to `to`. False, and nothing changed, when it does not point to
    /// `from`.
    virtual bool repoint(void* owner, void* from, void* to) = 0;

    /// This thread is about to wait for another one that may need the GIL; undone by the second.
    virtual void* begin_blocking() { return nullptr; }
    virtual void end_blocking(void* /*token*/) {}

    /// Whether uses are announced from now on (the operator guard).
    virtual void watch(bool /*on*/) {}
    /// Whether every use that began before the last watch(true) has ended, as far as can be known.
    virtual bool all_announced() const { return true; }
    /// Whether all kernels of this process are operators, or say what they use by other means.
    virtual bool all_kernels_known() const { return true; }
    /// Makes what updates of owners still wait to be made by whoever uses them.
    virtual void make_updates() {}
    /// Threads that live, have run operators on the device while uses were announced, and may do so
    /// at any time: not autograd's.
    virtual size_t user_threads() const { return 1; }
};

}  // namespace trainstream
