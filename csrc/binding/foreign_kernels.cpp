#include "binding/foreign_kernels.h"

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

#include <c10/core/Allocator.h>

#include "base/loaded_libraries.h"

namespace trainstream {

namespace {

namespace fs = std::filesystem;

bool lies_in(const fs::path& path, const fs::path& folder) {
    const auto [end, rest] = std::mismatch(folder.begin(), folder.end(), path.begin(), path.end());
    static_cast<void>(rest);
    return end == folder.end();
}

/// Packages whose kernels are all operators, or are announced by their own code: torch's own, which
/// lies in torch/lib, and its neighbours; and this library.
std::vector<fs::path> known_places() {
    const auto real = [](const std::string& path) { return fs::weakly_canonical(path); };
    const auto c10_function = &c10::GetAllocator;
    const fs::path torch =
        real(library_of(reinterpret_cast<const void*>(c10_function))).parent_path().parent_path();
    std::vector<fs::path> places = {torch,
                                    real(library_of(reinterpret_cast<const void*>(&known_places)))};
    for (const char* name : {"torchvision", "torchaudio", "functorch"}) {
        places.push_back(torch.parent_path() / name);
    }
    return places;
}

bool look() {
    const std::vector<fs::path> places = known_places();
    const std::vector<std::string> libraries = libraries_that_need({"libtorch", "libc10"});
    return std::any_of(libraries.begin(), libraries.end(), [&](const std::string& library) {
        const fs::path path = fs::weakly_canonical(library);
        return std::none_of(places.begin(), places.end(),
                            [&](const fs::path& place) { return lies_in(path, place); });
    });
}

}  // namespace

bool foreign_kernels_loaded() {
    static std::mutex mutex;  // A leaf.
    static uint64_t looked_at = 0;
    static bool found = false;
    std::lock_guard<std::mutex> lock(mutex);
    const uint64_t loaded = libraries_loaded();
    if (loaded != looked_at) {
        found = look();
        looked_at = loaded;
    }
    return found;
}

}  // namespace trainstream
