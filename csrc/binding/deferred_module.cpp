#include "binding/deferred_module.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/stack.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "binding/deferred_updates.h"
#include "binding/foreign_kernels.h"
#include "binding/managed_storages.h"
#include "binding/operator_guard.h"

namespace trainstream {

namespace py = pybind11;

namespace {

/// The operator's overload that takes such options; nothing where this torch has none of that name.
std::optional<c10::OperatorHandle> operator_for(const std::string& name, const py::dict& options) {
    const bool has_tensor_rate =
        options.contains("lr") && THPVariable_Check(py::object(options["lr"]).ptr());
    return c10::Dispatcher::singleton().findSchema(
        {"aten::" + name, has_tensor_rate ? "tensor_lr" : ""});
}

std::vector<c10::IValue> arguments_of(const c10::FunctionSchema& schema, const py::tuple& lists,
                                      const py::dict& options) {
    std::vector<c10::IValue> arguments;
    for (const c10::Argument& argument : schema.arguments()) {
        const size_t i = arguments.size();
        if (i < lists.size()) {
            arguments.push_back(torch::jit::toIValue(lists[i], argument.type()));
        } else if (options.contains(argument.name())) {
            const py::object option = options[py::str(argument.name())];
            arguments.push_back(torch::jit::toIValue(option, argument.type()));
        } else {
            arguments.push_back(argument.default_value().value());
        }
    }
    return arguments;
}

template <typename Function>
void for_tensors(const c10::IValue& value, const Function& function) {
    if (value.isTensor()) {
        function(value.toTensor());
    } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) {
            function(tensor);
        }
    }
}

bool writes(const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_plain(const at::Tensor& tensor) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    return tensor.layout() == at::kStrided && impl->has_storage() &&
           !impl->key_set().has(c10::DispatchKey::Python) && !tensor.is_inference();
}

/// No mode that would see the operator, or another one in its place.
bool is_plain_mode() {
    const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
           !keys.included_.has_any(
               c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                    c10::DispatchKey::FuncTorchDynamicLayerFrontMode}));
}

/// The device of all tensors that are written; nothing: the update has to be made now.
std::optional<c10::Device> device_to_defer_on(const c10::FunctionSchema& schema,
                                              const std::vector<c10::IValue>& arguments) {
    std::optional<c10::Device> device;
    std::vector<void*> owners;
    bool can = true;
    for (size_t i = 0; i < arguments.size(); ++i) {
        if (!writes(schema.arguments()[i])) {
            continue;
        }
        for_tensors(arguments[i], [&](const at::Tensor& tensor) {
            can = can && is_plain(tensor) && device.value_or(tensor.device()) == tensor.device();
            device = tensor.device();
            for_any_tensor(tensor, [&](c10::StorageImpl* storage) { owners.push_back(storage); });
        });
    }
    const Pager* pager = can && device ? PagerRegistry::instance().find(*device) : nullptr;
    return pager != nullptr && pager->may_defer(owners) ? device : std::nullopt;
}

/// Of tensors that the caller may change before the update is made: counts of steps, rates.
std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
    const bool are_scalars = std::all_of(tensors.begin(), tensors.end(), [&](const auto& tensor) {
        return tensor.dim() == 0 && tensor.dtype() == tensors[0].dtype() &&
               tensor.device() == tensors[0].device();
    });
    if (!tensors.empty() && are_scalars) {
        return at::stack(tensors).unbind(0);  // One kernel for all.
    }
    std::vector<at::Tensor> copies;
    for (const at::Tensor& tensor : tensors) {
        copies.push_back(tensor.clone());
    }
    return copies;
}

/// Aliases share the bytes and nothing else: no graph, no Python object, no version, which fused
/// operators do not raise for the tensors of their lists.
c10::IValue alias_of(const c10::IValue& value) {
    if (value.isTensor()) {
        return value.toTensor().variable_data();
    }
    std::vector<at::Tensor> aliases;
    for_tensors(value,
                [&](const at::Tensor& tensor) { aliases.push_back(tensor.variable_data()); });
    return aliases;
}

c10::IValue copy_of(const c10::IValue& value) {
    if (value.isTensorList()) {
        return copies_of(value.toTensorVector());
    }
    return value.isTensor() && value.toTensor().defined() ? value.toTensor().clone() : value;
}

/// torch.`name`(*lists, **options) is made once it is missed. False: it has to be made now.
bool defer_update(const std::string& name, const py::tuple& lists, const py::dict& options) {
    DeferredUpdates::instance().check();
    if (PagerRegistry::instance().forked() || !operator_guard::is_watching() || !is_plain_mode() ||
        foreign_kernels_loaded()) {
        return false;
    }
    const std::optional<c10::OperatorHandle> op = operator_for(name, options);
    if (!op.has_value() || lists.size() > op->schema().arguments().size()) {
        return false;
    }
    const c10::FunctionSchema& schema = op->schema();
    std::vector<c10::IValue> arguments = arguments_of(schema, lists, options);
    const py::gil_scoped_release no_gil;
    const std::optional<c10::Device> device = device_to_defer_on(schema, arguments);
    if (!device.has_value()) {
        return false;
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
        if (writes(schema.arguments()[i])) {
            arguments[i] = alias_of(arguments[i]);
        } else {
            arguments[i] = copy_of(arguments[i]);
        }
    }
    DeferredUpdates& updates = DeferredUpdates::instance();
    updates.add(std::make_unique<DeferredUpdate>(*op, std::move(arguments), *device));
    return true;
}

void make_deferred_updates() {
    DeferredUpdates::instance().make_all();
    DeferredUpdates::instance().check();
}

}  // namespace

void add_deferred_functions(py::module_& module) {
    using NoGil = py::call_guard<py::gil_scoped_release>;
    module.def("defer_update", &defer_update);
    module.def("make_deferred_updates", &make_deferred_updates, NoGil());
    module.def("foreign_kernels_loaded", &foreign_kernels_loaded, NoGil());
}

}  // namespace trainstream
