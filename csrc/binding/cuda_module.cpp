#include "binding/cuda_module.h"

#include "allocator/evicting_allocator.h"
#include "base/error.h"

namespace trainstream {

namespace py = pybind11;

namespace {

// Kept for ever: tensors may outlive the interpreter's objects.
std::shared_ptr<EvictingAllocator>& the_allocator() {
    static auto* allocator = new std::shared_ptr<EvictingAllocator>;
    return *allocator;
}

std::shared_ptr<cca::CUDAAllocator> cuda_allocator(int64_t vram, int64_t ram,
                                                   size_t min_storage_bytes, bool plan,
                                                   bool verify) {
    if (the_allocator() == nullptr) {
        if (cca::get()->name() != "native") {
            throw errors::invalid_argument(
                "works over torch's native allocator, but the backend is '" + cca::get()->name() +
                "'. Remove backend:" + cca::get()->name() + " from PYTORCH_ALLOC_CONF.");
        }
        the_allocator() = std::make_shared<EvictingAllocator>(
            cca::get(),
            CudaOptions{vram, ram, min_storage_bytes, {.verify = verify, .plan = plan}});
    }
    return the_allocator();
}

/// Works after CUDA has started too: blocks from before are torch's, and stay so.
void install_cuda_allocator() {
    if (the_allocator() == nullptr) {
        throw errors::invalid_argument(
            "install_cuda_allocator: make one with cuda_allocator first.");
    }
    cca::allocator.store(the_allocator().get());
}

py::tuple cuda_device_count() {
    std::string reason;
    const int count = CudaDevice::count(&reason);
    return py::make_tuple(count, reason);
}

}  // namespace

void add_cuda_functions(py::module_& module) {
    module.def("cuda_allocator", &cuda_allocator);
    module.def("install_cuda_allocator", &install_cuda_allocator);
    module.def("cuda_device_count", &cuda_device_count);
}

}  // namespace trainstream
