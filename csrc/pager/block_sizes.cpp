#include "pager/block_sizes.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "base/assert.h"

namespace trainstream {

namespace {

constexpr size_t kStepsMax = size_t{1} << 20;

/// Depth first, the most of the largest size first; so the first leaf is the greedy answer.
///
/// Owner: one call of fullest_counts(). Lock: none. Invariants: `best_` fits the capacity;
/// `best_bytes_` are its bytes and only grow.
class CountSearch {
public:
    CountSearch(const std::vector<SizeClass>& classes, uint64_t capacity_bytes)
        : classes_(classes),
          chosen_(classes.size()),
          best_(classes.size()),
          rest_bytes_(classes.size() + 1),
          rest_factor_(classes.size() + 1) {
        for (size_t i = classes.size(); i-- > 0;) {
            rest_bytes_[i] = rest_bytes_[i + 1] + classes[i].bytes();
            rest_factor_[i] = std::gcd(rest_factor_[i + 1], classes[i].size_bytes);
        }
        descend(0, 0, capacity_bytes);
    }

    const std::vector<size_t>& best() const { return best_; }

private:
    /// Classes before `i` are chosen and take `bytes`; `left` are left.
    void descend(size_t i, uint64_t bytes, uint64_t left) {
        if (rest_bytes_[i] <= left) {
            keep_with_rest(i, bytes + rest_bytes_[i]);
            return;
        }
        // What is left is filled in multiples of the remaining sizes' common factor at best.
        if (bytes + left / rest_factor_[i] * rest_factor_[i] <= best_bytes_) {
            return;
        }
        const SizeClass& size = classes_[i];
        size_t count = std::min<uint64_t>(size.blocks.size(), left / size.size_bytes);
        for (++count; count-- > 0 && ++steps_ < kStepsMax;) {
            chosen_[i] = count;
            descend(i + 1, bytes + count * size.size_bytes, left - count * size.size_bytes);
        }
    }

    void keep_with_rest(size_t i, uint64_t bytes) {
        if (bytes <= best_bytes_) {
            return;
        }
        best_bytes_ = bytes;
        best_ = chosen_;
        for (; i < classes_.size(); ++i) {
            best_[i] = classes_[i].blocks.size();
        }
    }

    const std::vector<SizeClass>& classes_;
    std::vector<size_t> chosen_;
    std::vector<size_t> best_;
    uint64_t best_bytes_ = 0;
    std::vector<uint64_t> rest_bytes_;   // Of the classes from i on.
    std::vector<uint64_t> rest_factor_;  // The greatest that divides all their sizes.
    size_t steps_ = 0;
};

}  // namespace

std::vector<SizeClass> classes_of(const std::vector<uint64_t>& block_bytes) {
    std::map<uint64_t, std::vector<size_t>, std::greater<>> by_size;
    for (size_t i = 0; i < block_bytes.size(); ++i) {
        by_size[block_bytes[i]].push_back(i);
    }
    std::vector<SizeClass> classes;
    classes.reserve(by_size.size());
    for (auto& [size_bytes, blocks] : by_size) {
        classes.push_back({size_bytes, std::move(blocks)});
    }
    return classes;
}

std::vector<size_t> fullest_counts(const std::vector<SizeClass>& classes, uint64_t capacity_bytes) {
    return CountSearch(classes, capacity_bytes).best();
}

std::vector<size_t> spread(size_t k, size_t n) {
    TS_ASSERT_LE(k, n);
    std::vector<size_t> positions;
    positions.reserve(k);
    for (size_t i = 0; i < k; ++i) {
        positions.push_back((2 * i + 1) * n / (2 * k));
    }
    return positions;
}

}  // namespace trainstream
