// csrc/optim/moment_formats.h: reads the two moments and writes them back, rounding where they are
// bf16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/host_device.h"
#include "optim/rounding.h"
#include "optim/slice.h"

namespace trainstream::optim {

/// The moments of one tile. `draw_index`: the low half of element 0's index in its parameter.
struct TileMoments {
    void* exp_avg;
    void* exp_avg_sq;
    uint32_t draw_index;
    uint32_t draw_key;
};

template <typename L, NumberFormat kFormat>
class MomentLanes;

template <typename L>
class MomentLanes<L, NumberFormat::kFloat32> {
public:
    using Floats = typename L::Floats;

    TS_HOST_DEVICE explicit MomentLanes(const TileMoments& tile)
        : m_(static_cast<float*>(tile.exp_avg)), v_(static_cast<float*>(tile.exp_avg_sq)) {}

    TS_HOST_DEVICE Floats load_m(size_t i) const { return Floats::load(m_ + i); }
    TS_HOST_DEVICE Floats load_v(size_t i) const { return Floats::load(v_ + i); }

    TS_HOST_DEVICE void store(size_t i, Floats m, Floats v) const {
        m.canonical().store(m_ + i);
        v.canonical().store(v_ + i);
    }

private:
    float* m_;
    float* v_;
};

/// bf16, rounded up with the probability of the 16 bits that are cut off: (bits + random) >> 16.
///
/// To nearest would never move a moment whose change is under 1/256 of it, so exp_avg_sq, which
/// changes by 1/1000 at beta2 = 0.999, would stand still. Infinities stay; the canonical NaN stays,
/// since its lower half is 0.
template <typename L>
class MomentLanes<L, NumberFormat::kBfloat16> {
public:
    using Floats = typename L::Floats;
    using Bits = typename L::Bits;
    using Halves = typename L::Halves;

    TS_HOST_DEVICE explicit MomentLanes(const TileMoments& tile)
        : m_(static_cast<uint16_t*>(tile.exp_avg)),
          v_(static_cast<uint16_t*>(tile.exp_avg_sq)),
          draw_index_(tile.draw_index),
          draw_key_(Bits::all(tile.draw_key)) {}

    TS_HOST_DEVICE Floats load_m(size_t i) const { return load(m_ + i); }
    TS_HOST_DEVICE Floats load_v(size_t i) const { return load(v_ + i); }

    TS_HOST_DEVICE void store(size_t i, Floats m, Floats v) const {
        const Bits index = Bits::count_from(draw_index_ + static_cast<uint32_t>(i));
        const Bits random = draw(index, draw_key_);
        rounded(m, random & Bits::all(0xFFFFU)).store(m_ + i);
        rounded(v, random >> 16).store(v_ + i);
    }

private:
    TS_HOST_DEVICE static Floats load(const uint16_t* from) {
        return L::float_of(L::zero_extended(Halves::load(from)) << 16);
    }

    TS_HOST_DEVICE static Halves rounded(Floats value, Bits random) {
        return L::low_halves((L::bits_of(value.canonical()) + random) >> 16);
    }

    uint16_t* m_;
    uint16_t* v_;
    uint32_t draw_index_;
    Bits draw_key_;
};

}  // namespace trainstream::optim
