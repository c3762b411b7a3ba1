// csrc/optim/kernels.h: the kernels of each instruction set. update.h chooses among them.
#pragma once

#include <cstddef>

#include "optim/adamw.h"
#include "optim/rounding.h"
#include "optim/slice.h"

namespace trainstream::optim {

using UpdateKernel = void(Formats formats, const Slice& slice, const AdamW::Scalars& scalars,
                          RoundingKey key);
/// Writes the sum of the squares of each tile of `grad`.
using SquareSumKernel = void(NumberFormat format, const void* grad, size_t count,
                             double* tile_sums);

UpdateKernel update_scalar;
SquareSumKernel tile_square_sums_scalar;
#if defined(__x86_64__)
UpdateKernel update_avx2;
SquareSumKernel tile_square_sums_avx2;
UpdateKernel update_avx512;
SquareSumKernel tile_square_sums_avx512;
#endif

}  // namespace trainstream::optim
