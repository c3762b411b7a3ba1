// csrc/base/cgroups.h: the control groups that this process is in, as the kernel's files tell.
#pragma once

#include <functional>
#include <string>

namespace trainstream {

/// Calls function(version, directory) for each group of this process that `controller` ("memory",
/// "cpu") may limit, up to the root: version 2's, and version 1's of that controller. `root` is
/// what stands before every path: "" but in tests. A directory may be missing: a container does not
/// see all of them.
void for_each_cgroup(
    const std::string& root, const std::string& controller,
    const std::function<void(int version, const std::string& directory)>& function);

}  // namespace trainstream
