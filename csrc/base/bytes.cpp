#include "base/bytes.h"

#include <array>
#include <cstdio>

namespace trainstream {

std::string format_bytes(uint64_t size_bytes) {
    constexpr std::array<const char*, 4> kUnits = {"KiB", "MiB", "GiB", "TiB"};
    if (size_bytes < kKiB) {
        return std::to_string(size_bytes) + " B";
    }
    auto value = static_cast<double>(size_bytes) / static_cast<double>(kKiB);
    size_t unit = 0;
    while (value >= 1024.0 && unit + 1 < kUnits.size()) {
        value /= 1024.0;
        ++unit;
    }
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.2f %s", value, kUnits.at(unit));
    return text.data();
}

}  // namespace trainstream
