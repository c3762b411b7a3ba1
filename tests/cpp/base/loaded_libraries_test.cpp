#include "base/loaded_libraries.h"

#include <gtest/gtest.h>

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>

namespace trainstream {
namespace {

// The C++ library needs the C library, whatever both are called here.
TEST(LoadedLibrariesTest, TellsWhoNeedsALibrary) {
    const std::vector<std::string> found = libraries_that_need({"no-such", "libc."});
    const bool has_cxx = std::any_of(found.begin(), found.end(), [](const std::string& path) {
        return path.find("stdc++") != std::string::npos;
    });
    EXPECT_TRUE(has_cxx) << found.size();
    EXPECT_TRUE(libraries_that_need({"no-such-library"}).empty());
    EXPECT_TRUE(libraries_that_need({}).empty());
}

TEST(LoadedLibrariesTest, CountsWhatIsLoaded) {
    const uint64_t before = libraries_loaded();
    EXPECT_EQ(libraries_loaded(), before);
    void* library = dlopen("libanl.so.1", RTLD_NOW);  // Of the C library, and not loaded yet.
    ASSERT_NE(library, nullptr) << dlerror();
    EXPECT_GT(libraries_loaded(), before);
    dlclose(library);
}

TEST(LoadedLibrariesTest, TellsWhereAFunctionLies) {
    EXPECT_NE(library_of(reinterpret_cast<const void*>(&std::getenv)).find("libc"),
              std::string::npos);
    int local = 0;
    EXPECT_EQ(library_of(&local), "");
}

}  // namespace
}  // namespace trainstream
