// csrc/binding/adamw_step.h: torch's tensors as slices, and one optimizer step of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "optim/adamw.h"
#include "optim/update_pipeline.h"

namespace trainstream {

enum class StepEngine : uint8_t {
    kHost,    // The host's cores.
    kStream,  // A GPU kernel over host memory.
    kHybrid,  // Both.
};

/// One parameter's part of a step. Parameter, gradient and states have the same shape and memory
/// order, in which no element has two addresses and none lies between two others.
struct ParameterStep {
    at::Tensor param;      // float32, bfloat16 or float16.
    at::Tensor grad;       // Likewise; on the device of `param`.
    at::Tensor residual;   // bfloat16 parameters: int16 remainders. float16: float32 masters.
    at::Tensor checksums;  // bfloat16 parameters: int32, one a tile.
    at::Tensor exp_avg;    // float32 or bfloat16, on the host.
    at::Tensor exp_avg_sq;
    int64_t step = 1;    // From 1 on.
    uint64_t index = 0;  // In its optimizer: what stochastic rounding draws from.
    optim::AdamW::Hyperparameters hyper;
};

struct StepOptions {
    StepEngine engine = StepEngine::kHost;
    double grad_scale = 1;
    uint64_t seed = 0;
    /// On CUDA, which stream the parameters are in order for afterwards; nothing: the current one.
    std::optional<StreamId> after;
};

/// Updates every parameter, and returns who did how many elements. Gradients must be in order of
/// the current streams, as operators leave them; so are the parameters afterwards, or for
/// `options.after`.
/// Throws kInvalidArgument for tensors that do not fit each other.
optim::PipelineShare adamw_step(const std::vector<ParameterStep>& steps,
                                const StepOptions& options);

/// The sum of the squares of all elements, in double and always added in the same order. Not finite
/// exactly if an element is not. Waits for the device.
double sum_of_squares(const std::vector<at::Tensor>& grads);

/// fp32 masters of bf16 weights (CPU, dense), where the checksums say that the weights are those
/// last written; elsewhere the weights themselves.
at::Tensor join_master(const at::Tensor& weights, const at::Tensor& remainder,
                       const at::Tensor& checksums);
/// The other way: remainders, and the checksums of the weights that belong to them.
void split_master(const at::Tensor& master, const at::Tensor& remainder,
                  const at::Tensor& checksums);

/// For tests: 0 and "" mean what the machine has. Between steps only.
void set_host_engine(size_t threads, const std::string& instruction_set);
optim::HostEngine& host_engine();

}  // namespace trainstream
