// csrc/optim/square_sums_cuda.h: the squares of a gradient added by a GPU, with the host's bits.
#pragma once

#include <cstddef>

#include "optim/slice.h"

namespace trainstream::optim {

/// As tile_square_sums() of update.h, enqueued on `stream`, a cudaStream_t of the current device.
/// The gradient and the sums may be device memory or page-locked host memory.
void tile_square_sums_cuda(NumberFormat format, const void* grad, size_t count, double* tile_sums,
                           void* stream);

/// Adds the sums of a gradient's tiles to `*total` one after the other, as sum_in_order() does, so
/// that gradients added in turn to a total that began as 0 give HostEngine::sum_of_squares().
/// One thread adds, as one sum in order must; bench/optim_cuda_bench.cpp says what that costs.
void add_in_order_cuda(const double* tile_sums, size_t tiles, double* total, void* stream);

}  // namespace trainstream::optim
