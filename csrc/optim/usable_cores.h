// csrc/optim/usable_cores.h: how many cores this process may use.
//
// OMP_NUM_THREADS is not asked: launchers set it to 1 for each process so that many fit, and an
// update that waits for host memory would then use a tenth of it.
#pragma once

#include <cstddef>
#include <string>

namespace trainstream::optim {

/// The calling thread's affinity mask, and no more than the cgroups' quota. At least 1.
size_t usable_cores();

/// The quota of processor time of both versions of cgroups, in cores, rounded up; SIZE_MAX without
/// one. The least counts of every cgroup from the process's own up to the root. `root` stands
/// before every path that is read: "" for the running system.
size_t cgroup_cores_under(const std::string& root);

}  // namespace trainstream::optim
