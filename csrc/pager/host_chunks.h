// csrc/pager/host_chunks.h: which part of which chunk is free.
//
// Apart from the pool: no lock, no thread, no memory, so that its rules are tested alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/free_extents.h"
#include "pager/host_runs.h"

namespace trainstream {

/// A part of the host range that was page-locked as one, or refused.
struct HostChunk {
    uintptr_t begin = 0;
    size_t size_bytes = 0;
    bool locked = false;
};

/// What a block is cut from.
struct HostExtent {
    uintptr_t begin = 0;
    bool locked = false;
};

/// Owner: HostPool. Lock: the owner's.
///
/// Invariants:
///   1. Every byte of a chunk is taken or free; free neighbours are one extent.
///   2. No extent spans two locked chunks, nor locked and pageable memory. Pageable neighbours
///   join.
class HostChunks {
public:
    /// A new chunk, all of it free. Requires: it overlaps none.
    void add(const HostChunk& chunk);

    /// Best fit; locked memory before pageable memory.
    std::optional<HostExtent> take(size_t size_bytes);
    void give(uintptr_t begin, size_t size_bytes);

    /// What would be one free extent of `size_bytes` if the copies in it were given up.
    std::optional<HostRun> run_in_chunk(size_t size_bytes,
                                        const std::vector<HostPart>& offers) const;
    /// What would be locked chunks, all free and side by side, of `size_bytes`.
    std::optional<HostRun> run_of_chunks(size_t size_bytes,
                                         const std::vector<HostPart>& offers) const;

    /// Removes the smallest run of neighbouring locked chunks that are all free and have
    /// `size_bytes` together. Empty: there is none.
    std::vector<HostChunk> remove_free_run(size_t size_bytes);

    /// The free pageable bytes that end at `end`.
    size_t pageable_tail_bytes(uintptr_t end) const { return pageable_free_.bytes_ending_at(end); }
    /// The bytes of the locked chunks, all free, that end at `end` one after another.
    size_t free_run_bytes_ending_at(uintptr_t end) const;
    std::vector<HostChunk> locked_chunks() const;
    uint64_t locked_bytes() const { return locked_bytes_; }
    uint64_t pageable_bytes() const { return pageable_bytes_; }

private:
    bool is_all_free(const HostChunk& chunk) const;
    bool is_border(uintptr_t address) const;
    std::vector<HostPart> parts_with(const std::vector<HostPart>& offers) const;

    std::map<uintptr_t, HostChunk> chunks_;
    FreeExtents locked_free_;
    FreeExtents pageable_free_;
    uint64_t locked_bytes_ = 0;
    uint64_t pageable_bytes_ = 0;
};

}  // namespace trainstream
