// csrc/optim/reconcile_cuda.h: host state follows weights that were changed in device memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trainstream::optim {

/// For each tile of bf16 weights in device memory whose checksum is not the table's: writes the
/// weights to `host_weights` (null: there is no such copy), zeros the remainders, and updates the
/// table. What it writes may be page-locked host memory; of tiles that nobody changed only the
/// table is touched. Enqueued on `stream`, a cudaStream_t of the current device.
void reconcile_cuda(const uint16_t* device_weights, size_t count, uint32_t* checksums,
                    uint16_t* host_weights, int16_t* remainder, void* stream);

}  // namespace trainstream::optim
