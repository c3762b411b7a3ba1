// csrc/device/cuda_context.h: the right device for the length of a call, and nothing left behind.
//
// cudaSetDevice() there and back would do, but setting a device that nobody used yet makes a
// context on it: every rank of a job would hold half a gigabyte on device 0. Pushing the primary
// context and popping it restores exactly what was. The driver's functions are asked of the
// runtime, so nothing links with libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

namespace trainstream {

/// Throws Error(kDevice) unless `code` is success; leaves no error behind in the runtime.
void check_cuda(const char* call, cudaError_t code);
/// The words for `code`; leaves no error behind in the runtime.
std::string take_cuda_error(cudaError_t code);

/// The primary context of one device: the one that the runtime and torch use.
///
/// Owner: CudaDevice, CudaMemory. Lock: none; constant once made. It is never given back, as the
/// runtime does not give it back either.
class CudaContext {
public:
    explicit CudaContext(int index);

    /// Makes the context current for a scope of one thread. While a graph is captured in the
    /// strictest mode, any thread's harmless question (cudaEventQuery) or page lock would break the
    /// capture. None of our calls ever touches a captured stream, so in the scope this thread
    /// answers for itself.
    class Scope {
    public:
        explicit Scope(const CudaContext& context);
        ~Scope();
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

    private:
        cudaStreamCaptureMode capture_mode_ = cudaStreamCaptureModeRelaxed;
    };

private:
    CUcontext context_ = nullptr;
};

}  // namespace trainstream
