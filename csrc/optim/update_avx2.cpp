// The instruction set is switched on by a pragma, not by flags: CMake and setup.py compile the same
// list of files with one set of flags each, and a pragma below the standard headers leaves their
// inline functions generic, which a flag cannot. The linker keeps one copy of an inline function,
// so a copy with AVX2 inside would be everybody's. Ours below the pragma are internal to this file,
// or templates over lanes that only this file uses.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "optim/avx2_lanes.h"
#include "optim/kernels.h"
#include "optim/scalar_lanes.h"
#include "optim/slice_kernel.h"

namespace trainstream::optim {
namespace {
using One = ScalarLanes<2>;
}  // namespace

void update_avx2(Formats formats, const Slice& slice, const AdamW::Scalars& scalars,
                 RoundingKey key) {
    SliceKernel<AdamW, Avx2Lanes, One>::update(formats, slice, scalars, key);
}

void tile_square_sums_avx2(NumberFormat format, const void* grad, size_t count, double* tile_sums) {
    SquareKernel<Avx2Lanes, One>::sums(format, grad, count, tile_sums);
}

}  // namespace trainstream::optim

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
