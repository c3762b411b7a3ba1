#include "pager/host_chunks.h"

#include <deque>
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

std::vector<HostChunk> HostChunks::remove_free_run(size_t size_bytes) {
    std::vector<HostChunk> best;
    size_t best_bytes = SIZE_MAX;
    std::deque<HostChunk> run;  // Neighbours, all free; no shorter run with this end is enough.
    size_t run_bytes = 0;
    for (const auto& [begin, chunk] : chunks_) {
        if (!is_all_free(chunk)) {
            run.clear();
            run_bytes = 0;
            continue;
        }
        if (!run.empty() && run.back().begin + run.back().size_bytes != begin) {
            run.clear();
            run_bytes = 0;
        }
        run.push_back(chunk);
        run_bytes += chunk.size_bytes;
        while (run_bytes - run.front().size_bytes >= size_bytes) {
            run_bytes -= run.front().size_bytes;
            run.pop_front();
        }
        if (run_bytes >= size_bytes && run_bytes < best_bytes) {
            best.assign(run.begin(), run.end());
            best_bytes = run_bytes;
        }
    }
    for (const HostChunk& chunk : best) {
        locked_free_.remove(chunk.begin, chunk.size_bytes);
        locked_free_.remove_border(chunk.begin);
        locked_bytes_ -= chunk.size_bytes;
        chunks_.erase(chunk.begin);
    }
    return best;
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
