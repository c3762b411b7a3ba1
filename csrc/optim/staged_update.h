// csrc/optim/staged_update.h: optimizer steps whose host state passes through device buffers.
//
// The rival of update_cuda() on host memory: copy engines instead of a kernel's own accesses.
#pragma once

#include <cstddef>
#include <memory>

#include "optim/adamw.h"
#include "optim/rounding.h"
#include "optim/slice.h"
#include "optim/update_cuda.h"

namespace trainstream::optim {

struct StagedUpdateOptions {
    /// State of one chunk, all streams together. Small ones start sooner, large ones copy faster.
    size_t chunk_bytes = size_t{4} << 20;
    /// One comes, one is updated, one leaves.
    size_t chunks = 3;
    CudaLaunch launch = {};
};

/// Three streams and a few device buffers of the current device, made once.
///
/// Lock: none; one thread at a time.
class StagedUpdate {
public:
    explicit StagedUpdate(const StagedUpdateOptions& options = {});
    /// Waits for what it enqueued.
    ~StagedUpdate();
    StagedUpdate(const StagedUpdate&) = delete;
    StagedUpdate& operator=(const StagedUpdate&) = delete;

    /// As update_cuda(): after what `stream` holds now, and before what it is given next. Streams
    /// in host memory are copied; what is in device memory, the checksums and the mirror are used
    /// where they are.
    void update(Formats formats, const Slice& slice, const AdamW::Scalars& scalars, RoundingKey key,
                void* stream);

private:
    class Impl;
    const std::unique_ptr<Impl> impl_;
};

}  // namespace trainstream::optim
