// csrc/allocator/current_stream.h: the compute stream that the calling thread gives work to.
#pragma once

#include <c10/core/Device.h>

#include "pager/pager.h"

namespace trainstream {

/// The current stream of a pager's device; on the simulation always the default one. Built for each
/// use: the user may change the current stream at any time.
class CurrentStream {
public:
    explicit CurrentStream(const Pager& pager);
    explicit CurrentStream(c10::Device device);
    StreamId id() const { return id_; }

private:
    StreamId id_ = 0;
};

}  // namespace trainstream
