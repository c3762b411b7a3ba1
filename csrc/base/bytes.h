// csrc/base/bytes.h: sizes in bytes: units, alignment and how a person reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace trainstream {

inline constexpr size_t kKiB = size_t{1} << 10;
inline constexpr size_t kMiB = size_t{1} << 20;
inline constexpr size_t kGiB = size_t{1} << 30;

/// Every place a storage can be in is aligned like torch's own blocks: kernels and libraries choose
/// algorithms, and so bits, by alignment.
inline constexpr size_t kBlockAlignment = 512;

/// The smallest multiple of `alignment`, a power of two, that is at least `value`.
constexpr size_t align_up(size_t value, size_t alignment) {
    return (value + alignment - 1) & ~(alignment - 1);
}

/// "1.50 GiB", "64.00 MiB", "512 B".
std::string format_bytes(uint64_t size_bytes);

}  // namespace trainstream
