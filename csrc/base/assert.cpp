#include "base/assert.h"

#include <cstdio>
#include <cstdlib>

namespace trainstream::detail {

void assertion_failed(const char* expression, const std::string& values, const char* file,
                      int line) {
    std::fprintf(stderr, "trainstream: %s:%d: check failed: %s%s\n", file, line, expression,
                 values.c_str());
    std::abort();
}

}  // namespace trainstream::detail
