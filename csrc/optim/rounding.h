// csrc/optim/rounding.h: the random bits of stochastic rounding, a function of a counter.
//
// Neither threads nor splits change a draw: it depends on seed, parameter, step and element alone.
#pragma once

#include <cstdint>

#include "optim/host_device.h"

namespace trainstream::optim {

/// What one step of one parameter draws from. Made by rounding_key().
struct RoundingKey {
    uint64_t bits = 0;
};

/// The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
TS_HOST_DEVICE static inline uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15U;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
}

TS_HOST_DEVICE static inline RoundingKey rounding_key(uint64_t seed, uint64_t parameter,
                                                      uint64_t step) {
    return {mix64(mix64(mix64(seed) ^ parameter) ^ step)};
}

/// The key of the 2^32 elements around `index`. A tile lies in one such block.
TS_HOST_DEVICE static inline uint32_t draw_key(RoundingKey key, uint64_t index) {
    return static_cast<uint32_t>(mix64(key.bits ^ (index >> 32)) >> 32);
}

/// 32 random bits for each of the lanes `index`, the low halves of the elements' indices: the lower
/// 16 round exp_avg, the upper 16 exp_avg_sq. Wellons' lowbias32: two multiplications of 32 bits,
/// which vectors have, and every output bit depends on every input bit.
template <typename Bits>
TS_HOST_DEVICE Bits draw(Bits index, Bits key) {
    Bits x = index ^ key;
    x = (x ^ (x >> 16)) * Bits::all(0x7FEB352DU);
    x = (x ^ (x >> 15)) * Bits::all(0x846CA68BU);
    return x ^ (x >> 16);
}

}  // namespace trainstream::optim
