// csrc/optim/update_cuda.h: one optimizer step of a slice by a GPU, with the host's bits.
//
// Every pointer of the slice may be device memory or page-locked host memory. The kernel takes part
// of a GPU for as long as the link needs; the model keeps the rest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/adamw.h"
#include "optim/rounding.h"
#include "optim/slice.h"

namespace trainstream::optim {

/// How a tile comes from memory and goes back.
///   kDirect  Loads into registers, and stores.
///   kBulk  The bulk copies of Hopper and later (cp.async.bulk) into and out of shared memory,
///            some tiles ahead. Tiles that these cannot take (the last one, streams that are not
///            aligned to 16 bytes, older GPUs) go as with kDirect.
enum class CudaForm : uint8_t { kDirect, kBulk };

struct CudaLaunch {
    /// On an H200 with 32 blocks, bf16 weights and fp32 moments: kBulk takes 0.243 ns a parameter,
    /// kDirect 0.278, and only with 64 blocks as little.
    CudaForm form = CudaForm::kBulk;
    /// Of 256 threads each. 32 are a quarter of an H200, and have 32 x 40 KiB in flight where the
    /// link needs 100 KiB (50 GB/s for 2 us).
    unsigned blocks = 32;
};

/// Enqueues on `stream`, a cudaStream_t of the current device, and does not wait. Throws kDevice
/// when the launch is refused. Requires: slice.first is a multiple of kTile.
void update_cuda(Formats formats, const Slice& slice, const AdamW::Scalars& scalars,
                 RoundingKey key, void* stream, const CudaLaunch& launch = {});

}  // namespace trainstream::optim
