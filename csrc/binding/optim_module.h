// csrc/binding/optim_module.h: the part of trainstream._C that trainstream.optim uses.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace trainstream {

void add_optim_functions(pybind11::module_& module);

}  // namespace trainstream
