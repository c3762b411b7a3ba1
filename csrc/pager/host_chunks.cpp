#include "pager/host_chunks.h"

#include <algorithm>
#include <iterator>

#include "base/assert.h"

namespace trainstream {

void HostChunks::add(const HostChunk& chunk) {
    chunks_.emplace(chunk.begin, chunk);
    if (chunk.locked) {
        locked_free_.add_border(chunk.begin);
        locked_bytes_ += chunk.size_bytes;
    } else {
        pageable_bytes_ += chunk.size_bytes;
    }
    give(chunk.begin, chunk.size_bytes);
}

std::optional<HostExtent> HostChunks::take(size_t size_bytes) {
    if (const std::optional<uintptr_t> begin = locked_free_.take(size_bytes)) {
        return HostExtent{*begin, true};
    }
    if (const std::optional<uintptr_t> begin = pageable_free_.take(size_bytes)) {
        return HostExtent{*begin, false};
    }
    return std::nullopt;
}

void HostChunks::give(uintptr_t begin, size_t size_bytes) {
    const auto next = chunks_.upper_bound(begin);
    TS_ASSERT(next != chunks_.begin());
    const HostChunk& chunk = std::prev(next)->second;
    (chunk.locked ? locked_free_ : pageable_free_).insert(begin, size_bytes);
}

std::optional<HostRun> HostChunks::run_in_chunk(size_t size_bytes,
                                                const std::vector<HostPart>& offers) const {
    return best_run(parts_with(offers), size_bytes);
}

std::optional<HostRun> HostChunks::run_of_chunks(size_t size_bytes,
                                                 const std::vector<HostPart>& offers) const {
    const std::vector<HostPart> parts = parts_with(offers);
    std::vector<HostPart> whole;
    auto part = parts.begin();
    for (const auto& [begin, chunk] : chunks_) {
        const uintptr_t end = begin + chunk.size_bytes;
        HostPart all{begin, 0};
        for (; part != parts.end() && part->begin < end; ++part) {
            all.size_bytes += part->size_bytes;
            all.heat = std::min(all.heat, part->heat);
        }
        if (chunk.locked && all.size_bytes == chunk.size_bytes) {
            whole.push_back(all);
        }
    }
    return best_run(whole, size_bytes);
}

/// What is free or offered, by rising address.
std::vector<HostPart> HostChunks::parts_with(const std::vector<HostPart>& offers) const {
    std::vector<HostPart> parts = offers;
    for (const FreeExtents* free : {&locked_free_, &pageable_free_}) {
        for (const auto& [begin, size_bytes] : free->by_address()) {
            parts.push_back({begin, size_bytes});
        }
    }
    std::sort(parts.begin(), parts.end(),
              [](const HostPart& a, const HostPart& b) { return a.begin < b.begin; });
    for (HostPart& part : parts) {
        part.after_border = is_border(part.begin);
    }
    return parts;
}

/// Free bytes on both sides never are one extent.
bool HostChunks::is_border(uintptr_t address) const {
    const auto next = chunks_.upper_bound(address);
    if (next == chunks_.begin() || std::prev(next)->first != address) {
        return false;
    }
    const auto chunk = std::prev(next);
    return chunk->second.locked || chunk == chunks_.begin() || std::prev(chunk)->second.locked;
}

std::vector<HostChunk> HostChunks::remove_free_run(size_t size_bytes) {
    const std::optional<HostRun> run = run_of_chunks(size_bytes, {});
    if (!run.has_value()) {
        return {};
    }
    std::vector<HostChunk> removed;
    for (auto next = chunks_.find(run->begin); next != chunks_.end() && run->has(next->first);) {
        const HostChunk& chunk = removed.emplace_back(next->second);
        locked_free_.remove(chunk.begin, chunk.size_bytes);
        locked_free_.remove_border(chunk.begin);
        locked_bytes_ -= chunk.size_bytes;
        next = chunks_.erase(next);
    }
    return removed;
}

size_t HostChunks::free_run_bytes_ending_at(uintptr_t end) const {
    uintptr_t begin = end;
    for (auto chunk = chunks_.rbegin(); chunk != chunks_.rend(); ++chunk) {
        const HostChunk& last = chunk->second;
        if (last.begin + last.size_bytes != begin || !is_all_free(last)) {
            break;
        }
        begin = last.begin;
    }
    return end - begin;
}

bool HostChunks::is_all_free(const HostChunk& chunk) const {
    // Extents of locked memory do not span chunks, so this one is the chunk or a part of it.
    return chunk.locked &&
           locked_free_.bytes_ending_at(chunk.begin + chunk.size_bytes) == chunk.size_bytes;
}

std::vector<HostChunk> HostChunks::locked_chunks() const {
    std::vector<HostChunk> locked;
    for (const auto& [begin, chunk] : chunks_) {
        if (chunk.locked) {
            locked.push_back(chunk);
        }
    }
    return locked;
}

}  // namespace trainstream
