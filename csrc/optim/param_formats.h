// csrc/optim/param_formats.h: reads a master from where its format keeps it, and writes it back.
//
// L is a set of lanes: see scalar_lanes.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/host_device.h"
#include "optim/slice.h"

namespace trainstream::optim {

/// One tile of a parameter. remainder_mask: all ones; 0 where the weights were changed from
/// outside, so that their remainders mean nothing.
struct TileParam {
    void* weight;
    void* mirror;
    int16_t* remainder;
    float* master;
    uint32_t remainder_mask;
};

template <typename L, NumberFormat kFormat>
class ParamLanes;

template <typename L>
class ParamLanes<L, NumberFormat::kFloat32> {
public:
    TS_HOST_DEVICE explicit ParamLanes(const TileParam& tile)
        : weight_(static_cast<float*>(tile.weight)), mirror_(static_cast<float*>(tile.mirror)) {}

    TS_HOST_DEVICE typename L::Floats load(size_t i) const { return L::Floats::load(weight_ + i); }

    TS_HOST_DEVICE void store(size_t i, typename L::Floats p) {
        p = p.canonical();
        p.store(weight_ + i);
        if (mirror_ != nullptr) {
            p.store(mirror_ + i);
        }
    }

    TS_HOST_DEVICE uint32_t checksum() const { return 0; }

private:
    float* weight_;
    float* mirror_;
};

/// As number_formats.h defines it.
template <typename L>
class ParamLanes<L, NumberFormat::kBfloat16> {
public:
    using Floats = typename L::Floats;
    using Bits = typename L::Bits;
    using Halves = typename L::Halves;

    TS_HOST_DEVICE explicit ParamLanes(const TileParam& tile)
        : weight_(static_cast<uint16_t*>(tile.weight)),
          mirror_(static_cast<uint16_t*>(tile.mirror)),
          remainder_(reinterpret_cast<uint16_t*>(tile.remainder)),
          remainder_mask_(Bits::all(tile.remainder_mask)) {}

    TS_HOST_DEVICE Floats load(size_t i) const {
        const Bits remainder = L::sign_extended(Halves::load(remainder_ + i)) & remainder_mask_;
        return L::float_of((L::zero_extended(Halves::load(weight_ + i)) << 16) + remainder);
    }

    TS_HOST_DEVICE void store(size_t i, Floats p) {
        const Bits pattern = L::bits_of(p.canonical());
        const Halves weight = L::low_halves((pattern + Bits::all(0x8000U)) >> 16);
        weight.store(weight_ + i);
        if (mirror_ != nullptr) {
            weight.store(mirror_ + i);
        }
        L::low_halves(pattern).store(remainder_ + i);  // pattern - (weight << 16), mod 2^16.
        checksum_.add(weight, i);
    }

    /// Of the weights stored so far, in their places.
    TS_HOST_DEVICE uint32_t checksum() const { return checksum_.total(); }

private:
    uint16_t* weight_;
    uint16_t* mirror_;
    uint16_t* remainder_;
    Bits remainder_mask_;
    typename L::Checksum checksum_;
};

/// A weight that is not the rounded master was changed from outside: the master follows it.
template <typename L>
class ParamLanes<L, NumberFormat::kFloat16> {
public:
    using Floats = typename L::Floats;
    using Halves = typename L::Halves;

    TS_HOST_DEVICE explicit ParamLanes(const TileParam& tile)
        : weight_(static_cast<uint16_t*>(tile.weight)),
          mirror_(static_cast<uint16_t*>(tile.mirror)),
          master_(tile.master) {}

    TS_HOST_DEVICE Floats load(size_t i) const {
        const Halves weight = Halves::load(weight_ + i);
        const Floats master = Floats::load(master_ + i);
        return L::where_equal(weight, L::half_of(master.canonical()), master,
                              L::float_of_half(weight));
    }

    TS_HOST_DEVICE void store(size_t i, Floats p) {
        p = p.canonical();
        p.store(master_ + i);
        const Halves weight = L::half_of(p);
        weight.store(weight_ + i);
        if (mirror_ != nullptr) {
            weight.store(mirror_ + i);
        }
    }

    TS_HOST_DEVICE uint32_t checksum() const { return 0; }

private:
    uint16_t* weight_;
    uint16_t* mirror_;
    float* master_;
};

template <typename L, NumberFormat kFormat>
TS_HOST_DEVICE typename L::Floats load_gradient(const void* grad, size_t i) {
    if constexpr (kFormat == NumberFormat::kFloat32) {
        return L::Floats::load(static_cast<const float*>(grad) + i);
    } else {
        const auto halves = L::Halves::load(static_cast<const uint16_t*>(grad) + i);
        if constexpr (kFormat == NumberFormat::kBfloat16) {
            return L::float_of(L::zero_extended(halves) << 16);
        } else {
            return L::float_of_half(halves);
        }
    }
}

}  // namespace trainstream::optim
