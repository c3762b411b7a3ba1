#include "allocator/current_stream.h"

#include "allocator/pager_registry.h"

#ifdef TS_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace trainstream {

CurrentStream::CurrentStream(const Pager& pager) {
#ifdef TS_WITH_CUDA
    const std::optional<c10::Device> device = PagerRegistry::instance().device_of(pager);
    if (device.has_value() && device->is_cuda()) {
        id_ = reinterpret_cast<StreamId>(c10::cuda::getCurrentCUDAStream(device->index()).stream());
    }
#else
    static_cast<void>(pager);
#endif
}

}  // namespace trainstream
