// csrc/pager/host_caches.h: how large the caches before host memory are.
//
// Apart from the hardware profile, so that it is tested on made-up files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace trainstream {

/// The last-level caches of `cpus` together, in bytes; one that several share counts once. `root`
/// stands before every path that is read: "" for the running system. 0: the files tell nothing.
uint64_t last_level_cache_bytes_under(const std::string& root, std::span<const size_t> cpus);

/// Those of the CPUs that this process may run on.
uint64_t last_level_cache_bytes();

}  // namespace trainstream
