// csrc/base/loaded_libraries.h: the libraries that this process has loaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trainstream {

/// How many were ever loaded: as long as this is the same, none has been since.
uint64_t libraries_loaded();
/// Paths of those that name, as one that they need, a library whose name begins with one of
/// `names`.
std::vector<std::string> libraries_that_need(const std::vector<std::string>& names);
/// The path of the one that `address` lies in; empty where there is none.
std::string library_of(const void* address);

}  // namespace trainstream
