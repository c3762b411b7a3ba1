// csrc/pager/block_sizes.h: blocks by their size, and which of them fill a capacity best.
//
// Apart from the planner, so that the search is compared with all subsets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trainstream {

/// Blocks of one size, by rising index.
struct SizeClass {
    uint64_t size_bytes = 0;
    std::vector<size_t> blocks;

    uint64_t bytes() const { return size_bytes * blocks.size(); }
};

/// The classes of `block_bytes`, largest size first.
std::vector<SizeClass> classes_of(const std::vector<uint64_t>& block_bytes);

/// How many blocks of each class to take, so that their bytes are as many as `capacity_bytes`
/// holds. Models have a few sizes of block, and then the answer is exact; for dozens of sizes with
/// no common factor the search ends after a million steps (20 ms) with the best it has seen, which
/// is never worse than largest first.
std::vector<size_t> fullest_counts(const std::vector<SizeClass>& classes, uint64_t capacity_bytes);

/// `k` of `n` positions, evenly spaced: n/k apart, rounded, with half of that before the first.
/// Requires: k <= n.
std::vector<size_t> spread(size_t k, size_t n);

}  // namespace trainstream
