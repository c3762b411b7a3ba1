#include "optim/update.h"

#include <algorithm>
#include <string>

#include "base/assert.h"
#include "base/error.h"
#include "optim/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace trainstream::optim {
namespace {

#if defined(__x86_64__)
/// __builtin_cpu_supports() of clang 14 does not know F16C.
bool has_f16c() {
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool has_avx2() {
    return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 && has_f16c();
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
           __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
           has_avx2();
}

/// Rounds to nearest and keeps subnormal numbers for a scope. torch.set_flush_denormal() changes
/// the calling thread only, so threads would differ, and none agree with a GPU.
class DefaultFloatEnvironment {
public:
    DefaultFloatEnvironment() { _mm_setcsr(kDefault); }
    ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }
    DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
    DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

private:
    static constexpr unsigned kDefault = 0x1F80;  // All exceptions masked, nothing else.
    const unsigned saved_ = _mm_getcsr();
};
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
class DefaultFloatEnvironment {
public:
    DefaultFloatEnvironment() {}
    ~DefaultFloatEnvironment() {}
};
#endif

UpdateKernel* update_kernel(InstructionSet set) {
#if defined(__x86_64__)
    switch (set) {
        case InstructionSet::kAvx512:
            return &update_avx512;
        case InstructionSet::kAvx2:
            return &update_avx2;
        case InstructionSet::kScalar:
            break;
    }
#endif
    return &update_scalar;
}

SquareSumKernel* square_sum_kernel(InstructionSet set) {
#if defined(__x86_64__)
    switch (set) {
        case InstructionSet::kAvx512:
            return &tile_square_sums_avx512;
        case InstructionSet::kAvx2:
            return &tile_square_sums_avx2;
        case InstructionSet::kScalar:
            break;
    }
#endif
    return &tile_square_sums_scalar;
}

/// The address of element `i`; null stays null.
template <typename Void>
Void* at(Void* numbers, NumberFormat format, size_t i) {
    const auto address = reinterpret_cast<uintptr_t>(numbers);
    return numbers == nullptr ? nullptr : reinterpret_cast<Void*>(address + i * bytes_of(format));
}

}  // namespace

const char* name_of(InstructionSet set) {
    switch (set) {
        case InstructionSet::kAvx512:
            return "AVX-512";
        case InstructionSet::kAvx2:
            return "AVX2";
        case InstructionSet::kScalar:
            break;
    }
    return "scalar";
}

bool is_supported(InstructionSet set) {
    static const bool avx2 = has_avx2();
    static const bool avx512 = has_avx512();
    switch (set) {
        case InstructionSet::kAvx512:
            return avx512;
        case InstructionSet::kAvx2:
            return avx2;
        case InstructionSet::kScalar:
            break;
    }
    return true;
}

InstructionSet best_instruction_set() {
    for (const InstructionSet set : {InstructionSet::kAvx512, InstructionSet::kAvx2}) {
        if (is_supported(set)) {
            return set;
        }
    }
    return InstructionSet::kScalar;
}

Slice part_of(Formats formats, const Slice& slice, size_t tile, size_t tiles) {
    const size_t begin = std::min(tile * kTile, slice.count);
    Slice part = slice;
    part.count = std::min(tiles * kTile, slice.count - begin);
    part.first = slice.first + begin;
    part.grad = at(slice.grad, formats.grad, begin);
    part.weight = at(slice.weight, formats.param, begin);
    part.weight_mirror = at(slice.weight_mirror, formats.param, begin);
    part.exp_avg = at(slice.exp_avg, formats.moments, begin);
    part.exp_avg_sq = at(slice.exp_avg_sq, formats.moments, begin);
    part.remainder = slice.remainder == nullptr ? nullptr : slice.remainder + begin;
    part.master = slice.master == nullptr ? nullptr : slice.master + begin;
    part.checksums = slice.checksums == nullptr ? nullptr : slice.checksums + tile;
    return part;
}

void update(InstructionSet set, Formats formats, const Slice& slice, const AdamW::Scalars& scalars,
            RoundingKey key) {
    TS_ASSERT(is_supported(set));
    TS_ASSERT_EQ(slice.first % kTile, 0U);
    TS_ASSERT(formats.moments != NumberFormat::kFloat16);
    const DefaultFloatEnvironment environment;
    update_kernel(set)(formats, slice, scalars, key);
}

void tile_square_sums(InstructionSet set, NumberFormat format, const void* grad, size_t count,
                      double* tile_sums) {
    TS_ASSERT(is_supported(set));
    const DefaultFloatEnvironment environment;
    square_sum_kernel(set)(format, grad, count, tile_sums);
}

double sum_in_order(const double* tile_sums, size_t tiles) {
    double sum = 0;
    for (size_t i = 0; i < tiles; ++i) {
        sum += tile_sums[i];
    }
    return sum;
}

}  // namespace trainstream::optim
