#include "base/cgroups.h"

#include <string_view>

#include "base/text_file.h"

namespace trainstream {

namespace {

using Visit = std::function<void(int version, const std::string& directory)>;

void visit_up_to_root(int version, const std::string& mount, std::string path, const Visit& visit) {
    for (;;) {
        visit(version, mount + path);
        const size_t slash = path.rfind('/');
        if (path.empty() || slash == std::string::npos) {
            return;
        }
        path.resize(slash);
    }
}

}  // namespace

void for_each_cgroup(const std::string& root, const std::string& controller,
                     const Visit& function) {
    const std::string mount = root + "/sys/fs/cgroup";
    const std::string text = read_text_file(root + "/proc/self/cgroup").value_or("");
    // "hierarchy:controllers:path"; hierarchy 0 is version 2.
    for (const std::string_view view : lines_of(text)) {
        const std::string line(view);
        const size_t first = line.find(':');
        const size_t second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) {
            continue;
        }
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const std::string path = line.substr(second + 1);
        if (line.substr(0, first) == "0") {
            visit_up_to_root(2, mount, path, function);
        } else if (controllers.find("," + controller + ",") != std::string::npos) {
            visit_up_to_root(1, mount + "/" + controller, path, function);
        }
    }
}

}  // namespace trainstream
