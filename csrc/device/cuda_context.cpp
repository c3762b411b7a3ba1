#include "device/cuda_context.h"

#include "base/error.h"

namespace trainstream {
namespace {

/// The driver's functions that the runtime has no equal of.
struct Driver {
    CUresult (*device_get)(CUdevice*, int) = nullptr;
    CUresult (*primary_retain)(CUcontext*, CUdevice) = nullptr;
    CUresult (*push)(CUcontext) = nullptr;
    CUresult (*pop)(CUcontext*) = nullptr;
};

template <typename Function>
void find(const char* name, Function* function) {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    constexpr unsigned kInterface = 12000;  // The oldest runtime that is supported.
    check_cuda(
        "cudaGetDriverEntryPointByVersion",
        cudaGetDriverEntryPointByVersion(name, &address, kInterface, cudaEnableDefault, &found));
#else
    check_cuda("cudaGetDriverEntryPoint",
               cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &found));
#endif
    if (found != cudaDriverEntryPointSuccess) {
        throw errors::device(name, "this driver does not have it");
    }
    *function = reinterpret_cast<Function>(address);
}

Driver load_driver() {
    Driver driver;
    find("cuDeviceGet", &driver.device_get);
    find("cuDevicePrimaryCtxRetain", &driver.primary_retain);
    find("cuCtxPushCurrent", &driver.push);
    find("cuCtxPopCurrent", &driver.pop);
    return driver;
}

const Driver& driver() {
    static const Driver loaded = load_driver();
    return loaded;
}

void check_driver(const char* call, CUresult code) {
    if (code != CUDA_SUCCESS) {
        throw errors::device(call, "driver error " + std::to_string(static_cast<int>(code)));
    }
}

}  // namespace

void check_cuda(const char* call, cudaError_t code) {
    if (code != cudaSuccess) {
        throw errors::device(call, take_cuda_error(code));
    }
}

std::string take_cuda_error(cudaError_t code) {
    static_cast<void>(cudaGetLastError());
    return cudaGetErrorString(code);
}

CudaContext::CudaContext(int index) {
    CUdevice device = 0;
    check_driver("cuDeviceGet", driver().device_get(&device, index));
    check_driver("cuDevicePrimaryCtxRetain", driver().primary_retain(&context_, device));
}

CudaContext::Scope::Scope(const CudaContext& context) {
    check_driver("cuCtxPushCurrent", driver().push(context.context_));
    cudaThreadExchangeStreamCaptureMode(&capture_mode_);  // Gives the old mode back in its place.
}

CudaContext::Scope::~Scope() {
    cudaThreadExchangeStreamCaptureMode(&capture_mode_);
    CUcontext popped = nullptr;
    driver().pop(&popped);
}

}  // namespace trainstream
