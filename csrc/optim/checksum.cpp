#include "optim/checksum.h"

#include <algorithm>

#include "base/assert.h"

namespace trainstream::optim {
namespace {

constexpr ChecksumFactors make_factors() {
    ChecksumFactors factors{};
    for (size_t place = 0; place < kTile; ++place) {
        factors.at[place] = checksum_factor(place);
    }
    return factors;
}

}  // namespace

constinit const ChecksumFactors kChecksumFactors = make_factors();

uint32_t checksum(const uint16_t* weights, size_t count) {
    TS_ASSERT_LE(count, kTile);
    uint32_t sum = 0;
    for (size_t i = 0; i < count; ++i) {
        const auto weight = static_cast<int16_t>(weights[i]);
        sum += static_cast<uint32_t>(weight * kChecksumFactors.at[i]);
    }
    return sum;
}

void checksum_tiles(const uint16_t* weights, size_t count, uint32_t* checksums) {
    for (size_t begin = 0; begin < count; begin += kTile) {
        *checksums++ = checksum(weights + begin, std::min(kTile, count - begin));
    }
}

}  // namespace trainstream::optim
