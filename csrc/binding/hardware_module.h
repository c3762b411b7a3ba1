// csrc/binding/hardware_module.h: the part of trainstream._C that measures the hardware.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace trainstream {

void add_hardware_functions(pybind11::module_& module);

}  // namespace trainstream
