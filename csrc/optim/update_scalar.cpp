#include "optim/kernels.h"
#include "optim/scalar_lanes.h"
#include "optim/slice_kernel.h"

namespace trainstream::optim {
namespace {
using Lanes = ScalarLanes<0>;
}  // namespace

void update_scalar(Formats formats, const Slice& slice, const AdamW::Scalars& scalars,
                   RoundingKey key) {
    SliceKernel<AdamW, Lanes, Lanes>::update(formats, slice, scalars, key);
}

void tile_square_sums_scalar(NumberFormat format, const void* grad, size_t count,
                             double* tile_sums) {
    SquareKernel<Lanes, Lanes>::sums(format, grad, count, tile_sums);
}

}  // namespace trainstream::optim
