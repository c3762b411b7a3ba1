// csrc/optim/checksum.h: tells whether the bf16 weights of a tile are those last written.
//
// Whoever changes weights (load_state_dict, copy_, a swap with averages) tells nobody. By content,
// a swap away and back loses nothing, which a version counter would.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/host_device.h"
#include "optim/slice.h"

namespace trainstream::optim {

/// The checksum of a tile is the sum mod 2^32 of weight pattern, as int16, times factor of its
/// place: independent of order, and one instruction (pmaddwd) for a vector of weights.
///
/// A factor is an odd int16, so no change of one weight goes unseen: a difference of at most 16
/// bits times an odd number is not 0 mod 2^32. The factors of a tile differ, so two weights that
/// changed places are seen. They are a scrambled bijection and not linear, so regular changes do
/// not cancel.
TS_HOST_DEVICE static constexpr int16_t checksum_factor(size_t place) {
    auto x = static_cast<uint32_t>(place);
    x = (x * 0x5A4DU + 0x1B3DU) & 0x7FFFU;  // Odd factors and right shifts: a bijection of 15 bits.
    x = ((x ^ (x >> 7)) * 0x2C9BU) & 0x7FFFU;
    x ^= x >> 8;
    return static_cast<int16_t>(static_cast<uint16_t>(2U * x + 1U));
}

/// checksum_factor() of every place in a tile: loading costs less than computing on host cores.
struct ChecksumFactors {
    alignas(64) int16_t at[kTile];
};
extern const ChecksumFactors kChecksumFactors;

/// Of up to kTile weights that begin at a tile's border.
uint32_t checksum(const uint16_t* weights, size_t count);

/// Of every tile of a parameter, or of a slice; writes ceil(count / kTile) numbers.
void checksum_tiles(const uint16_t* weights, size_t count, uint32_t* checksums);

}  // namespace trainstream::optim
