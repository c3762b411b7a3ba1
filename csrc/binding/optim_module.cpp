#include "binding/optim_module.h"

#include <optional>

#include "allocator/host_memory.h"
#include "allocator/pager_registry.h"
#include "binding/adamw_step.h"
#include "binding/operator_guard.h"
#include "binding/pending_write.h"
#include "binding/waiting_gradient.h"
#include "optim/slice.h"
#include "optim/update.h"

#ifdef TS_WITH_CUDA
#include "binding/cuda_adamw_step.h"
#endif

namespace trainstream {

namespace py = pybind11;

namespace {

using optim::AdamW;

AdamW::Hyperparameters make_hyper(double lr, double beta1, double beta2, double eps,
                                  double weight_decay, bool decoupled, bool maximize) {
    return {lr, beta1, beta2, eps, weight_decay, decoupled, maximize};
}

ParameterStep make_step(at::Tensor param, at::Tensor grad, std::optional<at::Tensor> residual,
                        std::optional<at::Tensor> checksums, at::Tensor exp_avg,
                        at::Tensor exp_avg_sq, int64_t step, uint64_t index,
                        const AdamW::Hyperparameters& hyper) {
    return {std::move(param),
            std::move(grad),
            residual.value_or(at::Tensor()),
            checksums.value_or(at::Tensor()),
            std::move(exp_avg),
            std::move(exp_avg_sq),
            step,
            index,
            hyper};
}

StepEngine engine_of(const std::string& name) {
    return name == "host" ? StepEngine::kHost
                          : (name == "stream" ? StepEngine::kStream : StepEngine::kHybrid);
}

py::tuple step(const std::vector<ParameterStep>& steps, const std::string& engine,
               double grad_scale, uint64_t seed, std::optional<uint64_t> after) {
    optim::PipelineShare share;
    {
        const py::gil_scoped_release no_gil;
        share = adamw_step(steps, {engine_of(engine), grad_scale, seed, after});
    }
    return py::make_tuple(share.host, share.kernel);
}

/// Whether its memory holds its elements, each once and nothing between them. Not so where a flag
/// negates them, or where they are zeros that have no memory.
bool is_dense(const at::Tensor& tensor) {
    return tensor.is_non_overlapping_and_dense() && !tensor.is_neg() && !tensor._is_zerotensor();
}

/// A CPU tensor of zeros like `like`, in the memory that the host works on; see host_memory.h.
at::Tensor zeros_on_host(const at::Tensor& like, const py::object& dtype) {
    const auto type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
    const py::gil_scoped_release no_gil;
    return host_zeros(like.device(), like.sizes(), like.strides(), type);
}

at::Tensor checksums_on_host(const at::Tensor& like) {
    const auto tiles = optim::tile_count(static_cast<size_t>(like.numel()));
    const py::gil_scoped_release no_gil;
    return host_zeros(like.device(), {static_cast<int64_t>(tiles)}, {1}, at::kInt);
}

/// Bytes that host_zeros() may still hand out beside the device of `like`.
int64_t host_bytes_left(const at::Tensor& like) {
    const HostMemory memory = host_memory_of(like.device());
    if (memory.pool == nullptr) {
        return static_cast<int64_t>(available_host_bytes());
    }
    const HostPoolStats stats = memory.pool->stats();
    return static_cast<int64_t>(stats.limit_bytes - stats.in_use_bytes);
}

/// Locked bytes and their number of locks, of the memory beside the device of `like`.
py::dict host_pool_stats(const at::Tensor& like) {
    py::dict result;
    const HostMemory memory = host_memory_of(like.device());
    const HostPoolStats stats = memory.pool == nullptr ? HostPoolStats() : memory.pool->stats();
    result["in_use_bytes"] = stats.in_use_bytes;
    result["in_use_bytes_peak"] = stats.in_use_bytes_peak;
    result["page_locked_bytes"] = stats.locked_bytes;
    result["pageable_bytes"] = stats.pageable_bytes;
    result["page_locks"] = stats.locks;
    return result;
}

/// Of writes to a tensor like this one; see Pager.
bool may_leave_pending(const at::Tensor& like) {
    const Pager* pager = PagerRegistry::instance().find(like.device());
    return pager != nullptr && !PagerRegistry::instance().forked() && pager->may_leave_pending();
}

}  // namespace

void add_optim_functions(py::module_& module) {
    using NoGil = py::call_guard<py::gil_scoped_release>;
    py::class_<AdamW::Hyperparameters>(module, "AdamWHyperparameters").def(py::init(&make_hyper));
    py::class_<ParameterStep>(module, "ParameterStep").def(py::init(&make_step));
    module.def("adamw_step", &step, py::arg("steps"), py::arg("engine"), py::arg("grad_scale"),
               py::arg("seed"), py::arg("after") = py::none());
    py::class_<PendingWrite>(module, "PendingWrite")
        .def(py::init<const at::Tensor&>(), NoGil())
        .def_property_readonly("is_announced", &PendingWrite::is_announced)
        .def("end", &PendingWrite::end, py::arg("stream") = py::none(), NoGil());
    py::class_<WaitingGradient>(module, "WaitingGradient")
        .def(py::init<const at::Tensor&>(), NoGil());
    module.def("make_pending_writes", &operator_guard::make_pending_writes);
    module.def("may_leave_pending", &may_leave_pending, NoGil());
    module.def("sum_of_squares", &sum_of_squares, NoGil());
    module.def("is_dense", &is_dense);
    module.def("zeros_on_host", &zeros_on_host);
    module.def("checksums_on_host", &checksums_on_host);
    module.def("host_bytes_left", &host_bytes_left);
    module.def("host_pool_stats", &host_pool_stats);
    module.def("join_master", &join_master, NoGil());
    module.def("split_master", &split_master, NoGil());
    module.def("set_host_engine", &set_host_engine, NoGil());
#ifdef TS_WITH_CUDA
    module.def("tune_cuda_step", [](bool bulk, unsigned blocks, size_t chunk_elements, size_t slots,
                                    size_t launched_max) {
        CudaStepTuning tuning;
        tuning.alone = {bulk ? optim::CudaForm::kBulk : optim::CudaForm::kDirect, blocks};
        tuning.beside_cores = tuning.alone;
        tuning.pipeline.chunk_elements = chunk_elements;
        tuning.pipeline.slots = slots;
        tuning.pipeline.launched_max = launched_max;
        tuning.tries_splits = false;
        set_cuda_step_tuning(tuning);
    });
#endif
    module.def("host_engine_threads", [] { return host_engine().threads(); });
}

}  // namespace trainstream
