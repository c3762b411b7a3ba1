// tests/cpp/support/optim_state.h: one parameter with everything that an update reads and writes.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "optim/checksum.h"
#include "optim/number_formats.h"
#include "optim/update.h"

namespace trainstream::testing {

using optim::Formats;
using optim::NumberFormat;
using optim::Slice;

inline constexpr NumberFormat kF32 = NumberFormat::kFloat32;
inline constexpr NumberFormat kBf16 = NumberFormat::kBfloat16;
inline constexpr NumberFormat kF16 = NumberFormat::kFloat16;

/// Every combination that update() takes.
inline std::vector<Formats> all_formats() {
    std::vector<Formats> all;
    for (const NumberFormat param : {kF32, kBf16, kF16}) {
        for (const NumberFormat grad : {kF32, kBf16, kF16}) {
            for (const NumberFormat moments : {kF32, kBf16}) {
                all.push_back({param, grad, moments});
            }
        }
    }
    return all;
}

inline std::string name_of(Formats formats) {
    const auto name = [](NumberFormat format) {
        return format == kF32 ? "fp32" : format == kBf16 ? "bf16" : "fp16";
    };
    return std::string("param ") + name(formats.param) + ", grad " + name(formats.grad) +
           ", moments " + name(formats.moments);
}

/// Those of the machine's instruction sets other than scalar. Tests that find none say so.
inline std::vector<optim::InstructionSet> vector_instruction_sets() {
    std::vector<optim::InstructionSet> sets;
    for (const auto set : {optim::InstructionSet::kAvx2, optim::InstructionSet::kAvx512}) {
        if (optim::is_supported(set)) {
            sets.push_back(set);
        }
    }
    return sets;
}

/// Numbers of one format, `offset` elements behind an aligned address, with nothing behind their
/// end, so that the address sanitizer sees a step beyond it.
class Numbers {
public:
    Numbers() = default;
    Numbers(NumberFormat format, size_t count, size_t offset)
        : format_(format),
          count_(count),
          offset_bytes_(offset * optim::bytes_of(format)),
          bytes_(offset_bytes_ + count * optim::bytes_of(format)) {}

    void* data() { return bytes_.data() + offset_bytes_; }
    const void* data() const { return bytes_.data() + offset_bytes_; }
    template <typename T>
    T* as() {
        return static_cast<T*>(data());
    }

    uint32_t bits(size_t i) const {
        uint32_t bits = 0;
        std::memcpy(&bits, static_cast<const uint8_t*>(data()) + i * size(), size());
        return bits;
    }
    void set_bits(size_t i, uint32_t bits) {
        std::memcpy(as<uint8_t>() + i * size(), &bits, size());
    }

    float get(size_t i) const {
        const uint32_t pattern = bits(i);
        return format_ == kF32    ? optim::float_of_bits(pattern)
               : format_ == kBf16 ? optim::float_of_bits(pattern << 16)
                                  : optim::float_of_half(static_cast<uint16_t>(pattern));
    }
    void set(size_t i, float value) {
        const uint32_t pattern = optim::bits_of_float(value);
        set_bits(i, format_ == kF32    ? pattern
                    : format_ == kBf16 ? pattern >> 16
                                       : optim::half_of_float(value));
    }

    bool operator==(const Numbers& other) const { return bytes_ == other.bytes_; }

private:
    size_t size() const { return optim::bytes_of(format_); }

    NumberFormat format_ = kF32;
    size_t count_ = 0;
    size_t offset_bytes_ = 0;
    std::vector<uint8_t> bytes_;
};

/// Usual sizes: weights of about 0.05, gradients over four decades, moments that fit them.
struct OptimState {
    OptimState(Formats wanted_formats, size_t wanted_count, uint64_t seed, size_t offset = 0)
        : formats(wanted_formats),
          count(wanted_count),
          grad(formats.grad, count, offset),
          weight(formats.param, count, offset),
          mirror(formats.param, count, offset),
          remainder(kBf16, formats.param == kBf16 ? count : 0, offset),
          master(kF32, formats.param == kF16 ? count : 0, offset),
          exp_avg(formats.moments, count, offset),
          exp_avg_sq(formats.moments, count, offset),
          checksums(optim::tile_count(count)) {
        std::mt19937_64 random(seed);
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < count; ++i) {
            set_master(i, 0.05F * normal(random));
        }
        new_gradient(seed + 1);
        for (size_t i = 0; i < count; ++i) {
            const float usual = grad.get(i);
            exp_avg.set(i, usual * normal(random));
            exp_avg_sq.set(i, usual * usual * std::abs(normal(random)));
        }
        write_checksums();
    }

    void new_gradient(uint64_t seed) {
        std::mt19937_64 random(seed);
        std::normal_distribution<float> normal;
        std::uniform_real_distribution<float> decade(-4.0F, 0.0F);
        for (size_t i = 0; i < count; ++i) {
            grad.set(i, normal(random) * std::pow(10.0F, decade(random)));
        }
    }

    void set_master(size_t i, float value) {
        const uint32_t pattern = optim::bits_of_float(value);
        if (formats.param == kBf16) {
            weight.set_bits(i, optim::weight_of_pattern(pattern));
            remainder.set_bits(i, pattern & 0xFFFFU);
        } else {
            weight.set(i, value);
            if (formats.param == kF16) {
                master.set(i, value);
            }
        }
    }

    float get_master(size_t i) const {
        if (formats.param == kBf16) {
            return optim::float_of_bits(optim::pattern_of(static_cast<uint16_t>(weight.bits(i)),
                                                          static_cast<int16_t>(remainder.bits(i))));
        }
        return formats.param == kF16 ? master.get(i) : weight.get(i);
    }

    void write_checksums() {
        if (formats.param == kBf16) {
            optim::checksum_tiles(weight.as<uint16_t>(), count, checksums.data());
        }
    }

    Slice slice() {
        Slice slice;
        slice.count = count;
        slice.grad = grad.data();
        slice.weight = weight.data();
        slice.weight_mirror = mirror.data();
        slice.exp_avg = exp_avg.data();
        slice.exp_avg_sq = exp_avg_sq.data();
        if (formats.param == kBf16) {
            slice.remainder = remainder.as<int16_t>();
            slice.checksums = checksums.data();
        }
        slice.master = formats.param == kF16 ? master.as<float>() : nullptr;
        return slice;
    }

    /// The same bits in every stream.
    bool operator==(const OptimState& other) const {
        return grad == other.grad && weight == other.weight && mirror == other.mirror &&
               remainder == other.remainder && master == other.master && exp_avg == other.exp_avg &&
               exp_avg_sq == other.exp_avg_sq && checksums == other.checksums;
    }

    Formats formats;
    size_t count;
    Numbers grad;
    Numbers weight;
    Numbers mirror;
    Numbers remainder;
    Numbers master;
    Numbers exp_avg;
    Numbers exp_avg_sq;
    std::vector<uint32_t> checksums;
};

}  // namespace trainstream::testing
