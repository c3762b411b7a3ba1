// csrc/allocator/host_memory.h: host memory that a device can address, for what is not a storage of
// the user's: optimizer states and staging.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "device/device.h"
#include "pager/host_pool.h"

namespace trainstream {

/// The door to a device and its page-locked memory. Both null for plain CPU tensors.
struct HostMemory {
    Device* device = nullptr;
    HostPool* pool = nullptr;
};

/// The pager's where storages of `device` are managed, so that one limit holds for all; one of its
/// own where they are not. They last as long as the process.
HostMemory host_memory_of(c10::Device device);

/// A block of `memory.pool`, which is not null. Throws kOutOfMemory.
HostBlock allocate_host_block(const HostMemory& memory, size_t size_bytes);

/// A CPU tensor of zeros in the page-locked memory beside `device`; an ordinary one beside plain
/// CPU tensors. It gives its block back once what the device's current stream has then is done.
/// Requires: no element has two addresses, and none lies between two others.
/// Throws kOutOfMemory.
at::Tensor host_zeros(c10::Device device, at::IntArrayRef sizes, at::IntArrayRef strides,
                      at::ScalarType type);

/// Bytes of page-locked memory in such tensors now, of all devices.
uint64_t host_zeros_bytes();

}  // namespace trainstream
