// csrc/binding/managed_storages.h: the managed storages inside an operator's arguments.
#pragma once

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "allocator/pager_registry.h"
#include "allocator/storage_owner.h"

namespace trainstream {

template <typename Function>
void for_storage(c10::StorageImpl* storage, const Function& function) {
    if (storage == nullptr || !StorageOwnerPort::is_managed(*storage)) {
        return;
    }
    if (Pager* pager = PagerRegistry::instance().find(storage->device())) {
        function(*pager, storage);
    }
}

/// Calls function(Pager&, StorageImpl*) for each managed storage of `tensor`: its own, or those of
/// a sparse tensor's parts. A subclass that wraps others has none of its own; the operators on what
/// is inside announce themselves.
template <typename Function>
void for_tensor(const at::Tensor& tensor, const Function& function) {
    if (!tensor.defined()) {
        return;
    }
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (impl->has_storage()) {
        for_storage(impl->unsafe_storage().unsafeGetStorageImpl(), function);
        return;
    }
    if (impl->key_set().has(c10::DispatchKey::Python)) {
        return;
    }
    if (tensor.is_sparse()) {
        const auto* sparse = static_cast<const at::SparseTensorImpl*>(impl);
        for_tensor(sparse->indices(), function);
        for_tensor(sparse->values(), function);
    } else if (impl->is_sparse_compressed()) {
        const auto* sparse = static_cast<const at::SparseCsrTensorImpl*>(impl);
        for_tensor(sparse->compressed_indices(), function);
        for_tensor(sparse->plain_indices(), function);
        for_tensor(sparse->values(), function);
    }
}

template <typename Function>
void for_value(const c10::IValue& value, const Function& function) {
    if (value.isTensor()) {
        for_tensor(value.toTensor(), function);
    } else if (value.isStorage()) {
        for_storage(value.toStorage().unsafeGetStorageImpl(), function);
    } else if (value.isList()) {
        for (const c10::IValue& element : value.toListRef()) {
            if (element.isInt() || element.isDouble() || element.isBool()) {
                return;  // A list of numbers: sizes, strides.
            }
            for_value(element, function);
        }
    } else if (value.isTuple()) {
        for (const c10::IValue& element : value.toTupleRef().elements()) {
            for_value(element, function);
        }
    }
}

}  // namespace trainstream
