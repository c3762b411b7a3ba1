#include "allocator/current_stream.h"

#include "allocator/pager_registry.h"

#ifdef TS_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace trainstream {

CurrentStream::CurrentStream(const Pager& pager)
    : CurrentStream(PagerRegistry::instance().device_of(pager).value_or(c10::kCPU)) {}

CurrentStream::CurrentStream(c10::Device device) {
#ifdef TS_WITH_CUDA
    if (device.is_cuda()) {
        id_ = reinterpret_cast<StreamId>(c10::cuda::getCurrentCUDAStream(device.index()).stream());
    }
#else
    static_cast<void>(device);
#endif
}

}  // namespace trainstream
