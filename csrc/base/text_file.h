// csrc/base/text_file.h: the small files in which the kernel answers questions.
//
// Over C's streams. The library may carry a copy of the C++ runtime of its own, whose iostreams are
// never set up when another copy came first: reading a number there crashed.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trainstream {

/// The whole file; nothing when it cannot be read.
std::optional<std::string> read_text_file(const std::string& path);

/// The lines of `text`, without their ends.
std::vector<std::string_view> lines_of(std::string_view text);

/// The whole number that `text` starts with, blanks skipped. Nothing when it starts with a word.
std::optional<int64_t> leading_number(std::string_view text);

}  // namespace trainstream
