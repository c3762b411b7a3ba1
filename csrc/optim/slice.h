// csrc/optim/slice.h: a run of elements of one parameter, and how its numbers are stored.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trainstream::optim {

/// Elements with one checksum; slices are cut at its multiples. Its streams (at most 20 bytes an
/// element, 40 KiB) fit in a core's L2 cache, its weights alone (4 KiB) in L1, where the checksum's
/// pass leaves them for the update's.
inline constexpr size_t kTile = 2048;

enum class NumberFormat : uint8_t { kFloat32, kBfloat16, kFloat16 };

/// kFloat32 parameters: the weight is the master.
/// kBfloat16: weight and 16-bit remainder make the master (number_formats.h), guarded by checksums.
/// kFloat16: the fp32 master lies beside the weight.
/// Moments are kFloat32, or kBfloat16 with stochastic rounding.
struct Formats {
    NumberFormat param = NumberFormat::kFloat32;
    NumberFormat grad = NumberFormat::kFloat32;
    NumberFormat moments = NumberFormat::kFloat32;
};

/// Pointers need the alignment of their elements only. What a format does not use is null.
struct Slice {
    size_t count = 0;
    uint64_t first = 0;  // Index in the parameter of element 0; a multiple of kTile.
    const void* grad = nullptr;
    void* weight = nullptr;
    int16_t* remainder = nullptr;   // kBfloat16 parameters.
    float* master = nullptr;        // kFloat16 parameters.
    uint32_t* checksums = nullptr;  // kBfloat16 parameters: one a tile, of this slice's tiles.
    void* exp_avg = nullptr;        // First moment.
    void* exp_avg_sq = nullptr;     // Second moment.
    void* weight_mirror = nullptr;  // Where the new weight is written too; may be null.
};

}  // namespace trainstream::optim
