// csrc/binding/managed_storages.h: the storages inside an operator's arguments, and the managed
// ones.
#pragma once

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "allocator/pager_registry.h"
#include "allocator/storage_owner.h"

namespace trainstream {

/// Calls function(StorageImpl*) for each storage of `tensor`, managed or not: its own, or those of
/// a sparse tensor's parts. A subclass that wraps others has none of its own; the operators on what
/// is inside announce themselves.
template <typename Function>
void for_any_tensor(const at::Tensor& tensor, const Function& function) {
    if (!tensor.defined()) {
        return;
    }
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (impl->has_storage()) {
        function(impl->unsafe_storage().unsafeGetStorageImpl());
        return;
    }
    if (impl->key_set().has(c10::DispatchKey::Python)) {
        return;
    }
    if (tensor.is_sparse()) {
        const auto* sparse = static_cast<const at::SparseTensorImpl*>(impl);
        for_any_tensor(sparse->indices(), function);
        for_any_tensor(sparse->values(), function);
    } else if (impl->is_sparse_compressed()) {
        const auto* sparse = static_cast<const at::SparseCsrTensorImpl*>(impl);
        for_any_tensor(sparse->compressed_indices(), function);
        for_any_tensor(sparse->plain_indices(), function);
        for_any_tensor(sparse->values(), function);
    }
}

template <typename Function>
void for_any_value(const c10::IValue& value, const Function& function) {
    if (value.isTensor()) {
        for_any_tensor(value.toTensor(), function);
    } else if (value.isStorage()) {
        function(value.toStorage().unsafeGetStorageImpl());
    } else if (value.isList()) {
        for (const c10::IValue& element : value.toListRef()) {
            if (element.isInt() || element.isDouble() || element.isBool()) {
                return;  // A list of numbers: sizes, strides.
            }
            for_any_value(element, function);
        }
    } else if (value.isTuple()) {
        for (const c10::IValue& element : value.toTupleRef().elements()) {
            for_any_value(element, function);
        }
    }
}

/// Calls function(Pager&, StorageImpl*) if `storage` is managed.
template <typename Function>
void for_storage(c10::StorageImpl* storage, const Function& function) {
    if (storage == nullptr || !StorageOwnerPort::is_managed(*storage)) {
        return;
    }
    if (Pager* pager = PagerRegistry::instance().find(storage->device())) {
        function(*pager, storage);
    }
}

/// The same for each managed storage of a tensor, or of what an operator takes or returns.
template <typename Function>
void for_tensor(const at::Tensor& tensor, const Function& function) {
    for_any_tensor(tensor, [&](c10::StorageImpl* storage) { for_storage(storage, function); });
}

template <typename Function>
void for_value(const c10::IValue& value, const Function& function) {
    for_any_value(value, [&](c10::StorageImpl* storage) { for_storage(storage, function); });
}

}  // namespace trainstream
