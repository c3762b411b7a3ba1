// Why a pragma and no flags, and what may stand below it: see update_avx2.cpp.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// gcc 12 takes its own intrinsics' don't-care operands for a mistake (gcc bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include "optim/avx512_lanes.h"
#include "optim/kernels.h"
#include "optim/scalar_lanes.h"
#include "optim/slice_kernel.h"

namespace trainstream::optim {
namespace {
using One = ScalarLanes<512>;
}  // namespace

void update_avx512(Formats formats, const Slice& slice, const AdamW::Scalars& scalars,
                   RoundingKey key) {
    SliceKernel<AdamW, Avx512Lanes, One>::update(formats, slice, scalars, key);
}

void tile_square_sums_avx512(NumberFormat format, const void* grad, size_t count,
                             double* tile_sums) {
    SquareKernel<Avx512Lanes, One>::sums(format, grad, count, tile_sums);
}

}  // namespace trainstream::optim

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
