#include "pager/memory_planner.h"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "base/assert.h"
#include "base/error.h"

namespace trainstream {

namespace {

// Halving 48 blocks of headroom takes 7 refinements. After so many, a plan takes all of it.
constexpr size_t kGentleRefinements = 8;

uint64_t less(uint64_t from, uint64_t bytes) { return from - std::min(from, bytes); }

uint64_t two_largest(const std::vector<uint64_t>& block_bytes) {
    return block_bytes.empty() ? 0 : 2 * *std::max_element(block_bytes.begin(), block_bytes.end());
}

}  // namespace

MemoryPlanner::MemoryPlanner(const Budget& budget, std::vector<uint64_t> block_bytes,
                             uint64_t fixed_bytes, uint64_t inflight_bytes)
    : budget_(budget),
      block_bytes_(std::move(block_bytes)),
      classes_(classes_of(block_bytes_)),
      inflight_bytes_(inflight_bytes) {
    if (classes_.empty() || classes_.back().size_bytes == 0) {
        throw errors::invalid_argument("a plan needs at least one block, and each has bytes.");
    }
    for (const SizeClass& size : classes_) {
        total_bytes_ += size.bytes();
    }
    outside_whole_ = fixed_bytes;
    fit_inflight(fixed_bytes, 0);
    initial_paged_ = plan();

    const uint64_t paged = paged_bytes(initial_paged_);
    if (paged > 0) {  // More stay than the target has room for, where the host has no room.
        fit_inflight(fixed_bytes, total_bytes_ - paged);
    }
    budget_.check({fixed_bytes, total_bytes_ - paged, paged > 0 ? inflight_bytes_ : 0, paged});
}

MemoryPlanner::MemoryPlanner(const Budget& budget, const std::vector<uint64_t>& block_bytes,
                             uint64_t fixed_bytes)
    : MemoryPlanner(budget, block_bytes, fixed_bytes, two_largest(block_bytes)) {}

/// One frame is enough to run; more of them only hide copies.
void MemoryPlanner::fit_inflight(uint64_t fixed_bytes, uint64_t resident_bytes) {
    const uint64_t least = std::min(inflight_bytes_, classes_.front().size_bytes);
    const uint64_t room = less(budget_.device_target_bytes(), fixed_bytes + resident_bytes);
    inflight_bytes_ = std::clamp(room, least, inflight_bytes_);
    outside_paging_ = fixed_bytes + inflight_bytes_;
}

BlockSet MemoryPlanner::refine(uint64_t peak_bytes, const BlockSet& paged) {
    check_blocks(paged);
    learn(peak_bytes, paged);
    ++refinements_;

    BlockSet next = plan();
    const uint64_t resident = total_bytes_ - paged_bytes(paged);
    const uint64_t best = total_bytes_ - paged_bytes(next);
    if (best == resident) {
        next = paged;  // As good, and nothing has to move.
    } else if (best > resident && refinements_ <= kGentleRefinements) {
        BlockSet half = keeping(resident + (best - resident) / 2);
        if (total_bytes_ - paged_bytes(half) > resident) {
            next = std::move(half);
        }
    }
    done_ = next == paged;
    return next;
}

void MemoryPlanner::learn(uint64_t peak_bytes, const BlockSet& paged) {
    const uint64_t outside = less(peak_bytes, total_bytes_ - paged_bytes(paged));
    if (refinements_ == 0) {
        outside_whole_ = outside_paging_ = 0;
    }
    outside_whole_ = std::max(outside_whole_, outside);
    // Frames may or may not have been part of the peak while there were some: taken as a part that
    // stays, since a plan without them would be a guess. While there were none, they come on top.
    outside_paging_ =
        std::max(outside_paging_, paged.empty() ? outside + inflight_bytes_ : outside);
    TS_ASSERT_LE(outside_whole_, outside_paging_);
}

/// The set that keeps most bytes on the device within the target; or, where the host has no room
/// for the others, the set that pages most.
BlockSet MemoryPlanner::plan() const {
    const uint64_t target = budget_.device_target_bytes();
    if (outside_whole_ + total_bytes_ <= target) {
        return {};
    }
    BlockSet paged = keeping(less(target, outside_paging_));
    if (paged_bytes(paged) <= budget_.host_bytes || !budget_.check_memory) {
        return paged;
    }
    return paging(fullest_counts(classes_, budget_.host_bytes));
}

BlockSet MemoryPlanner::keeping(uint64_t resident_bytes) const {
    std::vector<size_t> counts = fullest_counts(classes_, resident_bytes);
    for (size_t i = 0; i < counts.size(); ++i) {
        counts[i] = classes_[i].blocks.size() - counts[i];
    }
    return paging(counts);
}

/// So many of each class, evenly spread over it.
BlockSet MemoryPlanner::paging(const std::vector<size_t>& counts) const {
    BlockSet paged;
    for (size_t i = 0; i < counts.size(); ++i) {
        const std::vector<size_t>& blocks = classes_[i].blocks;
        for (const size_t position : spread(counts[i], blocks.size())) {
            paged.push_back(blocks[position]);
        }
    }
    std::sort(paged.begin(), paged.end());
    return paged;
}

uint64_t MemoryPlanner::device_bytes(const BlockSet& paged) const {
    check_blocks(paged);
    const uint64_t outside = paged.empty() ? outside_whole_ : outside_paging_;
    return outside + total_bytes_ - paged_bytes(paged);
}

uint64_t MemoryPlanner::paged_bytes(const BlockSet& paged) const {
    uint64_t bytes = 0;
    for (const size_t block : paged) {
        bytes += block_bytes_[block];
    }
    return bytes;
}

void MemoryPlanner::check_blocks(const BlockSet& paged) const {
    const bool rising =
        std::adjacent_find(paged.begin(), paged.end(), std::greater_equal<>()) == paged.end();
    if (!rising || (!paged.empty() && paged.back() >= block_bytes_.size())) {
        throw errors::invalid_argument("paged blocks are named by rising indices below " +
                                       std::to_string(block_bytes_.size()) + ", each once.");
    }
}

}  // namespace trainstream
