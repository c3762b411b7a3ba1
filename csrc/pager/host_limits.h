// csrc/pager/host_limits.h: how much host memory this process may still take.
//
// Apart from the pool, so that it is tested on made-up files.
#pragma once

#include <cstdint>
#include <string>

namespace trainstream {

/// min(cgroup limit - usage, MemAvailable), less 1/16 kept back. `root` stands before every path
/// that is read: "" for the running system.
///
/// Both versions of cgroups count, and every cgroup from the process's own up to the root, since
/// each limits those below it. File cache that nobody uses now is given back by the kernel under
/// pressure, so it does not count as usage.
uint64_t available_host_bytes_under(const std::string& root);

}  // namespace trainstream
