// csrc/optim/number_formats.h: fp32, bf16 and fp16 as bit patterns, one number at a time.
//
// `static`, not `inline`: the kernel files compile these with their instruction set switched on,
// and the linker must not take such a copy for everybody's.
#pragma once

#include <cstdint>
#include <cstring>

#include "optim/host_device.h"

namespace trainstream::optim {

/// The one NaN that is stored: x86 and GPUs make different ones.
inline constexpr uint32_t kCanonicalNan = 0x7FC00000U;
inline constexpr uint16_t kCanonicalHalfNan = 0x7E00U;

TS_HOST_DEVICE static inline uint32_t bits_of_float(float value) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

TS_HOST_DEVICE static inline float float_of_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float value = 0;
    std::memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

TS_HOST_DEVICE static inline bool is_nan_pattern(uint32_t bits) {
    return (bits & 0x7FFFFFFFU) > 0x7F800000U;
}

/// A master of 32 bits as a bf16 weight and a signed difference of 16 bits:
/// pattern = (weight << 16) + remainder, exact for every pattern that is no NaN.
///
/// The weight is the master rounded half away from zero. Half to even, which torch uses, would need
/// a remainder of +32768 where a pattern half way is rounded down. The largest finite masters have
/// an infinite weight, as under torch's rounding, and come back finite.
TS_HOST_DEVICE static inline uint16_t weight_of_pattern(uint32_t pattern) {
    return static_cast<uint16_t>((pattern + 0x8000U) >> 16);
}

TS_HOST_DEVICE static inline int16_t remainder_of_pattern(uint32_t pattern) {
    return static_cast<int16_t>(static_cast<uint16_t>(pattern & 0xFFFFU));
}

TS_HOST_DEVICE static inline uint32_t pattern_of(uint16_t weight, int16_t remainder) {
    return (static_cast<uint32_t>(weight) << 16) + static_cast<uint32_t>(remainder);
}

/// fp16 to fp32, exact. NaNs stay NaNs.
TS_HOST_DEVICE static inline float float_of_half(uint16_t half) {
    const uint32_t sign = (half & 0x8000U) << 16;
    const uint32_t magnitude = half & 0x7FFFU;
    if (magnitude >= 0x7C00U) {  // Infinity and NaN: the exponent becomes all ones.
        return float_of_bits(sign | 0x7F800000U | ((magnitude & 0x3FFU) << 13));
    }
    if (magnitude < 0x0400U) {  // Subnormal: a multiple of 2^-24.
        return float_of_bits(sign | bits_of_float(static_cast<float>(magnitude) * 0x1p-24F));
    }
    return float_of_bits(sign | ((magnitude << 13) + ((127U - 15U) << 23)));
}

/// fp32 to fp16, to nearest even. NaNs become kCanonicalHalfNan.
TS_HOST_DEVICE static inline uint16_t half_of_float(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t sign = (bits >> 16) & 0x8000U;
    const uint32_t magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U) {
        return kCanonicalHalfNan;
    }
    if (magnitude >= 0x47800000U) {  // From 65536 on. What rounds up to it overflows below.
        return static_cast<uint16_t>(sign | 0x7C00U);
    }
    if (magnitude >= 0x38800000U) {  // Normal in fp16: from 2^-14 on.
        const uint32_t rounded = magnitude + 0x0FFFU + ((magnitude >> 13) & 1U);
        return static_cast<uint16_t>(sign | ((rounded - ((127U - 15U) << 23)) >> 13));
    }
    if (magnitude <= 0x33000000U) {  // Up to 2^-25, half of the smallest: to zero.
        return static_cast<uint16_t>(sign);
    }
    // In units of 2^-24: mantissa * 2^(exponent - 150 + 24).
    const uint32_t shift = 126U - (magnitude >> 23);
    const uint32_t mantissa = (magnitude & 0x7FFFFFU) | 0x800000U;
    const uint32_t floor = mantissa >> shift;
    const uint32_t rest = mantissa & ((1U << shift) - 1U);
    const uint32_t middle = 1U << (shift - 1U);
    const bool up = rest > middle || (rest == middle && (floor & 1U) != 0);
    return static_cast<uint16_t>(sign | (floor + (up ? 1U : 0U)));
}

}  // namespace trainstream::optim
