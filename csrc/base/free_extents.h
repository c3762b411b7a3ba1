// csrc/base/free_extents.h: the free parts of an address range: best fit, joined on return.
//
// Apart from who owns the range: the simulated device's arena and the host pool share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace trainstream {

/// Free extents by address and by size.
///
/// Owner: SimMemory, HostPool. Lock: the owner's.
///
/// Invariants:
///   1. No two extents overlap, and none touch except at a border: a returned part joins its free
///      neighbours at once.
///   2. Both indexes hold the same extents, and free_bytes() is their sum.
class FreeExtents {
public:
    /// Gives [begin, begin + size_bytes) back. Requires: no byte of it is free already.
    void insert(uintptr_t begin, size_t size_bytes);

    /// Takes `size_bytes` from the low end of the smallest extent that has them; of equals, the
    /// one with the lowest address. Nothing: no extent is large enough.
    std::optional<uintptr_t> take(size_t size_bytes);

    /// Takes `size_bytes` from the high end of the highest extent that has them.
    std::optional<uintptr_t> take_high(size_t size_bytes);

    /// Takes exactly [begin, begin + size_bytes), which must be one extent.
    void remove(uintptr_t begin, size_t size_bytes);

    /// Extents never join at `address` from now on. Requires: it lies inside no extent.
    void add_border(uintptr_t address) { borders_.insert(address); }
    void remove_border(uintptr_t address) { borders_.erase(address); }

    /// The size of the extent that ends exactly at `end`; 0 when there is none.
    size_t bytes_ending_at(uintptr_t end) const;

    /// The size of each extent under its begin.
    const std::map<uintptr_t, size_t>& by_address() const { return by_address_; }
    size_t free_bytes() const { return free_bytes_; }
    size_t largest_bytes() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
    size_t count() const { return by_address_.size(); }

private:
    using ByAddress = std::map<uintptr_t, size_t>;

    void erase(ByAddress::iterator extent);
    bool is_border(uintptr_t address) const { return borders_.count(address) != 0; }

    ByAddress by_address_;
    std::set<std::pair<size_t, uintptr_t>> by_size_;
    std::set<uintptr_t> borders_;
    size_t free_bytes_ = 0;
};

}  // namespace trainstream
