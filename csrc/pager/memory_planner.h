// csrc/pager/memory_planner.h: which blocks of a model stay in device memory and which are paged.
//
// For those who move whole blocks (layers) themselves. Knows sizes and measured peaks only: it
// moves nothing, so it is tested with made-up peaks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pager/block_sizes.h"
#include "pager/budget.h"

namespace trainstream {

/// Indices of blocks, rising.
using BlockSet = std::vector<size_t>;

/// Plans from an estimate, then from measured peaks.
///
/// What a peak holds beyond the resident blocks is "outside": activations, frames, fragments. The
/// first measurement takes the estimate's place; after it outside only grows, to the highest that
/// was measured. So the bytes that may stay only shrink, and a plan, once it went down, never goes
/// up again: no sequence of peaks makes it oscillate, and what was needed once is kept room for.
///
/// On the way up it takes half of the headroom at a time: a peak need not grow by just what came
/// back, and half a guess can be wrong by half as much.
///
/// Owner: the caller. Lock: none; one thread at a time.
/// Invariants:
///   1. outside_whole_ <= outside_paging_: nothing paged needs no frames.
///   2. After the first refine() neither of them shrinks.
class MemoryPlanner {
public:
    /// `fixed_bytes`: an estimate of the device bytes outside the blocks and their frames.
    /// `inflight_bytes`: frames to use while something is paged; where there is no room for so
    /// many, as many as there is room for, but at least one block's.
    /// Throws Error: kInvalidArgument for no block or one of 0 bytes; kOutOfMemory where no set
    /// fits.
    MemoryPlanner(const Budget& budget, std::vector<uint64_t> block_bytes, uint64_t fixed_bytes,
                  uint64_t inflight_bytes);
    /// The same with frames for two of the largest blocks: one in use, one on its way.
    MemoryPlanner(const Budget& budget, const std::vector<uint64_t>& block_bytes,
                  uint64_t fixed_bytes);

    const BlockSet& initial_paged() const { return initial_paged_; }
    /// The set to page after a step with `paged` had a peak of `peak_bytes` on the device: more
    /// blocks than before where that was over the target, fewer where there was headroom.
    /// Throws Error(kInvalidArgument) where `paged` is no rising list of this planner's blocks.
    BlockSet refine(uint64_t peak_bytes, const BlockSet& paged);
    /// The last peak changed nothing. A later one may.
    bool done() const { return done_; }

    /// The device bytes that `paged` is expected to take at its peak.
    uint64_t device_bytes(const BlockSet& paged) const;
    uint64_t inflight_bytes() const { return inflight_bytes_; }
    const Budget& budget() const { return budget_; }

private:
    uint64_t paged_bytes(const BlockSet& paged) const;
    void check_blocks(const BlockSet& paged) const;
    void fit_inflight(uint64_t fixed_bytes, uint64_t resident_bytes);
    void learn(uint64_t peak_bytes, const BlockSet& paged);
    BlockSet plan() const;
    BlockSet keeping(uint64_t resident_bytes) const;
    BlockSet paging(const std::vector<size_t>& counts) const;

    const Budget budget_;
    const std::vector<uint64_t> block_bytes_;
    const std::vector<SizeClass> classes_;
    uint64_t total_bytes_ = 0;
    uint64_t inflight_bytes_;
    uint64_t outside_whole_ = 0;   // While nothing is paged.
    uint64_t outside_paging_ = 0;  // Otherwise; frames included.
    BlockSet initial_paged_;
    size_t refinements_ = 0;
    bool done_ = false;
};

}  // namespace trainstream
