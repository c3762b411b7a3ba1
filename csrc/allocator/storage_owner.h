// csrc/allocator/storage_owner.h: torch's StorageImpl as the pager's owner of bytes.
#pragma once

#include <c10/core/StorageImpl.h>

#include "pager/owner_port.h"

namespace trainstream {

/// What only the binding layer knows: the GIL and the operator guard.
struct InterpreterHooks {
    void* (*begin_blocking)() = nullptr;
    void (*end_blocking)(void*) = nullptr;
    void (*watch)(bool on) = nullptr;
    bool (*all_announced)() = nullptr;
    bool (*all_kernels_known)() = nullptr;
    size_t (*user_threads)() = nullptr;
    void (*make_updates)() = nullptr;
};

/// Owner: the process. Lock: none of its own; every call works on one StorageImpl.
///
/// remember() holds a weak reference: the StorageImpl's memory stays, its bytes do not. hold()
/// takes a strong one, which torch may need the GIL for when only Python holds the storage.
class StorageOwnerPort final : public OwnerPort {
public:
    static StorageOwnerPort& instance();
    void set_hooks(const InterpreterHooks& hooks) { hooks_ = hooks; }

    /// Whether `storage` points to managed bytes, in either place. Cheap; no lock.
    static bool is_managed(c10::StorageImpl& storage);

    void* address_of(const void* owner) const override;
    size_t holders(const void* owner) const override;
    void remember(void* owner) override;
    void forget(void* owner) noexcept override;
    bool hold(void* owner) override;
    void release(void* owner) noexcept override;
    bool repoint(void* owner, void* from, void* to) override;
    void* begin_blocking() override;
    void end_blocking(void* token) override;
    void watch(bool on) override;
    bool all_announced() const override;
    bool all_kernels_known() const override;
    size_t user_threads() const override;
    void make_updates() override;

private:
    InterpreterHooks hooks_;
};

}  // namespace trainstream
