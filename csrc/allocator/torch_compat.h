// csrc/allocator/torch_compat.h: what differs between torch 2.11 and 2.15 in StorageImpl. What
// differs in CUDAAllocator is absorbed by native_forwarder.h in the same way: by asking for the
// member, not for a version.
#pragma once

#include <c10/core/StorageImpl.h>

namespace trainstream::compat {

/// The storage's pointer as it is: no copy-on-write and no access check.
inline c10::DataPtr& raw_data_ptr(c10::StorageImpl& storage) {
    return storage._mutable_data_ptr_no_checks();
}

}  // namespace trainstream::compat
