// csrc/binding/deferred_module.h: optimizers' updates that wait, for Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace trainstream {

void add_deferred_functions(pybind11::module_& module);

}  // namespace trainstream
