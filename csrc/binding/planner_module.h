// csrc/binding/planner_module.h: the part of trainstream._C that trainstream.planner uses.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace trainstream {

void add_planner_functions(pybind11::module_& module);

}  // namespace trainstream
