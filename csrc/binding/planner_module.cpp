#include "binding/planner_module.h"

#include <optional>
#include <vector>

#include "allocator/limits.h"
#include "base/error.h"
#include "pager/block_sizes.h"
#include "pager/budget.h"
#include "pager/memory_planner.h"

namespace trainstream {

namespace py = pybind11;

namespace {

/// What does not fit is Python's MemoryError, by the class that trainstream.errors has for it.
void raise_in_python(const Error& error) {
    if (error.kind() == ErrorKind::kOutOfMemory) {
        const py::object kind = py::module_::import("trainstream.errors").attr("BudgetError");
        PyErr_SetString(kind.ptr(), error.what());
        throw py::error_already_set();
    }
    throw py::value_error(error.what());
}

template <typename Function>
auto translated(const Function& function) {
    try {
        return function();
    } catch (const Error& error) {
        raise_in_python(error);
        throw;
    }
}

void check(const Budget& budget, uint64_t fixed_bytes, uint64_t resident_bytes,
           uint64_t inflight_bytes, uint64_t paged_bytes) {
    translated([&] { budget.check({fixed_bytes, resident_bytes, inflight_bytes, paged_bytes}); });
}

MemoryPlanner make_planner(const Budget& budget, const std::vector<uint64_t>& block_bytes,
                           uint64_t fixed_bytes, const std::optional<uint64_t>& inflight_bytes) {
    return translated([&] {
        return inflight_bytes ? MemoryPlanner(budget, block_bytes, fixed_bytes, *inflight_bytes)
                              : MemoryPlanner(budget, block_bytes, fixed_bytes);
    });
}

BlockSet refine(MemoryPlanner& planner, uint64_t peak_bytes, const BlockSet& paged) {
    return translated([&] { return planner.refine(peak_bytes, paged); });
}

uint64_t device_bytes(const MemoryPlanner& planner, const BlockSet& paged) {
    return translated([&] { return planner.device_bytes(paged); });
}

}  // namespace

void add_planner_functions(py::module_& module) {
    module.def("host_limit_bytes", &host_limit_bytes);
    module.def("device_limit_bytes", &device_limit_bytes);
    module.def("spread", &spread);
    py::class_<Budget>(module, "Budget")
        .def(py::init([](uint64_t device, uint64_t host, bool check_memory) {
            return Budget{device, host, check_memory};
        }))
        .def_readonly("device_bytes", &Budget::device_bytes)
        .def_readonly("host_bytes", &Budget::host_bytes)
        .def_readonly("check_memory", &Budget::check_memory)
        .def("check", &check);
    py::class_<MemoryPlanner>(module, "MemoryPlanner")
        .def(py::init(&make_planner))
        .def("initial_paged", &MemoryPlanner::initial_paged)
        .def("refine", &refine)
        .def("device_bytes", &device_bytes)
        .def_property_readonly("inflight_bytes", &MemoryPlanner::inflight_bytes)
        .def_property_readonly("done", &MemoryPlanner::done);
}

}  // namespace trainstream
