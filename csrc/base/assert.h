// csrc/base/assert.h: checks of what our own code promised. Debug builds stop; release builds do
// not evaluate them. Errors a user can cause are in base/error.h.
#pragma once

#include <sstream>
#include <string>

namespace trainstream::detail {

/// Prints the failed check and aborts.
[[noreturn]] void assertion_failed(const char* expression, const std::string& values,
                                   const char* file, int line);

template <typename A, typename B>
std::string assertion_values(const A& left, const B& right) {
    std::ostringstream text;
    text << " (" << left << " against " << right << ")";
    return text.str();
}

}  // namespace trainstream::detail

#ifdef TS_DEBUG_CHECKS
#define TS_ASSERT(condition)                                                             \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            ::trainstream::detail::assertion_failed(#condition, "", __FILE__, __LINE__); \
        }                                                                                \
    } while (false)
#define TS_ASSERT_OP(left, op, right)                                                          \
    do {                                                                                       \
        if (!((left)op(right))) {                                                              \
            ::trainstream::detail::assertion_failed(                                           \
                #left " " #op " " #right,                                                      \
                ::trainstream::detail::assertion_values((left), (right)), __FILE__, __LINE__); \
        }                                                                                      \
    } while (false)
#else
#define TS_ASSERT(condition) static_cast<void>(sizeof(!(condition)))
#define TS_ASSERT_OP(left, op, right) static_cast<void>(sizeof((left)op(right)))
#endif

#define TS_ASSERT_EQ(left, right) TS_ASSERT_OP(left, ==, right)
#define TS_ASSERT_NE(left, right) TS_ASSERT_OP(left, !=, right)
#define TS_ASSERT_LE(left, right) TS_ASSERT_OP(left, <=, right)
#define TS_ASSERT_LT(left, right) TS_ASSERT_OP(left, <, right)
#define TS_ASSERT_GE(left, right) TS_ASSERT_OP(left, >=, right)
#define TS_ASSERT_GT(left, right) TS_ASSERT_OP(left, >, right)
