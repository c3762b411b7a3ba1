// csrc/binding/cuda_adamw_step.h: an optimizer step of parameters on a CUDA device.
#pragma once

#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "binding/adamw_step.h"
#include "optim/update_cuda.h"

namespace trainstream {

/// How a step is cut and launched; every choice gives the same bits.
struct CudaStepTuning {
    optim::PipelineOptions pipeline;
    optim::CudaLaunch alone;
    /// Beside the cores fewer blocks: with 32 the kernel floods the link, on which the cores'
    /// copies then wait (hybrid, bf16 weights, fp32 moments on an H200: 0.198 ns a parameter; with
    /// 16: 0.173).
    optim::CudaLaunch beside_cores = {.blocks = 16};
    /// Whether a hybrid step may find that the cores alone do better. False: both always work.
    bool tries_splits = true;
};
const CudaStepTuning& cuda_step_tuning();
/// For benchmarks; not while a step runs.
void set_cuda_step_tuning(const CudaStepTuning& wanted);

/// The storages are pinned, and gradients in order for the current stream; parameters are in order
/// for `after` afterwards. Where that is another stream, the current one waits for nothing: what
/// the next call begins with does not wait for this one's kernel.
optim::PipelineShare cuda_adamw_step(c10::Device device,
                                     std::span<const optim::SliceUpdate> updates, StepEngine engine,
                                     StreamId after);

/// `gradients` are the addresses of `grads`, which are on CUDA devices. Waits for them.
double cuda_sum_of_squares(const std::vector<at::Tensor>& grads,
                           std::span<const optim::Gradient> gradients);

}  // namespace trainstream
