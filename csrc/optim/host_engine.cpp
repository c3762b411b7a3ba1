#include "optim/host_engine.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"

namespace trainstream::optim {
namespace {

/// A piece is long enough to hide that it was fetched, and short enough that threads end together:
/// 32 tiles in fp32 are 1.8 MB of traffic, a fifth of a millisecond of one core.
constexpr size_t kPieceTilesMax = 32;
constexpr size_t kPiecesPerThread = 8;

size_t piece_tiles(size_t tiles, size_t threads) {
    return std::clamp(tiles / (threads * kPiecesPerThread), size_t{1}, kPieceTilesMax);
}

InstructionSet checked(InstructionSet set) {
    if (!is_supported(set)) {
        throw errors::invalid_argument(std::string("this machine cannot run ") + name_of(set) +
                                       "; the best it has is " + name_of(best_instruction_set()) +
                                       ".");
    }
    return set;
}

/// The tiles of several arrays, numbered through.
class TileRanges {
public:
    void add(size_t count) { ends_.push_back(total() + tile_count(count)); }
    size_t total() const { return ends_.empty() ? 0 : ends_.back(); }

    /// Calls visit(array, first tile in it, tiles) for the parts that make up [begin, end).
    template <typename Visit>
    void visit(size_t begin, size_t end, const Visit& visit) const noexcept {
        const auto place = std::upper_bound(ends_.begin(), ends_.end(), begin);
        auto array = static_cast<size_t>(place - ends_.begin());
        while (begin < end) {
            const size_t array_begin = array == 0 ? 0 : ends_[array - 1];
            const size_t tiles = std::min(end, ends_[array]) - begin;
            if (tiles > 0) {
                visit(array, begin - array_begin, tiles);
            }
            begin += tiles;
            ++array;
        }
    }

private:
    std::vector<size_t> ends_;
};

}  // namespace

HostEngine::HostEngine(const HostEngineOptions& options)
    : set_(checked(options.instruction_set)), threads_(options.threads) {}

void HostEngine::update(std::span<const SliceUpdate> updates) {
    TileRanges ranges;
    for (const SliceUpdate& one : updates) {
        ranges.add(one.slice.count);
    }
    const size_t piece = piece_tiles(ranges.total(), threads_.count());
    threads_.parallel_for(ranges.total(), piece, [&](size_t begin, size_t end) noexcept {
        ranges.visit(begin, end, [&](size_t array, size_t tile, size_t tiles) {
            const SliceUpdate& one = updates[array];
            const Slice part = part_of(one.formats, one.slice, tile, tiles);
            optim::update(set_, one.formats, part, one.scalars, one.key);
        });
    });
}

double HostEngine::sum_of_squares(std::span<const Gradient> gradients) {
    TileRanges ranges;
    for (const Gradient& one : gradients) {
        ranges.add(one.count);
    }
    std::vector<double> sums(ranges.total());
    const size_t piece = piece_tiles(ranges.total(), threads_.count());
    threads_.parallel_for(ranges.total(), piece, [&](size_t begin, size_t end) noexcept {
        double* to = sums.data() + begin;
        ranges.visit(begin, end, [&](size_t array, size_t tile, size_t tiles) {
            const Gradient& one = gradients[array];
            const Slice whole = {.count = one.count, .grad = one.grad};
            const Slice part = part_of({.grad = one.format}, whole, tile, tiles);
            tile_square_sums(set_, one.format, part.grad, part.count, to);
            to += tiles;
        });
    });
    return sum_in_order(sums.data(), sums.size());
}

}  // namespace trainstream::optim
