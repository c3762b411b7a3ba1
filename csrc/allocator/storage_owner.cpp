#include "allocator/storage_owner.h"

#include <c10/util/intrusive_ptr.h>

#include "allocator/pager_registry.h"
#include "allocator/torch_compat.h"

namespace trainstream {

namespace {

c10::StorageImpl* as_storage(const void* owner) {
    return static_cast<c10::StorageImpl*>(const_cast<void*>(owner));
}

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using StrongStorage = c10::intrusive_ptr<c10::StorageImpl>;

}  // namespace

StorageOwnerPort& StorageOwnerPort::instance() {
    static auto* port = new StorageOwnerPort;
    return *port;
}

bool StorageOwnerPort::is_managed(c10::StorageImpl& storage) {
    return compat::raw_data_ptr(storage).get_deleter() == &managed_deleter;
}

void* StorageOwnerPort::address_of(const void* owner) const {
    const c10::DataPtr& pointer = compat::raw_data_ptr(*as_storage(owner));
    return pointer.get_deleter() == &managed_deleter ? pointer.get_context() : nullptr;
}

size_t StorageOwnerPort::holders(const void* owner) const {
    return c10::raw::weak_intrusive_ptr::use_count(as_storage(owner));
}

void StorageOwnerPort::remember(void* owner) {
    c10::raw::weak_intrusive_ptr::incref(as_storage(owner));
}

void StorageOwnerPort::forget(void* owner) noexcept { WeakStorage::reclaim(as_storage(owner)); }

bool StorageOwnerPort::hold(void* owner) {
    WeakStorage weak = WeakStorage::reclaim(as_storage(owner));
    StrongStorage strong = weak.lock();
    weak.release();
    return strong.release() != nullptr;
}

void StorageOwnerPort::release(void* owner) noexcept { StrongStorage::reclaim(as_storage(owner)); }

bool StorageOwnerPort::repoint(void* owner, void* from, void* to) {
    c10::DataPtr& pointer = compat::raw_data_ptr(*as_storage(owner));
    if (pointer.get_context() != from || pointer.get_deleter() != &managed_deleter) {
        return false;
    }
    c10::DataPtr fresh(to, to, &managed_deleter, pointer.device());
    std::swap(pointer, fresh);
    fresh.release_context();  // The block is the pager's to free, not the pointer's.
    return true;
}

void* StorageOwnerPort::begin_blocking() {
    return hooks_.begin_blocking != nullptr ? hooks_.begin_blocking() : nullptr;
}

void StorageOwnerPort::end_blocking(void* token) {
    if (hooks_.end_blocking != nullptr) {
        hooks_.end_blocking(token);
    }
}

void StorageOwnerPort::watch(bool on) {
    if (hooks_.watch != nullptr) {
        hooks_.watch(on);
    }
}

bool StorageOwnerPort::all_announced() const {
    return hooks_.all_announced == nullptr || hooks_.all_announced();
}

bool StorageOwnerPort::all_kernels_known() const {
    return hooks_.all_kernels_known == nullptr || hooks_.all_kernels_known();
}

void StorageOwnerPort::make_updates() {
    if (hooks_.make_updates != nullptr) {
        hooks_.make_updates();
    }
}

size_t StorageOwnerPort::user_threads() const {
    return hooks_.user_threads == nullptr ? 1 : hooks_.user_threads();
}

}  // namespace trainstream
