#include "base/text_file.h"

#include <array>
#include <charconv>
#include <cstdio>
#include <memory>

namespace trainstream {

std::optional<std::string> read_text_file(const std::string& path) {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"),
                                                               &std::fclose);
    if (file == nullptr) {
        return std::nullopt;
    }
    std::string text;
    std::array<char, 4096> piece{};
    size_t size = 0;
    while ((size = std::fread(piece.data(), 1, piece.size(), file.get())) > 0) {
        text.append(piece.data(), size);
    }
    return text;
}

std::vector<std::string_view> lines_of(std::string_view text) {
    std::vector<std::string_view> lines;
    while (!text.empty()) {
        const size_t end = text.find('\n');
        lines.push_back(text.substr(0, end));
        text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    }
    return lines;
}

std::optional<int64_t> leading_number(std::string_view text) {
    const size_t begin = text.find_first_not_of(" \t");
    if (begin == std::string_view::npos) {
        return std::nullopt;
    }
    int64_t number = 0;
    const auto result = std::from_chars(text.data() + begin, text.data() + text.size(), number);
    if (result.ec != std::errc{}) {
        return std::nullopt;
    }
    return number;
}

}  // namespace trainstream
