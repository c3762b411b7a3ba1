// csrc/binding/cuda_module.h: the part of trainstream._C that needs CUDA.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace trainstream {

void add_cuda_functions(pybind11::module_& module);

}  // namespace trainstream
